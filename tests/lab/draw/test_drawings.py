"""What was not recorded is not drawn."""

import pytest

from mgpu_tutorial.lab import film, sequence_chart, timeline, traffic
from mgpu_tutorial.lab.record.report import Report


@pytest.mark.parametrize("draw", [film, sequence_chart, timeline, traffic])
def test_drawing_what_was_not_recorded_is_refused(draw):
    with pytest.raises(ValueError, match="launch with trace=True"):
        draw(Report(2))
