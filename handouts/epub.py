"""The book as EPUB, for readers of electronic paper: every chapter, and its solutions."""

import json
import subprocess
from pathlib import Path

from handouts import convert
from handouts.notebook import Unprintable

STYLE = """
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.8em; }
.predict { border-left: 0.3em solid; padding-left: 0.8em; }
.solution { border-left: 0.15em solid; padding-left: 0.8em; }
td, th { padding: 0.1em 0.5em; text-align: left; vertical-align: top; }
img { max-width: 100%; }
"""


def blocks(made: list[dict], meta: dict, path: Path) -> None:
    """Write the blocks of one chapter, as pandoc keeps a document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = convert.pandoc(made, {**meta, "epub": True}, "-t", "json")
    path.write_text(text, encoding="utf-8")


def book(chapters: list[Path], title: str, about: str, work: Path, path: Path) -> None:
    """Join the chapters into one EPUB."""
    import pypandoc

    parts = [json.loads(file.read_text(encoding="utf-8")) for file in chapters]
    document = {
        **parts[0],
        "meta": {},
        "blocks": [b for part in parts for b in part["blocks"]],
    }
    style = work / "epub.css"
    style.write_text(STYLE, encoding="utf-8")
    command = [
        *(pypandoc.get_pandoc_path(), "-f", "json", "-t", "epub3", "-o", path),
        *("--split-level=1", "--toc-depth=2", "--mathml", "--css", style),
        *("--resource-path", work / "media", "--metadata", "lang=en"),
        *("--metadata", f"title={title}", "--metadata", f"rights={about}"),
    ]
    done = subprocess.run(
        command, input=json.dumps(document), capture_output=True, encoding="utf-8"
    )
    if done.returncode or done.stderr.strip():
        raise Unprintable(f"{path.name}: pandoc said: {done.stderr.strip()}")
