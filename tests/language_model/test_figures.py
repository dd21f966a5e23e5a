"""The mesh of a plan, and its step as if each rank had its own core."""

from collections import Counter

from mgpu_tutorial.language_model import figures, train


def test_each_rank_has_one_line_along_each_dimension():
    said = repr(figures.mesh_picture("dp=2,tp=2,pp=2")).splitlines()
    assert said[0] == "tp: [0, 1], [2, 3], [4, 5], [6, 7]"
    assert said[1] == "pp: [0, 4], [1, 5], [2, 6], [3, 7]"
    assert said[2] == "dp: [0, 2], [1, 3], [4, 6], [5, 7]"


def test_a_call_ends_when_the_last_rank_has_come_and_a_message_is_read_after_it_was_sent(
    ranks,
):
    report = ranks(4, train, "tp=2,pp=2", 3, trace=True, timeout=100)
    parts = figures.on_own_cores(report, "tp=2,pp=2")
    assert set(Counter(part.dimension for part in parts)) == {"tp", "pp"}
    for part in parts:
        others = [other for other in parts if other.meeting == part.meeting]
        assert len(others) == 2
        if not part.sends:
            assert part.end >= max(other.begin for other in others)
    counts = "84 for tp, 24 for pp, 0 for dp"  # half as many ranks as with dp=2
    assert counts in repr(figures.step_by_dimension(report, "tp=2,pp=2"))
    for rank in range(4):
        mine = [part for part in parts if part.rank == rank]
        assert all(a.begin <= b.begin for a, b in zip(mine, mine[1:], strict=False))
