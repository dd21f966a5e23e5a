"""The film on the mesh: its lines are the messages of the run."""

from mgpu_tutorial.at_scale import figures
from mgpu_tutorial.at_scale.mesh_film import LINES, on_the_mesh


def test_each_line_of_a_step_is_a_message_or_a_sum_of_the_run(ranks):
    report = ranks(8, figures.plan_film, trace=True)
    frames = on_the_mesh(report).frames
    drawn = [
        {name: sum(colour in part for part in frame.parts) for name, (colour, *_) in looks}
        for looks in [LINES.items()]
        for frame in frames
    ]
    legend = dict.fromkeys(LINES, 1)
    heads = {"pp": 1 + 2 * 4}  # a line and its head
    sums, goes, means = {"tp": 3}, heads, {"dp": 5}
    of_steps = {}, {}, sums, goes, {}, sums, goes, means
    assert drawn == [legend | lines for lines in of_steps]
    sent = {(e.rank, e.peer) for e in report.events if e.sends}
    said = "\n".join(frame.text for frame in frames)
    assert sent == {(a, (a + 4) % 8) for a in range(8)}
    assert all(f"PP: {a} → {b}" in said for a, b in sent)
    assert "TP: 4 → 5 and 5 → 4" in frames[5].text
    assert "rank 7: model 2b, forward 2+3, backward 6+7, gradient 5+7" in frames[7].text
