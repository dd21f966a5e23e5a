"""Sliders and toggles that a screen reader can tell and a finger can hit.

ipywidgets writes what a slider moves, and where it stands, beside its handle. The handle
itself has neither, and is 16 pixels wide. The text beside it takes the focus, for nothing.
A toggle doesn't say whether it is on.
"""

import html

SCRIPT = """
const box = this.closest('.widget-vbox');
const each = (name, act) => box.querySelectorAll(name).forEach(act);
const tellSlider = slider => {
  const [label, handle, place] = ['.widget-label', '[role=slider]', '.widget-readout'].map(
    part => slider.querySelector(part));
  handle?.setAttribute('aria-label', label.textContent);
  handle?.setAttribute('aria-valuetext', place.textContent);
  place.contentEditable = false;
};
const tellToggle = button =>
  button.setAttribute('aria-pressed', button.classList.contains('mod-active'));
const tell = () => {
  each('.widget-slider', tellSlider);
  each('.widget-toggle-button', tellToggle);
};
tell();
const changes = {childList: true, subtree: true, attributeFilter: ['class']};
new MutationObserver(tell).observe(box, changes);
"""
STYLE = """
.widget-slider { --jp-widgets-slider-handle-size: 24px; }
.widget-slider .noUi-handle.noUi-handle { border-color: #767676; }
"""


def in_a_column(*rows):
    """The widgets below each other; sliders have names and large handles, toggles a state."""
    import ipywidgets as widgets

    # a <script> in a widget's HTML would not run
    page = f'<style onload="{html.escape(SCRIPT)}">{STYLE}</style>'
    return widgets.VBox([*rows, widgets.HTML(page, layout={"display": "none"})])
