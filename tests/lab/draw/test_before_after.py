"""Before and after: whose colour a value has."""

from xml.etree import ElementTree

from mgpu_tutorial.lab import before_after
from mgpu_tutorial.lab.colours import colour
from mgpu_tutorial.lab.record.report import Report


def test_a_value_that_several_ranks_hold_is_grey_before_and_after():
    drawing = before_after(Report(2, [([1, 2], [2]), ([1, None], [None])]), "broadcast")
    boxes = ElementTree.fromstring(drawing.svg()).findall(
        ".//{http://www.w3.org/2000/svg}rect"
    )
    shared, own, moved, shared_too, *empty = [box.get("fill") for box in boxes[1:]]
    assert shared == shared_too == "#d9d9d9" and own == moved == colour(0)
    assert empty == ["#ffffff", "#ffffff"]
