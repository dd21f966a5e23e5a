"""Call pandoc and Typst, and say of a fault in which notebook it is.

Both come as wheels with all they need: no LaTeX, no font of the system, no network.
PDFs are made as PDF/UA-1, the standard of accessible documents; Typst then refuses a picture
without alternative text, and a character that no font has.
"""

import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

ROOM = Path(__file__).parent
API = [1, 23, 1]
# Typst's wheel has no sans.
FONTS = Path(find_spec("matplotlib").origin).parent / "mpl-data" / "fonts" / "ttf"


class Unprintable(Exception):
    """Something in a notebook that no page can hold; each line begins with its place."""


def prepare(work: Path) -> None:
    """Lay out the folder that Typst sees: styles, and room for pictures and text."""
    (work / "media").mkdir(parents=True, exist_ok=True)
    for name in ("paper.typ", "paper.tmTheme"):
        shutil.copyfile(ROOM / name, work / name)


def parsed(texts: list[tuple[str, str]]) -> list[list[dict]]:
    """The blocks of each text; before it stands its format, markdown or html."""
    raw = [{"t": "RawBlock", "c": list(text)} for text in texts]
    said = pandoc(raw, "-t", "json", "--lua-filter", ROOM / "read.lua")
    return [div["c"][1] for div in json.loads(said)["blocks"]]


def pandoc(blocks: list[dict], *options: str | Path, **words: object) -> str:
    """Run pandoc on blocks, with these words for the template."""
    import pypandoc

    given = {"pandoc-api-version": API, "meta": _meta(words)["c"], "blocks": blocks}
    command = [pypandoc.get_pandoc_path(), "-f", "json", "--wrap=none", *options]
    how = {"capture_output": True, "encoding": "utf-8"}
    done = subprocess.run(command, input=json.dumps(given), **how)
    if done.returncode or done.stderr.strip():
        raise Unprintable(f"pandoc said: {done.stderr.strip()}")
    return done.stdout


def _meta(value: object) -> dict:
    if isinstance(value, dict):
        made = {key: _meta(v) for key, v in value.items()}
        return value if "t" in value else {"t": "MetaMap", "c": made}
    if isinstance(value, list):
        return {"t": "MetaList", "c": [_meta(v) for v in value]}
    return {"t": "MetaString", "c": str(value)}


def _compiler(source: Path, work: Path, inputs: dict[str, str]):
    import typst

    return typst.Compiler(
        input=source,
        root=work,
        font_paths=[FONTS],
        ignore_system_fonts=True,
        sys_inputs={"media": "/media", **inputs},
    )


def png(source: Path, work: Path) -> Path:
    """Compile a Typst file of one page to a picture beside it."""
    target = source.with_suffix(".png")
    made = _compiler(source, work, {"here": "", "edition": ""}).compile(format="png", ppi=144)
    if isinstance(made, list):
        raise Unprintable(f"{source.name} has {len(made)} pages, not one")
    target.write_bytes(made)
    return target


def pdf(source: Path, work: Path, inputs: dict[str, str], target: Path) -> int:
    """Compile a Typst file, and return the number of pages."""
    import typst
    from pypdf import PdfReader

    compiler = _compiler(source, work, inputs)
    try:
        made, warnings = compiler.compile_with_warnings(format="pdf", pdf_standards=["ua-1"])
    except typst.TypstError as error:
        panic = re.match(r'panicked with: "?(.*?)"?$', error.message, re.S)
        shown = f"{source.parent.name}/{source.stem}: {error.diagnostic}"  # with its line
        raise Unprintable(panic[1] if panic else shown) from None
    if warnings:
        raise Unprintable("\n".join(f"{source.name}: {w.message}" for w in warnings))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(made)
    return len(PdfReader(target).pages)
