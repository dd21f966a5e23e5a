"""Sliders that a screen reader can name and a finger can hit.

ipywidgets writes what a slider moves, and where it stands, beside its handle. The handle
itself has neither, and is 16 pixels wide. The text beside it takes the focus, for nothing.
"""

import html

SCRIPT = """
const box = this.closest('.widget-vbox');
const tell = () => box.querySelectorAll('.widget-slider').forEach(slider => {
  const [label, handle, place] = ['.widget-label', '[role=slider]', '.widget-readout'].map(
    part => slider.querySelector(part));
  handle?.setAttribute('aria-label', label.textContent);
  handle?.setAttribute('aria-valuetext', place.textContent);
  place.contentEditable = false;
});
tell();
new MutationObserver(tell).observe(box, {childList: true, subtree: true});
"""
STYLE = """
.widget-slider { --jp-widgets-slider-handle-size: 24px; }
.widget-slider .noUi-handle.noUi-handle { border-color: #767676; }
"""


def in_a_column(*rows):
    """The widgets below each other; each slider among them has a name and a large handle."""
    import ipywidgets as widgets

    page = (
        f'<style onload="{html.escape(SCRIPT)}">{STYLE}</style>'  # a <script> would not run
    )
    return widgets.VBox([*rows, widgets.HTML(page, layout={"display": "none"})])
