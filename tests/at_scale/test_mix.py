"""The closed form is the best of all mixes, and follows the planner."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.at_scale import figures, mix
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.plans import Model, Plan

H100 = CLUSTERS["H100"]
LLAMA = Model(80, 8192, 64, 8192, 128_256, 8, 28_672, gated=True, tied=False)
SECONDS = some.floats(0.01, 100)


@given(SECONDS, SECONDS, SECONDS, some.floats(1, 1000))
def test_no_other_mix_exposes_less(gather, summing, compute, other):
    fsdp, tp = mix.best_mix(512, gather, summing, compute)
    assert fsdp * tp == pytest.approx(512) and tp >= 1

    def exposed(tp):
        return summing * (tp - 1) + max(0, gather / tp - compute)

    assert exposed(tp) <= exposed(other) * (1 + 1e-9) + 1e-9
    assert mix.exposed_seconds(tp, gather, summing, compute) == pytest.approx(exposed(tp))


def test_the_mix_depends_on_the_tokens_of_a_gpu_and_not_on_the_gpus():
    for tokens in 1024, 8192:
        seconds = mix.layer_seconds(LLAMA, H100, tokens)
        few, many = (mix.best_mix(gpus, *seconds)[1] for gpus in (64, 16_384))
        assert few == many


def test_a_layers_seconds_by_hand():
    """856 million weights, 8,192 tokens: 35 and 315 GB/s, 66.4% of 989 TFLOP/s."""
    weights = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672
    expected = 8 * weights / 35e9, 20 * 8192 * 8192 / 315e9, 6 * weights * 8192 / 656.7e12
    assert mix.layer_seconds(LLAMA, H100, 8192) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("tokens, tp", [(2048, 8), (8192, 4)])
def test_the_planner_takes_the_next_size(tokens, tp):
    steps = mix.planned(LLAMA, H100, 512, tokens, share_node=False)
    assert min(steps, key=steps.get) == tp
    shared = mix.planned(LLAMA, H100, 512, tokens, share_node=True)
    assert shared[1] < 1.06 * min(shared.values())


# The map of published runs


def test_a_run_stands_in_the_nearest_cell_with_the_error_of_its_seconds():
    best = {(7e9, 8): Plan(dp=8), (7e9, 64): Plan(dp=64), (7e10, 8): None}
    best[7e10, 64] = Plan(tp=4, pp=4, dp=4)
    drawing = figures.published_map(best)
    lines = drawing.text.splitlines()
    assert any(line.startswith("70B on 64 GPUs, TP 4 · PP 4 · DP 4: ") for line in lines)
    (small,) = [line for line in lines if line.startswith("7B on 8 GPUs, DP 8")]
    assert "MPT: DP" in small and "SmolLM3" not in small
    assert "no plan fits" in drawing.svg() and "-0%" not in drawing.text
