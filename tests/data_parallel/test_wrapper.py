"""The four stages equal one device, and each limit is as the notebook says."""

import copy
import os
import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel import experiments, wrapper
from mgpu_tutorial.lab import Ledger, devices, launch, place, placement, record_threads, where
from mgpu_tutorial.shared.data import pictures
from tests.data_parallel import reference


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("MGPU_DEVICE", "cpu")
    monkeypatch.delenv("MGPU_DATA", raising=False)


@pytest.fixture
def d():
    return devices(4)


def batch(count=24, side=8):
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(count, 3, side, side, generator=generator)
    labels = torch.randint(20, (count, side, side), generator=generator)
    return images * torch.linspace(1, 4, count).view(-1, 1, 1, 1), labels


def pixel_net(norm=True):
    torch.manual_seed(0)
    net = experiments.PixelNet(hidden=4)
    net.norm = net.norm if norm else nn.Identity()
    return net


def refuses(exception, words, call):
    with pytest.raises(exception, match=words):
        call()


# The stages


@pytest.mark.parametrize(
    "samples, count, sizes",
    [
        (30, 1, [30]),
        (30, 2, [15] * 2),
        (30, 3, [10] * 3),
        (256, 4, [64] * 4),
        (10, 8, [2] * 5),
        (10, 4, [3, 3, 3, 1]),
    ],
)
def test_the_sizes_of_the_pieces(samples, count, sizes):
    lines, several = [], devices(count)
    net = experiments.Loud(nn.Linear(4, 2), lines.append).to(several[0])
    output = wrapper.DataParallel(net, several)(torch.randn(samples, 4))
    expected = [
        f"inside  {device}: input ({size}, 4), output ({size}, 2)"
        for device, size in zip(several, sizes, strict=False)
    ]
    assert sorted(lines) == expected
    assert output.shape == (samples, 2) and output.device == several[0]


NESTED = [
    torch.arange(8.0),
    [torch.arange(10), "text"],
    (torch.ones(6, 2), {"a": torch.zeros(6), "b": [torch.arange(6), None]}, 3),
    {"names": ["x", "y"], "scale": 0.5, "image": torch.ones(4, 3)},
    "text",
    (),
    {},
]


@pytest.mark.parametrize("value", NESTED)
def test_scatter_cuts_as_pytorchs_does(monkeypatch, d, value):
    """PyTorch's own walk through containers; only the cut of one tensor is ours here."""
    from torch.nn.parallel import scatter_gather

    class Cut:
        @staticmethod
        def apply(targets, sizes, dim, tensor):
            pieces = tensor.chunk(len(targets), dim)
            return tuple(place(p, t) for p, t in zip(pieces, targets, strict=False))

    monkeypatch.setattr(scatter_gather, "Scatter", Cut)
    expected = list(scatter_gather.scatter(value, d[:2]))
    same(wrapper.scatter(value, d[:2]), expected)


def same(mine, other):
    assert type(mine) is type(other)
    if isinstance(mine, torch.Tensor):
        assert mine.device == other.device and torch.equal(mine, other)
    elif isinstance(mine, dict):
        assert list(mine) == list(other)
        same(list(mine.values()), list(other.values()))
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(other)
        for a, b in zip(mine, other, strict=True):
            same(a, b)
    else:
        assert mine == other


def test_replicas_are_on_their_devices_and_the_first_shares_memory(d):
    net = pixel_net().to(d[0])
    replicas = wrapper.replicate(net, d)
    for r, replica in enumerate(replicas):
        tensors = [*replica.parameters(), *replica.buffers()]
        assert {t.device for t in tensors} == {d[r]} and len(tensors) == 9
        shared = replica.conv.weight.data_ptr() == net.conv.weight.data_ptr()
        assert shared == (r == 0) and replica.conv is not net.conv
        assert not replica.conv.weight.is_leaf and replica.training
    assert replicas[0].norm.running_mean is net.norm.running_mean
    assert isinstance(net.conv.weight, nn.Parameter) and net.conv.weight.is_leaf


def test_the_gradients_of_the_replicas_add_up_on_the_module(d):
    net = nn.Linear(4, 2).to(d[0])
    replicas = wrapper.replicate(net, d[:3])
    for replica in replicas:
        replica.weight.retain_grad()
    pieces = wrapper.scatter(torch.randn(30, 4), d[:3])
    outputs = wrapper.parallel_apply(replicas, pieces, d[:3])
    wrapper.gather(outputs, d[0]).square().sum().backward()
    gradients = [replica.weight.grad for replica in replicas]
    assert [g.device for g in gradients] == list(d[:3])
    torch.testing.assert_close(net.weight.grad, sum(g.to(d[0]) for g in gradients))


def test_tied_and_frozen_parameters_stay_so(d):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    net[2].weight.requires_grad_(False)
    net.to(d[0])
    replica = wrapper.replicate(net, d[1:2])[0]
    assert replica[0].weight is replica[1].weight
    assert not replica[2].weight.requires_grad and replica[2].bias is None
    alone = copy.deepcopy(net)
    inputs = torch.randn(8, 4)
    wrapper.DataParallel(net, d)(inputs).sum().backward()
    alone(inputs.to(d[0])).sum().backward()
    torch.testing.assert_close(net[0].weight.grad, alone[0].weight.grad)
    assert net[2].weight.grad is None


def test_each_replica_has_a_thread_and_all_share_a_process(d):
    seen = []

    class WhoAmI(nn.Module):
        def forward(self, x):
            seen.append((os.getpid(), threading.current_thread().name))
            return x

    wrapper.DataParallel(WhoAmI(), d)(torch.zeros(8, 1))
    assert sorted(seen) == [(os.getpid(), str(device)) for device in d]


def test_no_grad_holds_in_the_threads(d):
    net = nn.Linear(4, 2).to(d[0])
    with torch.no_grad():
        assert not wrapper.DataParallel(net, d)(torch.zeros(8, 4)).requires_grad
    assert wrapper.DataParallel(net, d)(torch.zeros(8, 4)).requires_grad


def test_what_a_thread_raises_is_raised_here(d):
    class Fails(nn.Module):
        def forward(self, x):
            if x.device == d[2]:
                raise KeyError("nothing there")
            return x

    with pytest.raises(KeyError, match="nothing there") as caught:
        wrapper.DataParallel(Fails(), d)(torch.zeros(8, 1))
    assert caught.value.__notes__ == ["in replica 2 on virtual:2"]


def test_scalars_come_back_as_a_vector_and_other_things_do_not(d):
    losses = wrapper.DataParallel(experiments.WithLoss(nn.Linear(4, 2).to(d[0])), d)(
        torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)
    )
    assert losses.shape == (4,) and losses.device == d[0]
    refuses(
        TypeError, "gather joins tensors, got dict", lambda: wrapper.gather([{}, {}], d[0])
    )


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_stage_is_that_of_pytorchs_data_parallel(monkeypatch, count):
    several = devices(count)
    reference.on_virtual_devices(monkeypatch)
    reference.compare_stages(several)


# One device and several


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("net", [pixel_net(norm=False), pixel_net().eval()])
def test_several_devices_equal_one(d, net, count):
    images, labels = batch()
    alone = experiments.one_step(net, images, labels, d[:1])
    several = experiments.one_step(net, images, labels, d[:count])
    for name in alone:
        assert experiments.distance(several[name], alone[name]) < 1e-5, name


def test_one_step_is_that_of_the_plain_module():
    images, labels = batch()
    net = pixel_net()
    found = experiments.one_step(net, images, labels, devices(1))
    loss = cross_entropy(net(images), labels)
    loss.backward()
    assert torch.equal(found["loss"][0], loss.detach())
    assert all(
        torch.equal(a, p.grad)
        for a, p in zip(found["gradients"], net.parameters(), strict=True)
    )
    assert torch.equal(found["running mean"][0], net.norm.running_mean)


def test_batch_norm_differs_and_keeps_the_first_pieces_statistics(d):
    images, labels = batch()
    alone = experiments.one_step(pixel_net(), images, labels, d[:1])
    several = experiments.one_step(pixel_net(), images, labels, d)
    piece = experiments.one_step(pixel_net(), images[:6], labels[:6], d[:1])
    for name in alone:
        assert experiments.distance(several[name], alone[name]) > 1e-4, name
    for name in ("running mean", "running variance"):
        assert torch.equal(several[name][0], piece[name][0])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_eight_steps_train_like_one_device(count):
    several, losses = devices(count), {}
    images, labels = batch(25)
    for where_ in ("alone", "several"):
        net = pixel_net(norm=False).to(several[0])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        losses[where_] = []
        for _ in range(4):
            if where_ == "several":
                loss = wrapper.eight_steps(net, optimizer, images, labels, several)
            else:
                optimizer.zero_grad()
                output = net(images.to(several[0]))
                tensor = cross_entropy(output, labels.to(several[0]))
                tensor.backward()
                optimizer.step()
                loss = tensor.item()
            losses[where_].append(loss)
    assert losses["several"] == pytest.approx(losses["alone"], rel=1e-5)
    assert losses["several"][-1] < losses["several"][0]


def test_a_process_each_has_the_same_gradient(d):
    images, labels = batch()
    net = pixel_net(norm=False)
    results = launch(wrapper.process_each, 4, net, images, labels).results
    alone = experiments.one_step(net, images, labels, d)["gradients"]
    for _, gradients in results:
        torch.testing.assert_close(gradients, alone)
    assert len({pid for pid, _ in results} | {os.getpid()}) == 5


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_inside_needs_the_sum_for_an_uneven_batch(d, reduction):
    images, labels = batch(10)
    net = pixel_net(norm=False).to(d[0])
    losses = wrapper.DataParallel(experiments.WithLoss(net, reduction), d)(images, labels)
    alone = cross_entropy(net(images.to(d[0])), labels.to(d[0]))
    mine = losses.mean() if reduction == "mean" else losses.sum() / labels.numel()
    assert len(losses) == 4
    assert torch.allclose(mine, alone, rtol=1e-5) == (reduction == "sum")


# What is lost, what is chosen, what is refused


def test_attributes_are_lost_and_the_first_devices_buffers_are_not(d):
    for count, calls in ((1, 3), (3, 0)):
        counting = experiments.Counting().to(d[0])
        for _ in range(3):
            wrapper.DataParallel(counting, d[:count])(torch.zeros(6, 1))
        assert (counting.calls, counting.calls_in_buffer.item()) == (calls, 3)


def test_the_first_device_leads_and_the_output_may_go_elsewhere(d):
    net = nn.Linear(4, 2).to(d[3])
    model = wrapper.DataParallel(net, [d[3], d[0], d[1]], output_device="virtual:1")
    output = model(torch.zeros(9, 4))
    output.sum().backward()
    assert output.device == d[1] and net.weight.grad.device == d[3]


def test_names_in_a_checkpoint(d):
    net = nn.Linear(4, 2).to(d[0])
    saved = wrapper.DataParallel(net, d).state_dict()
    assert list(saved) == ["module.weight", "module.bias"]
    nn.modules.utils.consume_prefix_in_state_dict_if_present(saved, "module.")
    plain = nn.Linear(4, 2)
    plain.load_state_dict(saved)
    assert torch.equal(plain.weight, net.weight.cpu())


def test_bad_input_is_refused_in_clear_words(d):
    net = nn.Linear(4, 2).to(d[0])
    model, x = wrapper.DataParallel(net, d), torch.zeros(8, 4)
    refuses(
        ValueError, "virtual:1 more than once", lambda: wrapper.DataParallel(net, [*d, d[1]])
    )
    refuses(
        ValueError, "more than once", lambda: wrapper.DataParallel(net, ["virtual", d[0]])
    )
    refuses(
        ValueError, "list of devices, .* got \\[\\]", lambda: wrapper.DataParallel(net, [])
    )
    refuses(ValueError, "list of devices, .* got 2", lambda: wrapper.DataParallel(net, 2))
    refuses(ValueError, "the batch is empty", lambda: model(x[:0]))
    refuses(ValueError, "batch of 3 cannot fill 4 devices", lambda: model(x[:3]))
    refuses(ValueError, r"different batch sizes: \[7, 8\]", lambda: model(x, x[:7]))
    refuses(ValueError, "scalar tensor has no batch", lambda: model(torch.zeros(())))
    refuses(ValueError, "scalar tensor", lambda: model(x, scale={"a": torch.zeros(())}))
    away = wrapper.DataParallel(nn.Linear(4, 2).to(d[1]), d)
    refuses(RuntimeError, r"virtual:0 \(device_ids\[0\]\) but found", lambda: away(x))
    mixed = nn.Sequential(nn.Linear(4, 4).to(d[0]), nn.BatchNorm1d(4))
    refuses(RuntimeError, "device: cpu", lambda: wrapper.DataParallel(mixed, d)(x))


# Memory, time, pictures


@pytest.mark.parametrize("samples, count, classes", [(32, 4, 20), (12, 3, 5), (8, 1, 9)])
def test_memory_is_what_the_shapes_say(samples, count, classes):
    several, pixels = devices(count), 16 * 16
    net = experiments.PixelNet(hidden=16, classes=classes).to(several[0])
    images = torch.zeros(samples, 3, 16, 16)
    labels = torch.zeros(samples, 16, 16, dtype=torch.int64)
    weights = 4 * sum(p.numel() for p in net.parameters())
    own = samples // count * 4 * pixels * (3 + 16 + 16) + weights
    whole = samples * pixels * (8 + 2 * 4 * classes)
    for inside in (False, True):
        ledger = experiments.ledger_of_step(net, images, labels, several, inside)
        for device in several:
            expected = own + (2 * weights if device == several[0] else 0)
            if inside:
                expected += samples // count * pixels * (8 + 4 * classes)
            elif device == several[0]:
                expected += whole
            elif count == 1:
                expected -= samples * 4 * classes * pixels
            assert ledger.total(device) == pytest.approx(expected, rel=0.01)
    assert ledger[several[0]]["gathered outputs"] == 4 * count


def test_the_first_device_is_the_tall_one_until_the_loss_moves_inside(d):
    images, labels = batch(32, 16)
    net = experiments.PixelNet().to(d[0])
    outside = experiments.ledger_of_step(net, images, labels, d)
    inside = experiments.ledger_of_step(net, images, labels, d, inside=True)
    assert outside.total(d[0]) > 4 * outside.total(d[1])
    assert inside.total(d[0]) < 1.1 * inside.total(d[1])


def test_the_meta_device_predicts_what_mobilenet_keeps():
    net, _, _ = experiments.mobilenet(1)
    ledger = Ledger()
    with ledger.saved_for_backward(net):
        net(torch.randn(2, 3, 32, 32))
    assert ledger["cpu"]["activations"] == experiments.kept_without_computing(2, 32)


def test_mobilenet_trains_with_a_cosine_schedule(d):
    history = experiments.train_mobilenet(d[:2], steps=3, batch=8, side=64)
    assert [round(lr, 4) for _, lr in history] == [0.1, 0.075, 0.025]
    assert all(0 < loss < 100 for loss, _ in history)


def test_a_step_is_recorded_with_a_lane_a_device(d):
    net = nn.Linear(4, 3).to(d[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record_threads() as report:
        wrapper.eight_steps(net, optimizer, torch.zeros(8, 4), torch.zeros(8).long(), d)
    assert report.lanes == ["main", *map(str, d)]
    notes = [e.note for e in report.events if e.rank == 0]
    assert [int(note[0]) for note in notes] == [1, 2, 4, 5, 6, 8]
    assert [e.note for e in report.events if e.rank > 0] == ["3 forward"] * 4
    assert [int(name[0]) for name in experiments.phases(report)] == [1, 2, 3, 4, 5, 6, 8]
    whole = max(e.end for e in report.events) - report.events[0].begin
    assert 0 < sum(experiments.phases(report).values()) <= whole


def test_threads_share_one_interpreter_and_wait_together(d):
    python = experiments.both_ways(experiments.Interpreted(), torch.randn(4, 20_000), d)
    waiting = experiments.both_ways(experiments.Waiting(), torch.zeros(4, 1), d)
    assert python.cores < 1.25 and waiting.in_threads < 0.6 * waiting.in_turn


def test_the_walk_through_shows_where_everything_is(d):
    net = nn.Linear(4, 2).to(d[0])
    before = net.weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    steps = experiments.walk_through(
        net, optimizer, torch.randn(9, 4), torch.zeros(9).long(), d[:3]
    )
    assert not torch.equal(net.weight, before) and len(steps) == 9
    frames = placement(steps).frames
    assert len({(frame.width, frame.height) for frame in frames}) == 1
    assert (
        repr(frames[2]).splitlines()[3] == "  virtual:1: piece 1 3×4, + replica 1 10 numbers"
    )
    assert repr(frames[8]).splitlines()[3] == "  virtual:1: nothing"
    assert where({"x": torch.zeros(2, 3), "n": net}).rows == [
        ["x", "cpu", "2×3"],
        ["n", "virtual:0", "10 numbers"],
    ]


# Pictures


def test_generated_pictures_have_the_shape_of_cifar():
    train, test = pictures(), pictures(train=False)
    assert train.images.shape == (2000, 3, 32, 32) and train.images.dtype == torch.uint8
    assert train.source == "generated pictures" and len(test) == 500
    assert set(train.labels.tolist()) == set(range(10))
    assert torch.equal(pictures().images, train.images)
    images, labels = train.batch(slice(5), side=112)
    assert images.shape == (5, 3, 112, 112) and torch.equal(labels, train.labels[:5])
    assert abs(train.batch(slice(None))[0].mean()) < 0.2


def test_generated_pictures_can_be_learned():
    """The nearest mean of the spectrum tells their class far better than chance."""

    def features(data):
        spectrum = torch.fft.fft2(data.batch(slice(None))[0].mean(dim=1)).abs()
        return spectrum[:, :8].flatten(1)

    train, test = pictures(), pictures(train=False)
    known, asked = features(train), features(test)
    means = torch.stack([known[train.labels == c].mean(dim=0) for c in range(10)])
    found = torch.cdist(asked, means).argmin(dim=1)
    assert (found == test.labels).float().mean() > 0.6


def test_cifar_is_used_where_it_is_on_disk(tmp_path, monkeypatch):
    import pickle

    import numpy as np

    from mgpu_tutorial.shared.vision import torchvision

    monkeypatch.setenv("MGPU_DATA", str(tmp_path))
    assert pictures().source == "generated pictures"  # a folder with something else
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    with pytest.raises(ValueError, match="holds no readable CIFAR10") as caught:
        pictures()
    assert "t.datasets.CIFAR10('FOLDER', download=True)" in str(caught.value)
    rows = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": [3, 7]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(
        torchvision.datasets.cifar, "check_integrity", lambda *args: True, raising=False
    )
    data = pictures()
    assert data.source == "CIFAR-10" and data.images.shape == (10, 3, 32, 32)
    assert data.labels.tolist() == [3, 7] * 5
    assert torch.equal(data.images[1].flatten(), torch.from_numpy(rows[1]))
