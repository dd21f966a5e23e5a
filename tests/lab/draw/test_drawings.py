"""What was not recorded is not drawn."""

import base64
import re

import pytest

from mgpu_tutorial.lab import film, sequence_chart, timeline, traffic
from mgpu_tutorial.lab.draw.drawing import Drawing
from mgpu_tutorial.lab.draw.film import Film
from mgpu_tutorial.lab.record.report import Report


@pytest.mark.parametrize("draw", [film, sequence_chart, timeline, traffic])
def test_drawing_what_was_not_recorded_is_refused(draw):
    with pytest.raises(ValueError, match="launch with trace=True"):
        draw(Report(2))


@pytest.mark.parametrize("unit, names", [("step", "012"), ("slot", "123")])
def test_a_film_has_one_counter_and_moves_only_where_a_fold_is_opened(unit, names):
    frames = [Drawing(40, 20, f"frame {i}", f"frame {i}") for i in range(3)]
    shown = Film(frames, unit, still=1).still()
    captions = re.findall("<figcaption>(.*?)</figcaption>", shown)
    assert captions == [f"{unit} {number}" for number in names]
    assert f"<p>{captions[1].capitalize()} of {names[-1]}.</p>" in shown
    pictures = [base64.b64decode(p).decode() for p in re.findall('base64,([^"]+)', shown)]
    assert [("@keyframes" in picture) for picture in pictures] == [False, True] + 3 * [False]
    still, _, _ = shown.partition("<details>")
    assert "frame 1" in still and "frame 2" not in still
