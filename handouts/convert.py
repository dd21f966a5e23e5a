"""Call pandoc and Typst, and say of a fault where in the notebooks it is.

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

from handouts.notebook import Unprintable

ROOM = Path(__file__).parent
API = [1, 23, 1]
FONTS = ("", "-Bold", "-Oblique", "-BoldOblique")
GLYPH = re.compile(r'the text `"(.+?)"` could not be displayed')
SPOT = re.compile(r"┌─ (?:.*[\\/])?(\w+[\\/][\w.]+\.typ):(\d+):")


def prepare(work: Path) -> None:
    """Lay out the folder that Typst sees: styles, fonts, and room for pictures and text."""
    (work / "media").mkdir(parents=True, exist_ok=True)
    (work / "fonts").mkdir(exist_ok=True)
    for file in [*ROOM.glob("*.typ"), ROOM / "paper.tmTheme"]:
        shutil.copyfile(file, work / file.name)
    matplotlib = Path(find_spec("matplotlib").origin).parent  # Typst's wheel has no sans
    for face in FONTS:
        name = f"DejaVuSans{face}.ttf"
        source = matplotlib / "mpl-data" / "fonts" / "ttf" / name
        if not (work / "fonts" / name).exists():
            shutil.copyfile(source, work / "fonts" / name)


def pandoc(blocks: list[dict], meta: dict, *options: str) -> str:
    """Run pandoc with our filter on blocks; Unprintable says what the filter found."""
    import pypandoc

    document = {"pandoc-api-version": API, "meta": _meta(meta)["c"], "blocks": blocks}
    command = [pypandoc.get_pandoc_path(), "-f", "json", "--wrap=none", *options]
    command += ["--lua-filter", str(ROOM / "filter.lua")]
    done = subprocess.run(
        command, input=json.dumps(document), capture_output=True, encoding="utf-8"
    )
    problems = re.findall(r"PROBLEM (.*)", done.stderr)
    if problems:
        raise Unprintable("\n".join(dict.fromkeys(problems)))
    if done.returncode or done.stderr.strip():
        raise Unprintable(f"{meta['file']}: pandoc said: {done.stderr.strip()}")
    return done.stdout


def _meta(value: object) -> dict:
    if isinstance(value, dict):
        return {"t": "MetaMap", "c": {key: _meta(v) for key, v in value.items()}}
    if isinstance(value, list | tuple):
        return {"t": "MetaList", "c": [_meta(v) for v in value]}
    if isinstance(value, bool):
        return {"t": "MetaBool", "c": value}
    return {"t": "MetaString", "c": str(value)}


def pdf(source: Path, work: Path, inputs: dict[str, str], target: Path) -> int:
    """Compile a Typst file, and return the number of pages."""
    return _compiled(_compiler(source, work, inputs), source, work, target)


def deck(source: Path, work: Path, inputs: dict[str, str], target: Path) -> int:
    """Compile slides, and write what is said beside them, for the speaker's view of pdfpc."""
    compiler = _compiler(source, work, inputs)
    pages = _compiled(compiler, source, work, target)
    marks = json.loads(compiler.query("<slide>", field="value"))
    if len(marks) != pages:
        raise Unprintable(f"{source.name}: {len(marks)} slides on {pages} pages")
    notes = [
        {"idx": i, "label": str(i + 1), "overlay": 0, "note": mark["plain"]}
        for i, mark in enumerate(marks)
    ]
    said = {"pdfpcFormat": 2, "disableMarkdown": False, "pages": notes}
    text = json.dumps(said, indent=1, ensure_ascii=False)
    target.with_suffix(".pdfpc").write_text(text, encoding="utf-8")
    return pages


def _compiled(compiler, source: Path, work: Path, target: Path) -> int:
    import typst
    from pypdf import PdfReader

    try:
        made, warnings = compiler.compile_with_warnings(format="pdf", pdf_standards=["ua-1"])
    except typst.TypstError as error:
        raise Unprintable(_explained(error, work)) from None
    if warnings:
        raise Unprintable("\n".join(f"{source.name}: {w.message}" for w in warnings))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(made)
    return len(PdfReader(target).pages)


def _compiler(source: Path, work: Path, inputs: dict[str, str]):
    import typst

    return typst.Compiler(
        input=source,
        root=work,
        font_paths=[work / "fonts"],
        ignore_system_fonts=True,
        sys_inputs={"media": "/media", **inputs},
    )


def _explained(error: Exception, work: Path) -> str:
    """Typst's message, with the cell instead of the line of a text that nobody wrote."""
    panic = re.match(r'panicked with: "?(.*?)"?$', error.message, re.S)
    if panic:
        return panic[1]
    found = []
    for part in re.split(r"\n(?=error: )", error.diagnostic):
        message = part.split("\n")[0].removeprefix("error: ").removeprefix("PDF/UA-1 error: ")
        spot = SPOT.search(part)
        place = spot and _cell(work / spot[1], int(spot[2]))
        glyph = GLYPH.search(message)
        places = [place] if place else _cells_with(glyph[1] if glyph else "", work)
        found += [f"{place}: {message}" for place in places]
    return "\n".join(dict.fromkeys(found))


def _cell(file: Path, line: int) -> str:
    """The remark above a line of generated Typst that names its cell."""
    if not file.is_file():
        return ""
    for text in reversed(file.read_text(encoding="utf-8").split("\n")[:line]):
        if found := re.search(r'^// (\S+\.(?:ipynb|md).*)|where: "([^"]+)"', text):
            return found[1] or found[2]
    return ""


def _cells_with(text: str, work: Path) -> list[str]:
    """Where a text that Typst gave no place for stands: in an output or a picture."""
    sought = [text] if text else []
    for file in work.glob("media/print-*.svg"):
        if text and text in file.read_text(encoding="utf-8"):
            sought.append(file.name.removeprefix("print-"))
    places = [
        _cell(file, number + 1)
        for file in work.glob("*/*.typ")
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"))
        if any(word in line for word in sought)
    ]
    return list(dict.fromkeys(filter(None, places))) or ["some cell"]
