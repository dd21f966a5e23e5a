"""Around the training loop: each mistake gives its error, each cure works."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mgpu_tutorial.ddp_buckets import practice, train_single, wrappers
from mgpu_tutorial.ddp_buckets.experiments import WAYS, calls, each
from mgpu_tutorial.lab import RankFailed, launch

REAL = WAYS[-1]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_no_sync_saves_calls_and_changes_no_gradient(way):
    report = launch(practice.accumulated, 2, way, trace=True)
    every, last = (calls(report, f"{name} backward")["calls"] for name in ("every", "last"))
    assert every == 3 * last > 0
    for synchronised, accumulated in report.results:
        torch.testing.assert_close(synchronised, accumulated)
    torch.testing.assert_close(report.results[0], report.results[1], rtol=0, atol=0)


def test_uneven_inputs_need_join():
    with pytest.raises(RankFailed, match="rank 1 returned while rank 0 still waited"):
        launch(practice.uneven, 2, join=False, timeout=10)
    assert launch(practice.uneven, 3, join=True).results == [5, 3, 1]


def test_an_unused_parameter_fails_at_the_next_forward_and_names_its_index():
    with pytest.raises(RankFailed, match="Expected to have finished reduction") as caught:
        launch(practice.unused, 2)
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
    assert launch(each, 2, practice.unused, cures).results == [expected] * 2


def test_buffers_go_on_from_rank_0():
    assert launch(practice.statistics, 2).results == [[1.0, 1.9], [2.0, 2.9]]


def test_synchronised_batch_norm_needs_a_gpu():
    with pytest.raises(RankFailed, match="SyncBatchNorm layers only work with GPU"):
        launch(practice.synchronised_norm, 2, device="cpu")


def test_a_checkpoint_is_written_once_and_read_by_all(tmp_path):
    results = launch(practice.saved_and_loaded, 3, str(tmp_path)).results
    assert results == [["weight", "bias"]] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_the_profiler_sees_six_transfers_and_the_first_under_backward(tmp_path):
    intervals, counts = launch(practice.profiled, 2, str(tmp_path)).results[0]
    assert counts["gloo:all_reduce"] == counts["c10d::allreduce_"] == 6
    assert counts["torch::autograd::AccumulateGrad"] == 14

    def begins(name):
        return [e["ts"] for e in intervals if e["name"] == name]

    accumulated = begins("torch::autograd::AccumulateGrad")
    assert min(begins("gloo:all_reduce")) < max(accumulated)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.json", "rank1.json"]


def described(text):
    """Rank, PID and batches of each line that a training script printed, sorted by rank."""
    found = re.findall(r"rank (\d): PID (\d+), \d+ MiB, cpu: (\d+) batches", text)
    return sorted(found)


def test_torchrun_and_its_agent_run_the_same_script(tmp_path):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0,1,3", "MGPU_DEVICE": "cpu"}
    environment["PYTHONPATH"] = str(Path(practice.__file__).parents[2])
    command = [Path(sys.executable).parent / "torchrun", "--standalone"]
    command += ["--log-dir", tmp_path, "--nproc-per-node", "3"]
    done = subprocess.run(
        [*command, "-m", "mgpu_tutorial.ddp_buckets.train_ddp"],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    by_command = described(done.stdout)
    report = launch(
        practice.as_torchrun, 1, 3, "0,1,3", "train_ddp", device="cpu", backend="none"
    )
    by_agent = described(report.stdout[0])
    for found in (by_command, by_agent):
        assert [(rank, batches) for rank, _, batches in found] == [
            ("0", "12"),
            ("1", "12"),
            ("2", "12"),
        ]
        assert len({pid for _, pid, _ in found}) == 3
    state = torch.load(tmp_path / "model.pt")
    assert not [key for key in state if key.startswith("module.")]


def test_the_script_for_one_process_trains_and_stores(tmp_path, capsys):
    train_single.main(str(tmp_path), epochs=1)
    assert re.match(r"PID \d+, \d+ MiB, \w+: 12 batches", capsys.readouterr().out)
    assert list(torch.load(tmp_path / "model.pt"))[0] == "conv1.weight"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_modules_that_differ_by_rank_are_refused(way):
    says = "DDP expects same model" if way is REAL else "rank 1 has 12 parameters and rank 0"
    with pytest.raises(RankFailed, match=says):
        launch(practice.different, 2, way, width=0, depth=1, timeout=10)
    says = (
        "appears not to match" if way is REAL else r"rank 1 has \('head.weight', \[10, 72\]"
    )
    with pytest.raises(RankFailed, match=says):
        launch(practice.different, 2, way, width=8, depth=0, timeout=10)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_rank_that_dies_in_backward_is_named_and_nobody_hangs(way):
    with pytest.raises(RankFailed, match="rank 1 left with exit code 1") as caught:
        launch(practice.dies_in_backward, 2, way, timeout=20)
    assert "  rank 0 was at" in str(caught.value)


def test_the_planted_bug_shows_only_with_a_tied_weight():
    ways = {w.__name__: {"way": w} for w in (*WAYS, practice.PlantedDDP)}
    for found in launch(each, 2, practice.tied_gradients_are_right, ways).results:
        assert not found.pop("PlantedDDP") and all(found.values())
    results = launch(practice.accumulated, 2, practice.PlantedDDP).results
    expected = launch(practice.accumulated, 2, wrappers.BucketedDDP).results
    torch.testing.assert_close([r[0] for r in results], [e[0] for e in expected])
