"""What the ranks sent is counted, by call, message and byte."""

from mgpu_tutorial.lab import launch, traffic
from mgpu_tutorial.point_to_point import messages as p2p


def test_traffic_counts_calls_messages_and_bytes():
    table = traffic(launch(p2p.pass_along, 3, trace=True), expected=4, formula="one float")
    assert table.rows[1] == ["rank 1", "1 recv, 1 send", 1, 4, 4, "1.000"]
    assert "<td" in table._repr_html_() and "rank 2" in repr(table)
