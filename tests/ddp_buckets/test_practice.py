"""Around the training loop: each mistake gives its error, each cure works."""

import re
import subprocess

import pytest
import torch
from torch import nn
from torch.nn.functional import nll_loss

from mgpu_tutorial.ddp_buckets import exercises, practice, train_single, wrappers
from mgpu_tutorial.ddp_buckets.experiments import run_each_setting
from mgpu_tutorial.ddp_buckets.measurements import count_calls
from mgpu_tutorial.ddp_buckets.wrappers import WRAPPERS
from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet
from tests.ddp_buckets import ranks as workers

REAL = WRAPPERS[-1]


def whole_batch_gradients():
    """One process, one backward over all 24 samples, by hand."""
    torch.manual_seed(0)
    head = nn.Linear(64, 10)
    body = [nn.Linear(64, 64) for _ in range(4)]
    x = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(1))[0]
    for layer in body:
        x = layer(x).clamp(min=0)
    parameters = [p for layer in (head, *body) for p in layer.parameters()]
    return list(torch.autograd.grad((head(x) ** 2).mean(), parameters))


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)
def test_no_sync_saves_calls_and_changes_no_gradient(wrapper):
    report = launch(practice.accumulate_gradients, 2, wrapper, trace=True)
    every = count_calls(report, "every backward").count
    assert every == 3 * count_calls(report, "last backward").count > 0
    expected = whole_batch_gradients()
    for synchronised, accumulated in report.results:
        torch.testing.assert_close(synchronised, expected)
        torch.testing.assert_close(accumulated, expected)
    torch.testing.assert_close(report.results[0], report.results[1], rtol=0, atol=0)


def test_uneven_inputs_need_join():
    with pytest.raises(RankFailed, match="rank 1 returned while rank 0 still waited"):
        launch(practice.train_on_uneven_batches, 2, join=False, timeout=10)
    assert launch(practice.train_on_uneven_batches, 3, join=True).results == [5, 3, 1]


def test_an_unused_parameter_fails_at_the_next_forward_and_names_its_index():
    with pytest.raises(RankFailed, match="Expected to have finished reduction") as caught:
        launch(practice.leave_a_head_unused, 2)
    said = [out.splitlines() for out in caught.value.report.stdout]
    assert said[0] == ["forward 0 done", "backward 0 done: gradient 2.0"]
    assert said[1][-1] == "backward 0 done: gradient 4.0"  # never averaged
    assert "did not receive grad for rank 0: 2 3" in caught.value.tracebacks[0]


def test_the_cures_for_unused_parameters():
    cures = {
        "find": {"find_unused_parameters": True},
        "static": {"static_graph": True},
        "zero": {"everything": True},
    }
    expected = {"find": (3.0, None), "static": (3.0, None), "zero": (3.0, 0.0)}
    assert (
        launch(run_each_setting, 2, practice.leave_a_head_unused, cures).results
        == [expected] * 2
    )


def test_buffers_go_on_from_rank_0():
    assert launch(practice.follow_the_running_mean, 2).results == [[1.0, 1.9], [2.0, 2.9]]


def test_synchronised_batch_norm_needs_a_gpu():
    with pytest.raises(RankFailed, match="SyncBatchNorm layers only work with GPU"):
        launch(practice.synchronise_batch_norm, 2, device="cpu")


def test_a_checkpoint_is_written_once_and_read_by_all(tmp_path):
    results = launch(practice.save_and_load, 3, str(tmp_path)).results
    assert results == [["weight", "bias"]] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_the_profiler_sees_six_transfers_and_the_first_under_backward(tmp_path):
    intervals, counts = launch(practice.profile_step, 2, str(tmp_path)).results[0]
    assert counts["gloo:all_reduce"] == counts["c10d::allreduce_"] == 6
    assert counts["torch::autograd::AccumulateGrad"] == 14

    def begins(name):
        return [e["ts"] for e in intervals if e["name"] == name]

    accumulated = begins("torch::autograd::AccumulateGrad")
    assert min(begins("gloo:all_reduce")) < max(accumulated)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.json", "rank1.json"]


def digits_by_hand(order_of, epochs):
    """SmallConvNet after plain SGD over global batches of 120 digits, in one process."""
    torch.manual_seed(0)
    model, data = SmallConvNet(), digits()
    for epoch in range(epochs):
        for index in order_of(epoch, len(data)).split(120):
            loss = nll_loss(model(data.images[index]), data.labels[index])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, gradient in zip(model.parameters(), gradients, strict=True):
                    p -= 0.05 * gradient
    return model.state_dict()


@pytest.mark.fresh
def test_torchrun_trains_on_two_ranks_what_one_process_trains(tmp_path):
    script = "mgpu_tutorial.ddp_buckets.train_ddp"
    lines = practice.run_torchrun(script, 2, "", str(tmp_path))
    pattern = r"rank (\d): PID (\d+), \d+ MiB, cpu: (\d+) batches an epoch"
    found = [re.fullmatch(pattern, line).groups() for line in lines]
    assert [(rank, batches) for rank, _, batches in found] == [(r, "12") for r in "01"]
    assert len({pid for _, pid, _ in found}) == 2

    def order(epoch, count):
        """Another order in each epoch; the sampler's last rank sees the first ones again."""
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        return torch.cat([order, order[: -count % 2]])

    expected = digits_by_hand(order, epochs=2)
    # 24 steps in float32: rounding is 1e-5 on one processor, a forgotten set_epoch 2e-3.
    torch.testing.assert_close(torch.load(tmp_path / "model.pt"), expected, rtol=0, atol=2e-4)


def test_torchrun_that_fails_is_told(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 3, stdout="", stderr="no module named script")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="exit code 3:\nno module named script"):
        practice.run_torchrun("script", 1, "", str(tmp_path))


def test_the_script_for_one_process_trains_and_stores(tmp_path, capsys):
    train_single.main(str(tmp_path), epochs=1)
    assert re.match(r"PID \d+, \d+ MiB, \w+: 12 batches", capsys.readouterr().out)
    assert list(torch.load(tmp_path / "model.pt"))[0] == "conv1.weight"


def test_our_wrappers_refuse_modules_that_differ_by_rank():
    sizes = {"depth": {"width": 0, "depth": 1}, "width": {"width": 8, "depth": 0}}
    settings = {
        (wrapper, name): {"worker": practice.wrap_different_modules, "wrapper": wrapper}
        | size
        for wrapper in WRAPPERS[:4]
        for name, size in sizes.items()
    }
    for refused in launch(run_each_setting, 2, workers.tell_refusal, settings).results:
        for wrapper in WRAPPERS[:4]:
            says = refused[wrapper, "depth"], refused[wrapper, "width"]
            assert says[0].startswith("rank 1 has 12 parameters and rank 0 has 10: build")
            assert says[1].startswith("rank 1 has ('head.weight', [10, 72], 'torch.float32')")


@pytest.mark.parametrize(
    "width, depth, says", [(0, 1, "DDP expects same model"), (8, 0, "appears not to match")]
)
def test_torch_refuses_modules_that_differ_by_rank(width, depth, says):
    with pytest.raises(RankFailed, match=says):
        launch(practice.wrap_different_modules, 2, REAL, width=width, depth=depth, timeout=10)


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)
def test_a_rank_that_dies_in_backward_is_named_and_nobody_hangs(wrapper):
    with pytest.raises(RankFailed, match="rank 1 left with exit code 1") as caught:
        launch(practice.die_in_backward, 2, wrapper, timeout=20)
    assert "  rank 0 was at" in str(caught.value)


def test_the_planted_bug_shows_only_with_a_tied_weight():
    ways = {w.__name__: {"wrapper": w} for w in (*WRAPPERS, exercises.PlantedDDP)}
    for found in launch(run_each_setting, 2, exercises.check_tied_gradients, ways).results:
        assert not found.pop("PlantedDDP") and all(found.values())
    results = launch(practice.accumulate_gradients, 2, exercises.PlantedDDP).results
    expected = launch(practice.accumulate_gradients, 2, wrappers.BucketedDDP).results
    torch.testing.assert_close([r[0] for r in results], [e[0] for e in expected])
