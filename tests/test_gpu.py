"""What only a GPU can show; skipped without one. `make test-gpu` runs nothing else."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import is_nccl_available
from torch.distributed import pipelining as pp
from torch.nn.functional import cross_entropy

from benchmarks import comparison
from mgpu_tutorial import data_partitioning
from mgpu_tutorial.collectives import calls
from mgpu_tutorial.comparison import training
from mgpu_tutorial.data_parallel.wrapper import DataParallel
from mgpu_tutorial.ddp_buckets import experiments
from mgpu_tutorial.lab import Ledger, devices, launch
from mgpu_tutorial.lab.run import transfer
from mgpu_tutorial.mixed_precision import precision
from mgpu_tutorial.model_parallel import clock
from mgpu_tutorial.model_parallel import split_resnet as resnet
from mgpu_tutorial.nonblocking import transfers
from mgpu_tutorial.pipelines import schedules, stages
from mgpu_tutorial.pipelines import work as works
from mgpu_tutorial.point_to_point import messages as p2p
from mgpu_tutorial.shared.vision import torchvision
from tests.lab import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.skipif(not is_nccl_available(), reason="needs NCCL")
def test_one_rank_forms_an_nccl_group():
    device, backend, total = launch(ranks.on_device, 1, device="cuda").results[0]
    assert (device, backend, total) == ("cuda:0", "nccl", 0.0)


def test_ranks_that_share_one_gpu_use_gloo_and_run_the_same_workers():
    results = launch(ranks.on_device, 2, device="cuda:0").results
    assert results == [("cuda:0", "gloo", 1.0)] * 2
    assert launch(p2p.pass_along, 3, device="cuda:0").results[0] == 3.0
    neighbours = launch(transfers.exchange_with_neighbours, 2, device="cuda:0").results
    assert neighbours == [[1.0, 1.0], [0.0, 0.0]]
    assert launch(calls.reduce_with, 2, "SUM", device="cuda:0").results == [3.0] * 2


def test_auto_takes_the_gpu_where_there_are_enough(monkeypatch):
    monkeypatch.delenv("MGPU_DEVICE", raising=False)
    assert launch(ranks.on_device, 1).results[0][0] == "cuda:0"
    monkeypatch.setenv("MGPU_DEVICE", "cpu")
    assert launch(ranks.on_device, 1).results[0][0] == "cpu"


def test_only_a_pinned_copy_returns_before_it_is_done():
    times = launch(data_partitioning.time_copies, 1, device="cuda:0").results[0]
    returned, done = times[True, True]
    assert returned < 0.5 * done
    assert times[True, True][1] < times[False, True][1]  # page-locked memory is faster


def test_arguments_and_results_on_the_gpu_travel_and_arrive_on_the_cpu(tmp_path):
    transfer.write(torch.ones(2, device="cuda"), tmp_path / "value", "value")
    assert transfer.read(tmp_path / "value").device.type == "cpu"
    (result,) = launch(ranks.cuda_tensor, 1, device="cuda:0").results
    assert result.device.type == "cpu" and result.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("count", range(2, torch.cuda.device_count() + 1))
def test_two_steps_are_those_of_pytorchs_data_parallel(monkeypatch, count):
    monkeypatch.delenv("MGPU_DEVICE", raising=False)
    several = devices(count)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 20, 1)
    )
    ours = DataParallel(net.to(several[0]), several)
    theirs = nn.DataParallel(copy.deepcopy(ours.module), [d.index for d in several])
    images = torch.randn(2, 10, 3, 8, 8).to(several[0])
    labels = torch.randint(20, (10, 8, 8)).to(several[0])
    for batch in images:
        outputs = [model(batch) for model in (ours, theirs)]
        torch.testing.assert_close(*outputs)
        for output in outputs:
            cross_entropy(output, labels).backward()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_the_ledger_counts_no_more_than_cuda_saw():
    torch.cuda.reset_peak_memory_stats()
    weight = torch.zeros(256, 256, device="cuda:0", requires_grad=True)
    ledger = Ledger()
    with ledger.saved_for_backward():
        loss = (weight @ weight).relu().sum()
    assert weight.nbytes <= ledger.total("cuda:0") <= torch.cuda.max_memory_allocated()
    loss.backward()


def test_a_model_split_over_one_gpu_twice_is_the_unsplit_one():
    images, labels = (tensor.cuda() for tensor in works.ResNetStages().batch(1))
    whole = torchvision.models.resnet50().cuda()
    split = resnet.ModelParallelResNet50(("cuda:0", "cuda:0"))
    split.load_state_dict(whole.state_dict())
    torch.backends.cudnn.deterministic = True
    cross_entropy(whole(images), labels).backward()
    assert len(clock.timed_step(split, images, labels)) == 4
    expected = [p.grad for p in whole.parameters()]
    torch.testing.assert_close([p.grad for p in split.parameters()], expected)


def test_stages_on_ranks_that_share_one_gpu():
    given = works.ResNetStages(), 2
    report = launch(stages.run_gpipe, 2, *given, device="cuda:0", timeout=120)
    assert sum(len(mine) for _, mine in report.results) == 161
    for schedule in (pp.Schedule1F1B, pp.ScheduleInterleaved1F1B, pp.ScheduleZBVZeroBubble):
        given = works.Pauses(0.001), 4, schedule
        launch(schedules.run_schedule, 2, *given, device="cuda:0", timeout=60)


@pytest.mark.parametrize("world_size, device", [(1, "cuda"), (2, "cuda:0")])
def test_each_wrapper_of_ddp_equals_one_process(world_size, device):
    alone = experiments.train_replicas(0, 1)
    for wrapper, options in experiments.WRAPPERS.items():
        call = experiments.train_replicas, world_size, wrapper
        for found in launch(*call, device=device, **options).results:
            torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_infinity_makes_all_ranks_skip_on_the_gpu(dtype):
    settings = {"dtype": dtype, "infinite": (1, 1), "device": "cuda:0"}
    results = launch(precision.train_scaled, 2, precision.finish_step, **settings).results
    for records in results:
        assert [scale for _, scale, _ in records] == [1024, 512, 512, 512]
        weights = records[-1][2]
        assert weights.isfinite().all() and torch.equal(weights, results[0][-1][2])


def test_the_comparison_measures_the_rows_of_one_gpu():
    experiment = training.Experiment("mobilenet_v2", batch=4, side=32, iterations=1)
    for name in ("one device", "one device + autocast"):
        found = comparison.measure_row(training.SETUPS[name], experiment, gpus=1)
        assert found["processes"] == 1 and found["memory"][0] > 0
