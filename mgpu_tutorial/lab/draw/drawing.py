"""A picture that shows itself everywhere: in JupyterLab, on a web page, in print, as text."""

import base64
import html
from dataclasses import dataclass, field

INK, FAINT, PAPER, ALARM = "#1a1a1a", "#9a9a9a", "#ffffff", "#b00020"
FONT = "font-family='Helvetica,Arial,sans-serif'"


@dataclass
class Drawing:
    """An SVG under construction, with the same content as text.

    JupyterLab shows no SVG of a notebook that it does not trust yet, but an image with the
    SVG inside; so the HTML form is that image.
    """

    width: float
    height: float
    text: str
    alt: str
    parts: list[str] = field(default_factory=list, repr=False)

    def line(self, x1, y1, x2, y2, colour=INK, width=1.5, dash="", arrow=False) -> None:
        self.parts.append(
            f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='{colour}' "
            f"stroke-width='{width:g}'{_dashes(dash)}/>"
        )
        if arrow:
            length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5 or 1
            ux, uy = (x2 - x1) / length, (y2 - y1) / length
            wings = [(x2 - 9 * ux - d * uy, y2 - 9 * uy + d * ux) for d in (5, -5)]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x2, y2), *wings])
            self.parts.append(f"<polygon points='{points}' fill='{colour}'/>")

    def box(self, x, y, w, h, stroke=INK, fill=PAPER, width=1.5, dash="", radius=5) -> None:
        self.parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{w:g}' height='{h:g}' rx='{radius:g}' "
            f"stroke='{stroke}' stroke-width='{width:g}' fill='{fill}'{_dashes(dash)}/>"
        )

    def label(
        self, x, y, text, size=13, colour=INK, anchor="middle", weight="normal", halo=False
    ) -> None:
        white = " stroke='#ffffff' stroke-width='4' paint-order='stroke'" if halo else ""
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size:g}' fill='{colour}' {FONT} "
            f"text-anchor='{anchor}' font-weight='{weight}'{white}>"
            f"{html.escape(str(text))}</text>"
        )

    def svg(self) -> str:
        """The whole picture as one SVG element, with its description inside."""
        w, h = f"{self.width:g}", f"{self.height:g}"
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{w}' height='{h}' "
            f"viewBox='0 0 {w} {h}' role='img'><title>{html.escape(self.alt)}</title>"
            f"<rect width='{w}' height='{h}' fill='{PAPER}'/>{''.join(self.parts)}</svg>"
        )

    def html(self) -> str:
        """An image element that carries the SVG, so that it needs no trust and no file."""
        source = f"data:image/svg+xml;base64,{base64.b64encode(self.svg().encode()).decode()}"
        return f'<img alt="{html.escape(self.alt)}" style="max-width:100%" src="{source}"/>'

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        pages = {"text/html": self.html(), "image/svg+xml": self.svg()}
        return {"text/plain": self.text} | pages


SECONDS, ROUNDS, HELD = 1.6, 3, 2  # a frame's time; how often all are shown; the last one's


def animated(frames: list[Drawing], rounds: int | str = ROUNDS) -> Drawing:
    """One drawing that shows the frames in turn by itself; where nothing moves, the last."""
    last, turns = len(frames) - 1, len(frames) - 1 + HELD
    steps = f"{last} step{'s' * (last != 1)}"
    alt = f"A film of {steps}. " + " ".join(frame.alt for frame in frames)
    text = "\n".join(frame.text for frame in frames)
    size = max(frame.width for frame in frames), max(frame.height for frame in frames)
    drawing = Drawing(*size, text, alt)
    always = set(frames[0].parts).intersection(*(frame.parts for frame in frames))
    style, shown = "", "".join(part for part in frames[0].parts if part in always)
    for i, frame in enumerate(frames):
        begin, end = 100 * i / turns, 100 if i == last else 100 * (i + 1) / turns
        before = f"0%,{begin:.3f}%{{visibility:hidden}}" if i else ""
        after = f"{end:.3f}%,100%{{visibility:hidden}}" if i < last else ""
        style += (
            f"@keyframes k{i}{{{before}{begin:.3f}%,{end:.3f}%{{visibility:visible}}{after}}}"
            f".f{i}{{animation:k{i} {turns * SECONDS:g}s step-end {rounds} both}}"
        )
        hidden = "" if i == last else " visibility='hidden'"
        own = "".join(part for part in frame.parts if part not in always)
        shown += f"<g class='f{i}'{hidden}>{own}</g>"
    motion = "@media (prefers-reduced-motion: no-preference)"
    shown = f"<g {FONT}>{shown.replace(FONT, '')}</g>"
    drawing.parts = [f"<style>{motion}{{{style}}}</style>{shown}"]
    return drawing


def _dashes(dash: str) -> str:
    return f" stroke-dasharray='{dash}'" if dash else ""
