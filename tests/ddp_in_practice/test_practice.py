"""Around the training loop: each mistake gives its error, each cure works."""

import itertools
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import nll_loss
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.utils.data import DataLoader

import mgpu_tutorial
from mgpu_tutorial.ddp_in_practice import measurements, practice, train_ddp, train_single
from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet
from tests.thorough import again
from tests.together import together


@cache
def whole_batch_gradients():
    """One process, one backward over all 24 samples, by hand."""
    torch.manual_seed(0)
    head = nn.Linear(512, 10)
    body = [nn.Linear(512, 512) for _ in range(6)]
    x = torch.randn(1, 24, 512, generator=torch.Generator().manual_seed(1))[0]
    for layer in body:
        x = layer(x).clamp(min=0)
    parameters = [p for layer in (head, *body) for p in layer.parameters()]
    return list(torch.autograd.grad((head(x) ** 2).mean(), parameters))


@pytest.mark.parametrize("world_size", [1, 2, again(3)])
@pytest.mark.parametrize("each, calls", [(False, 6), (True, 12)])
def test_no_sync_saves_calls_and_changes_no_gradient(world_size, each, calls):
    report = launch(
        practice.accumulate_gradients, world_size, 2, synchronise_each=each, trace=True
    )
    assert measurements.calls_of_last_step(report) == calls
    expected = whole_batch_gradients()
    for gradients, _ in report.results:
        torch.testing.assert_close(gradients, expected)


def where_no_sync_stands(rank, world_size, around_forward, around_backward):
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with model.no_sync() if around_forward else nullcontext():
        output = model(torch.full((1, 1), 1.0 + rank)).sum()
    with model.no_sync() if around_backward else nullcontext():
        output.backward()
    return model.module.weight.grad.item()


@cache
def gradients_by_place():
    """The gradients of two ranks, by whether no_sync stands around (forward, backward)."""
    places = list(itertools.product([False, True], repeat=2))
    calls = [
        partial(where_no_sync_stands, around_forward=f, around_backward=b) for f, b in places
    ]
    return dict(zip(places, together(2, *calls), strict=True))


@pytest.mark.parametrize("around_backward", [False, True])
@pytest.mark.parametrize("around_forward, gradients", [(False, [1.5, 1.5]), (True, [1, 2])])
def test_the_forward_decides_whether_backward_sends(
    around_forward, around_backward, gradients
):
    assert gradients_by_place()[around_forward, around_backward] == gradients


PARTS = {1: False, 2: False, 3: False, 4: True, 5: True, 6: False, 12: False}


def accumulate(rank, world_size, micro):
    """Returns the gradients, which take long to travel, where `PARTS` has a True."""
    found = practice.accumulate_gradients(rank, world_size, micro)
    return found if PARTS[micro] else found._replace(gradients=[])


@cache
def accumulated():
    """What two ranks have after each number of parts of their share of 12."""
    calls = [partial(accumulate, micro=micro) for micro in PARTS]
    return dict(zip(PARTS, together(2, *calls), strict=True))


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 6, 12])
def test_what_is_kept_for_backward_is_that_of_one_part(micro):
    # Of each sample: the output of each layer behind its ReLU, and that of the head.
    of_a_sample = 4 * (6 * 512 + 10)
    assert accumulated()[micro][0].kept_bytes == 12 // micro * of_a_sample


def test_a_number_of_parts_that_does_not_divide_the_batch_gives_the_same_gradients():
    """The share of 12 in 5 parts is cut into four of three."""
    for one, other in zip(accumulated()[4], accumulated()[5], strict=True):
        assert other.kept_bytes == one.kept_bytes
        for p, q in zip(one.gradients, other.gradients, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_uneven_inputs_need_join():
    with pytest.raises(RankFailed, match="rank 1 returned while rank 0 still waited"):
        launch(practice.train_on_uneven_batches, 2, join=False, timeout=10)
    first, second = well_ended()["uneven"]
    assert first == [1.0, 1.0, 1.0, 0.5, 0.5] and second == [1.0, 1.0, 1.0]


@cache
def well_ended():
    """What two ranks return of each worker that needs no launch of its own."""
    calls = {
        "uneven": partial(practice.train_on_uneven_batches, join=True),
        "divide": join_and_divide_by_those_left,
        "learn": learn_while_joined,
        "no_grad": partial(interrupt_with, between="no_grad"),
        "no_sync": partial(interrupt_with, between="no_sync"),
        "follow": practice.follow_the_running_mean,
        "load": load_each_way,
    }
    return dict(zip(calls, together(2, *calls.values()), strict=True))


def join_and_divide_by_those_left(rank, world_size):
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    means = []
    with model.join(divide_by_initial_world_size=False):
        for _ in range(5 - 2 * rank):
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            means.append(model.module.weight.grad.item())
    return means


def test_join_can_divide_by_the_ranks_that_are_left():
    assert well_ended()["divide"] == [[1.0] * 5, [1.0] * 3]


def learn_while_joined(rank, world_size):
    """The weight after the loop, after join(), and the momentum."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    with model.join():
        for _ in range(5 - 2 * rank):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        inside = model.module.weight.item()
    state = optimizer.state[model.module.weight]
    return inside, model.module.weight.item(), state["momentum_buffer"].item()


def test_join_hands_on_the_last_ranks_parameters_and_not_its_optimizer():
    first, second = well_ended()["learn"]
    assert first == (-6.8125, -6.8125, 1.1875)
    assert second == (-4.25, -6.8125, 1.75)


def interrupt_with(rank, world_size, between):
    """The running mean after a step, a forward that is none, and another step."""
    model = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(1))
    images = torch.full((4, 1), 10.0 * (rank + 1))
    model(images).sum().backward()
    with torch.no_grad() if between == "no_grad" else model.no_sync():
        output = model(images)
        if between == "no_sync":
            output.sum().backward()
    model(images).sum().backward()
    return model.module.running_mean.item()


@pytest.mark.parametrize("between", ["no_grad", "no_sync"])
def test_after_a_forward_that_will_not_synchronise_the_buffers_are_not_sent(between):
    first, second = well_ended()[between]
    assert first == pytest.approx(2.71)
    assert second == pytest.approx(0.9 * (0.9 * 1 + 2) + 2)


def test_before_each_forward_the_buffers_of_rank_0_go_to_all():
    mine, other = well_ended()["follow"]
    assert mine == pytest.approx([1, 1.9, 2.71, 3.439])
    assert other == pytest.approx([2, *(0.9 * mean + 2 for mean in mine[:3])], abs=2e-3)


def test_synchronised_batch_norm_needs_a_gpu():
    with pytest.raises(RankFailed, match="SyncBatchNorm layers only work with GPU"):
        launch(practice.synchronise_batch_norm, 2, device="cpu")


def test_a_plain_module_refuses_what_the_wrapper_saved():
    with pytest.raises(RankFailed, match=r'Unexpected key.*"module.weight"'):
        launch(practice.load_what_the_wrapper_saved, 2)


def load_each_way(rank, world_size):
    """The keys that a wrapper misses in a plain state_dict; each other way must work."""
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    plain, prefixed = wrapped.module.state_dict(), wrapped.state_dict()
    wrapped.module.load_state_dict(plain)
    wrapped.load_state_dict(prefixed)
    missing = wrapped.load_state_dict(plain, strict=False).missing_keys
    consume_prefix_in_state_dict_if_present(prefixed, "module.")
    nn.Linear(2, 1).load_state_dict(prefixed)
    return missing


def test_names_without_prefix_fit_the_module_and_not_the_wrapper():
    assert well_ended()["load"] == [["module.weight", "module.bias"]] * 2


def test_a_checkpoint_is_written_once_and_read_by_all(tmp_path):
    results = launch(practice.save_and_load, 3, str(tmp_path)).results
    assert results == [["weight", "bias"]] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_the_profiler_sees_six_transfers_and_the_first_under_backward(tmp_path):
    folder = str(tmp_path)
    launch(practice.profile_step, 2, folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.json", "rank1.json"]
    for rank in (0, 1):
        sent = practice.read_trace(folder, rank, "gloo:all_reduce")
        assert len(sent) == len(practice.read_trace(folder, rank, "c10d::allreduce_")) == 6
        accumulated = practice.read_trace(folder, rank, "torch::autograd::AccumulateGrad")
        copied = practice.read_trace(folder, rank, "torch::distributed::reducer::mul_out")
        assert len(accumulated) == len(copied) == 14
        assert min(sent)[0] < max(accumulated)[0]
    assert "2 ranks" in repr(measurements.draw_trace(folder))


def test_a_trace_is_read_in_milliseconds(tmp_path):
    events = [
        {"ph": "X", "name": "gloo:all_reduce", "ts": 2000.0, "dur": 500.0},
        {"ph": "i", "name": "gloo:all_reduce", "ts": 3000.0},  # a moment has no end
        {"ph": "X", "name": "aten::mul", "ts": 4000.0, "dur": 100.0},
        {"ph": "X", "name": "gloo:all_reduce", "ts": 5000.0, "dur": 1500.0},
    ]
    (tmp_path / "rank1.json").write_text(json.dumps({"traceEvents": events}))
    found = practice.read_trace(str(tmp_path), 1, "gloo:all_reduce")
    assert found == [(2.0, 2.5), (5.0, 6.5)]


def test_the_rank_that_is_late_has_the_short_call(tmp_path):
    launch(practice.profile_step, 2, str(tmp_path), late=0.3)
    first = [min(practice.read_trace(str(tmp_path), r, "gloo:all_reduce")) for r in (0, 1)]
    lengths = [end - begin for begin, end in first]
    assert lengths[0] > lengths[1]
    assert lengths[0] < 10_000  # in milliseconds


@pytest.mark.parametrize(
    "intervals, length",
    [
        ([], 0),
        ([(0, 2), (5, 6)], 3),
        ([(5, 9), (0, 6)], 9),
        ([(0, 10), (2, 3), (4, 12)], 12),
        ([(0, 1), (1, 2)], 2),
    ],
)
def test_the_union_counts_each_moment_once(intervals, length):
    assert practice.union_length(intervals) == length


def digits_by_hand(batches):
    """SmallConvNet after plain SGD over these (images, labels), in one process."""
    torch.manual_seed(0)
    model = SmallConvNet()
    for images, labels in batches:
        loss = nll_loss(model(images), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= 0.05 * gradient
    return model.state_dict()


@pytest.mark.fresh
def test_calls_at_the_same_time_are_drawn_in_lanes_of_their_own():
    found = measurements.in_lanes([(3, 4), (0, 2), (1, 5), (2, 3), (6, 7)])
    assert found == [[(0, 2), (2, 3), (3, 4), (6, 7)], [(1, 5)]]


@pytest.mark.fresh
def test_torchrun_trains_on_two_ranks_what_one_process_trains(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--local-addr", "127.0.0.1"]  # the machine's name may lead nowhere
    package = str(Path(mgpu_tutorial.__file__).parents[1])
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "-m", train_ddp.__name__],
        cwd=tmp_path,
        env=os.environ
        | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": package, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    pattern = r"rank (\d): PID (\d+), \d+ MiB, cpu: (\d+) batches an epoch"
    lines = sorted(done.stdout.splitlines())
    found = [re.fullmatch(pattern, line).groups() for line in lines]
    assert [(rank, batches) for rank, _, batches in found] == [(r, "12") for r in "01"]
    assert len({pid for _, pid, _ in found}) == 2

    def order(epoch, count):
        """Another order in each epoch; the sampler's last rank sees the first ones again."""
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        return torch.cat([order, order[: -count % 2]])

    data = digits()
    orders = [order(epoch, len(data)).split(120) for epoch in (0, 1)]
    parts = [index for each in orders for index in each]
    expected = digits_by_hand([(data.images[i], data.labels[i]) for i in parts])
    # 24 steps in float32: rounding is 1e-5 on one processor, a forgotten set_epoch 2e-3.
    torch.testing.assert_close(torch.load(tmp_path / "model.pt"), expected, rtol=0, atol=2e-4)


@pytest.mark.fresh
def test_the_script_for_one_process_shuffles_trains_and_stores(tmp_path, capsys, monkeypatch):
    seen = []

    class Seen(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                seen.append(batch)
                yield batch

    monkeypatch.setattr(train_single, "DataLoader", Seen)
    train_single.main(str(tmp_path), epochs=1)
    assert re.match(r"PID \d+, \d+ MiB, \w+: 12 batches", capsys.readouterr().out)
    stored = torch.load(tmp_path / "model.pt", map_location="cpu")
    torch.testing.assert_close(stored, digits_by_hand(seen), rtol=0, atol=2e-4)
    labels, ordered = torch.cat([labels for _, labels in seen]), digits().labels
    assert torch.equal(labels.bincount(), ordered.bincount())
    assert not torch.equal(labels, ordered)


def test_the_exercise_knows_what_one_process_counts():
    data = digits()
    torch.manual_seed(0)
    model = SmallConvNet()
    right = sum(
        int(model(data.images[i : i + 1]).argmax()) == int(data.labels[i]) for i in range(50)
    )
    assert measurements.accuracy_of_one_process(50) == pytest.approx(right / 50)
