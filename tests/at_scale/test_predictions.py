"""The published steps: transcribed as printed, and predicted within what is promised."""

import pytest

from mgpu_tutorial.at_scale import predictions, published
from mgpu_tutorial.at_scale.planner import TIE, USABLE
from mgpu_tutorial.shared.cost_model import step
from mgpu_tutorial.shared.cost_model.machines import (
    A100,
    A100_40GB,
    A100_2021,
    CLUSTERS,
    H100,
    H100_500W,
)
from mgpu_tutorial.shared.cost_model.memory import memory_of
from mgpu_tutorial.shared.cost_model.models import Model
from mgpu_tutorial.shared.cost_model.plans import Plan


def worst(family):
    """The largest error of a family's rows that were not fitted."""
    return max(abs(row.error) for row in predictions.predict(family) if not row.run.fitted)


def test_published_figures_become_seconds_and_back():
    """153 TFLOP/s on 384 GPUs for 4.55·10^18 operations are 77.5 s."""
    run = published.table_2()[0]
    operations = 96 * 1536 * 2048 * 96 * 12288**2
    operations *= 1 + 2048 / 6 / 12288 + 51200 / 16 / 96 / 12288
    assert run.seconds == pytest.approx(operations / 384 / 153e12)
    assert run.in_unit(run.seconds) == pytest.approx(153)
    assert run.in_unit(2 * run.seconds) == pytest.approx(153 / 2)
    rate = published.torchtitan()[0]
    assert rate.seconds == pytest.approx(2 * 8192 / 5762)
    assert rate.in_unit(rate.seconds / 2) == pytest.approx(2 * 5762)
    assert published.table_5()[0].seconds == 1.42 == published.table_5()[0].in_unit(1.42)
    llama = published.llama_3()[0]  # causal: attention by half; nothing is computed again
    operations = llama.model.flops_per_token(causal=True) * 2**24
    assert llama.seconds == pytest.approx(operations / 8192 / 430e12)


def test_the_numbers_of_the_gpus_are_what_their_rows_tell():
    for family, gpu in (
        ("table 5", A100),
        ("table 1", A100_2021),
        ("MPT, FSDP", A100_40GB),
        ("Llama 3 405B", H100),
        ("torchtitan 8B", H100_500W),
    ):
        assert predictions.gpu_of(family)[-2:] == pytest.approx(gpu[-2:], rel=4e-3), family
    for family in ("table 2", "ZeRO-3"):
        assert predictions.gpu_of(family) == predictions.gpu_of("table 1")


def test_eleven_rows_are_fitted():
    fitted = [
        run.name for make in published.FAMILIES.values() for run in make() if run.fitted
    ]
    assert sorted(fitted) == sorted(
        ["1.7B", "1008B", "22B full", "22B selective", "175B full", "175B selective"]
        + ["8,192 GPUs", "7B on 8", "8 GPUs", "1F1B", "256 GPUs"]
    )


# Korthikanti et al. 2022, figure 1, in GiB: state, and activations without anything and with
# sequence parallelism and selective recomputation. The authors computed these.
FIGURE_1 = {
    "22B": (45.5625, 59.25, 9.5625),
    "175B": (45.5625, 66.84375, 12.3515625),
    "530B": (31.640625, 114.0234375, 23.076171875),
    "1T": (32.958984375, 131.25, 26.5625),
}


@pytest.mark.parametrize("name", FIGURE_1)
def test_the_authors_memory_is_met_within_a_tenth(name):
    """Their figures hold no embedding, ours hold it on the first stage.

    And theirs are without what one layer holds while it computes its scores again.
    """
    heads, hidden, layers, pp, batch, micro_batch, v, *_ = published.TABLE_5[name]
    model = Model(layers, hidden, heads)
    plain = Plan(8, pp, 1, micro_batch, v, **published.OLD)
    short = Plan(8, pp, 1, micro_batch, v, recompute="selective", flash=False)
    scores = 5 * heads * model.sequence / 8 * micro_batch * model.sequence
    memory = memory_of(model, plain, batch)
    selective = memory_of(model, short, batch).activations - scores
    ours = [nbytes / 2**30 for nbytes in (sum(memory[:3]), memory.activations, selective)]
    assert ours == pytest.approx(FIGURE_1[name], rel=0.1)


def test_memory_that_was_measured_is_met_within_a_tenth_and_fits_where_we_say_so():
    """torchtitan, tables 1 and 3: 82.4 and 67.0 GiB."""
    for row, gib in zip(predictions.predict("torchtitan 8B"), (82.4, 67.0), strict=True):
        ours = row.step.memory.total / 2**30
        assert 0.9 * gib < ours < gib
        assert USABLE * gib < ours  # an estimate at the limit is no more than the memory


def test_a_layer_takes_what_the_authors_measured():
    """Table 4 of arXiv 2205.05198, 22B, which nothing was fitted to: ms of a layer.

    Forward and backward together: 19.6 as it is, 19.0 with sequence parallelism, 27.2 with
    full recomputation, 20.3 with sequence parallelism and selective recomputation.
    """
    cluster = CLUSTERS["A100"]._replace(gpu=predictions.gpu_of("table 5"))
    model = Model(48, 6144, 64)
    for milliseconds, plan in (
        (19.6, Plan(8, micro_batch=4, flash=False, sequence_parallel=False)),
        (19.0, Plan(8, micro_batch=4, flash=False)),
        (27.2, Plan(8, micro_batch=4, recompute="full", **published.OLD)),
        (20.3, Plan(8, micro_batch=4, recompute="selective", flash=False)),
    ):
        slot = step.micro_batch_seconds(model, cluster, plan)
        seconds = sum(slot[name] for name in ("matmul", "elementwise", "tensor")) / 48
        assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.06)


def test_the_tie_is_the_models_own_error():
    """No row of the families whose plan is complete is further off, but for ZeRO 3's one."""
    for family in ("table 1", "table 2", "table 5", "MPT, FSDP", "torchtitan 8B"):
        assert worst(family) < TIE


@pytest.mark.parametrize(("power", "error"), [(1.5, -0.18), (4, 0.23)])
def test_another_way_to_overlap_changes_zero_3_and_little_else(monkeypatch, power, error):
    """The root of the sum of squares is a choice, on which the notebook says what depends."""
    before = {family: worst(family) for family in published.FAMILIES}

    def exposed(communication, compute):
        return (compute**power + communication**power) ** (1 / power) - compute

    monkeypatch.setattr(step, "exposed_seconds", exposed)
    rows = predictions.predict("ZeRO-3")
    assert max((row.error for row in rows), key=abs) == pytest.approx(error, abs=0.005)
    for family in before.keys() - {"ZeRO-3"}:
        assert worst(family) == pytest.approx(before[family], abs=0.007)
