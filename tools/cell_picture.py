"""The picture of the README: a cell is run, real ranks hang, it is mended and passes.

`draw()` lets ranks try both versions, and says what the build of the notebook says. All of it
stands there, and a page can play it once, in twelve seconds (docs.py).
"""

import html
import linecache
import re
import textwrap

import torch
import torch.distributed as dist

from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.teach.build import Row
from mgpu_tutorial.lab.teach.verdict import OPEN, PLATES
from mgpu_tutorial.point_to_point.builds import build

FIRST = """\
def swap(mine, peer):
    other = torch.empty_like(mine)
    dist.send(mine, dst=peer)
    dist.recv(other, src=peer)
    return other
"""
MENDED = """\
def swap(mine, peer):
    other = torch.empty_like(mine)
    if dist.get_rank() < peer:
        dist.send(mine, dst=peer)
        dist.recv(other, src=peer)
    else:
        dist.recv(other, src=peer)
        dist.send(mine, dst=peer)
    return other
"""
ALT = (
    "A notebook cell with a function swap in which both ranks send first. Its build says in "
    "red where each of two real ranks hangs: deadlock, 0 to 1 to 0. Beside it the mended "
    "cell, in which the lower rank sends first: three green rows say yes."
)
SECONDS, SIZE, LINE, LETTER = 12, 13, 19, 7.83  # pixels, of a text of fixed width
LEFT, RIGHT, WIDE, TOP = 14, 494, 462, 34
COLUMNS = int((WIDE - 24) / LETTER)
MONO = "font-family='DejaVu Sans Mono,Menlo,Consolas,monospace'"
WORDS = re.compile(r"\b(def|if|else|return)\b")
KEYWORD, SAND, CHANGED = "#6b2fa0", "#f4f4f2", "#fff0c2"


def tried(source: str) -> list[Row]:
    """What the chapter's build says of this cell."""
    linecache.cache["cell"] = (len(source), None, source.splitlines(True), "cell")
    around = {"torch": torch, "dist": dist, "__name__": "__main__"}
    exec(compile(source, "cell", "exec"), around)
    return build.rows(around["swap"])


def draw() -> Drawing:
    """Both cells and their verdicts, which appear one after the other."""
    first, mended = tried(FIRST), tried(MENDED)
    words = [f"{row.must}: {row.holds} {row.seen}" for row in (*first, *mended)]
    drawing = Drawing(RIGHT + WIDE + 14, 0, "\n".join(words), ALT)
    new = set(MENDED.splitlines()) - set(FIRST.splitlines())
    begin = _cell(drawing, LEFT, "your first try", FIRST, set(), 0)
    low = _verdict(drawing, LEFT, begin, first, 1, 1)
    begin = _cell(drawing, RIGHT, "mended", MENDED, new, 6)
    low = max(low, _verdict(drawing, RIGHT, begin, mended, 8, 0.8))
    drawing.height = low + 12
    times = sorted({float(at) for part in drawing.parts for at in re.findall(AT, part)})
    style = "".join(
        f"@keyframes a{i}{{0%,{100 * at / SECONDS:.2f}%{{opacity:0}}}}"
        f"[data-at='{at:g}']{{animation:a{i} {SECONDS}s step-start both}}"
        for i, at in enumerate(times)
        if at
    )
    motion = "@media (prefers-reduced-motion: no-preference) and (update: fast)"
    drawing.parts.insert(0, f"<style>{motion}{{{style}}}</style>")
    return drawing


AT = re.compile(r"data-at='([\d.]+)'")


def _cell(drawing, left, title, source, new, at) -> float:
    """The source in a frame, and the call of the build; returns where it ends."""
    lines = [*source.splitlines(), "", "build(swap)"]
    drawing.parts.append(f"<g data-at='{at:g}'>")
    drawing.label(left, 22, title, 14, OPEN, "start", "bold")
    high = LINE * len(lines) + 14
    drawing.box(left, TOP, WIDE, high, FAINT, SAND, 1, radius=3)
    for i, line in enumerate(lines):
        y = TOP + 20 + LINE * i
        if line in new:
            drawing.box(left + 2, y - 14, WIDE - 4, LINE, CHANGED, CHANGED, 0, radius=0)
        _mono(drawing, left + 12, y, line)
    drawing.parts.append("</g>")
    return TOP + high


def _verdict(drawing, left, y, rows, at, pause) -> float:
    """A row for each behaviour, with its plate and what was seen; returns where it ends."""
    y += 26
    for row in rows:
        mark, plate = PLATES[row.holds]
        word = {True: "yes", False: "no", None: "not tried"}[row.holds]
        drawing.parts.append(f"<g data-at='{at:g}'>")
        wide = 8 * len(mark + word) + 14
        drawing.box(left, y - 14, wide, 19, plate, plate, 0, radius=4)
        drawing.label(left + wide / 2, y, mark + word, SIZE, "#ffffff", weight="bold")
        must = f"must {row.must}"
        lines = textwrap.wrap(must, int((WIDE - wide - 10) / 6.9))
        for line in lines:
            drawing.label(left + wide + 10, y, line, SIZE, anchor="start")
            y += LINE
        for said in row.seen.splitlines():
            said = said.partition(" (with NCCL")[0]
            wrapped = textwrap.wrap(said.strip(), COLUMNS, subsequent_indent="  ")
            is_key = said.strip().startswith("deadlock")
            for line in wrapped:
                _mono(
                    drawing, left + 12, y, line, PLATES[False][1] if is_key else INK, is_key
                )
                y += LINE - 1
        drawing.parts.append("</g>")
        y += 8
        at += pause if row.holds else 1
    return y - 8


def _mono(drawing, x, y, line, ink=INK, is_bold=False) -> None:
    indent = len(line) - len(line.lstrip())
    words = html.escape(line.lstrip())
    if ink == INK:
        words = WORDS.sub(rf"<tspan fill='{KEYWORD}'>\1</tspan>", words)
    weight = "bold" if is_bold else "normal"
    drawing.parts.append(
        f"<text x='{x + LETTER * indent:g}' y='{y:g}' font-size='{SIZE}' fill='{ink}' {MONO} "
        f"font-weight='{weight}'>{words}</text>"
    )
