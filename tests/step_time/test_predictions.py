"""The published steps: transcribed as printed, and predicted within what is promised."""

import pytest

from mgpu_tutorial.shared.cost_model import step
from mgpu_tutorial.shared.cost_model.machines import (
    A100,
    A100_40GB,
    A100_2021,
    CLUSTERS,
    H100,
    H100_500W,
    SHARES,
)
from mgpu_tutorial.shared.cost_model.plans import Model, Plan, memory_of
from mgpu_tutorial.step_time import published
from tools.docs import PAGE, page


def test_the_numbers_of_the_gpus_are_what_their_rows_tell():
    for family, gpu in (
        ("MPT on A100s", A100),
        ("Megatron 2021, table 1", A100_2021),
        ("MPT, FSDP", A100_40GB),
        ("Llama 3 405B", H100),
        ("torchtitan 8B", H100_500W),
    ):
        assert published.gpu_of(family)[-2:] == pytest.approx(gpu[-2:], rel=4e-3), family


IN_16_BITS = [
    family
    for family in published.TABLES
    if family not in ("torchtitan float8", "torchtitan, long")
    and not family.startswith("torchtitan 405B")
]


def test_the_shares_of_a_gpu_are_the_lowest_and_the_highest_that_fit():
    """Apart for programs that share out the batch alone, and for those that cut the model."""
    found: dict[tuple, list[float]] = {}
    for family in IN_16_BITS:
        if rows := [run for run in published.runs_of(family) if run.fitted]:
            gpu, (run, *_) = published.gpu_of(family), rows
            cut = any(row.plan.tp * row.plan.pp > 1 for row in rows)
            kind = run.cluster.gpu.name[:4], "500" in run.cluster.gpu.name, cut
            found.setdefault(kind, []).append(gpu.matmul_efficiency)
    for gpu, cut in ((A100, False), (A100, True), (H100, False), (H100, True)):
        fits = found[gpu.name[:4], False, cut]
        assert SHARES[gpu][cut] == pytest.approx((min(fits), max(fits)), abs=1e-3), gpu.name
    fits = found["H100", True, False]
    assert SHARES[H100_500W][0] == pytest.approx((min(fits), max(fits)), abs=1e-3)


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
    full, short = (
        run for run in published.runs_of("Megatron 2022") if run.name.startswith(name)
    )
    model, batch = full.model, full.batch
    plain, short = full.plan._replace(recompute="none"), short.plan
    scores = 5 * model.heads * model.sequence / 8 * plain.micro_batch * model.sequence
    memory = memory_of(model, plain, batch)
    selective = memory_of(model, short, batch).activations - scores
    ours = [nbytes / 2**30 for nbytes in (sum(memory[:3]), memory.activations, selective)]
    assert ours == pytest.approx(FIGURE_1[name], rel=0.1)


ZERO_3, MPT = "ZeRO-3 of 2021", "MPT on H100s"
OTHERS = {
    1.5: {ZERO_3: 0.221, "NeMo AutoModel": 0.417, "SmolLM3": 0.234, MPT: 0.058},
    4: {ZERO_3: 0.187, "NeMo AutoModel": 0.324, "SmolLM3": 0.313, MPT: 0.103},
}
OTHERS[1.5] |= {"torchtitan on A100s": 0.041}
OTHERS[4] |= {"torchtitan on A100s": 0.086, "MPT on A100s": 0.041}


@pytest.mark.slow
@pytest.mark.parametrize("power", OTHERS)
def test_another_way_to_overlap_changes_zero_3_and_small_steps(monkeypatch, power):
    """The root of the sum of squares is a choice, on which the notebook says what depends."""

    def worst():
        """The largest error of each family's rows that were not fitted."""
        errors = {}
        for family in published.TABLES:
            rows = [row for row in published.predict(family) if not row.run.fitted]
            errors[family] = max(abs(row.error) for row in rows)
        return errors

    expected = worst() | OTHERS[power]

    def exposed(communication, compute):
        return (compute**power + communication**power) ** (1 / power) - compute

    monkeypatch.setattr(step, "exposed_seconds", exposed)
    assert worst() == pytest.approx(expected, abs=0.007)


def test_the_page_of_the_rows_is_what_the_model_says():
    assert PAGE.read_text(encoding="utf-8") == page()


def test_a_fit_above_the_data_sheet_warns():
    """A step that took half of what its products need at the peak."""
    run = published.predict("Megatron 2021, table 2")[0].run
    measured = run._replace(published=run.seconds / 2, unit="s")
    with pytest.warns(UserWarning, match="more than the data sheet allows"):
        published.fit_gpu([measured], 0.0)


def test_a_fit_finds_the_numbers_that_made_the_times():
    cluster, model, runs = CLUSTERS["A100"], Model(4, 512, 4), []
    wanted = A100._replace(matmul_efficiency=0.61, activation_passes=2.2)
    for plan in (Plan(flash=False), Plan(2, 2, 2, recompute="full", zero=3)):
        run = published.Run("", model, cluster, plan, 8, 1.0)
        runs.append(run._replace(published=run.predicted(wanted).seconds))
    assert published.fit_gpu(runs) == pytest.approx(wanted)
    assert published.fit_gpu(runs[:1], activation_passes=2.2) == pytest.approx(wanted)
    run = runs[0]._replace(
        published=runs[0].predicted(wanted._replace(activation_passes=0)).seconds
    )
    without = published.fit_gpu([run], activation_passes=0.0)  # none is a number too
    assert without[-2:] == pytest.approx((0.61, 0.0))
    for few, passes in (([], 2.2), (runs[:1], None)):
        with pytest.raises(ValueError, match="too few"):
            published.fit_gpu(few, passes)


def test_two_smaller_runs_are_enough():
    """The summary: the two smallest of table 1 would have told the step of 175 billion."""
    gpu = published.fit_gpu(published.runs_of("Megatron 2021, table 1")[:2])
    run = published.runs_of("Megatron 2021, table 2")[0]
    assert gpu[-2:] == pytest.approx((0.696, 2.82), rel=2e-3)
    assert run.predicted(gpu).seconds == pytest.approx(77.8, abs=0.05)


@pytest.mark.parametrize(
    ("wrong", "share"), [({"interleaving": 1}, 0.775), ({"zero": 3}, 0.742)]
)
def test_a_slightly_wrong_plan_fits_in_silence(recwarn, wrong, share):
    run = published.runs_of("NeMo on H100s")[0]
    gpu = published.fit_gpu([run._replace(plan=run.plan._replace(**wrong))], 2.97)
    assert gpu.matmul_efficiency == pytest.approx(share, abs=5e-4) and not recwarn.list


def test_the_page_tells_how_to_ask_for_the_run_that_one_predicts_alone():
    """The lines in the fold: a fit to 7 billion parameters, and the plan of 13."""
    small, large = published.runs_of("MPT on A100s")
    gpu = published.fit_gpu([small], activation_passes=2.97)
    model = Model(40, 5120, 40, sequence=2048, vocabulary=50_368)
    a100, plan = CLUSTERS["A100"]._replace(gpu=gpu), Plan(dp=8, zero=3, micro_batch=2)
    found = step.predict_step(model, a100, plan, batch=48).tokens_per_second
    assert found == pytest.approx(2298, abs=1) and large.published == 2262
