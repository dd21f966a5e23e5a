"""What a notebook keeps of a widget beside its still form."""

from typing import Any

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def view_of(widget: Any) -> dict:
    """The part of a display that is the widget; empty where widgets cannot be shown."""
    bundle = widget._repr_mimebundle_()
    return {WIDGET_VIEW: bundle[WIDGET_VIEW]} if WIDGET_VIEW in bundle else {}
