"""The experiment trains as a plain loop does, on every batch in turn."""

import pytest
import torch
from torch import nn

from mgpu_tutorial.data_parallel import experiments
from mgpu_tutorial.data_parallel.wrapper import DataParallel
from mgpu_tutorial.lab import devices
from mgpu_tutorial.shared.data import pictures


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 10))


def optimizer_and_schedule(net, steps):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


def small_batches(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 3, 2, 2, generator=generator), torch.arange(8) + step % 3)
        for step in range(count)
    ]


def test_training_is_that_of_a_plain_loop():
    there = devices(3)
    batches, plain = small_batches(4), small_net()
    optimizer, schedule = optimizer_and_schedule(plain, 4)
    expected = []
    for images, labels in batches:
        loss = nn.functional.cross_entropy(plain(images), labels)
        optimizer.zero_grad()
        loss.backward()
        expected.append((loss.item(), optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()

    net = small_net().to(there[0])
    model = DataParallel(net, there)
    history = experiments.train(model, *optimizer_and_schedule(net, 4), batches, there[0])
    for (loss, rate), (expected_loss, expected_rate) in zip(history, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert rate == pytest.approx(expected_rate)
    for parameter, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), other.detach())


def test_every_picture_comes_once_before_one_comes_again():
    data = pictures()
    batches = list(experiments.shuffled_batches(data, 5, 500, 32))
    images = torch.cat([images for images, _ in batches])
    labels = torch.cat([labels for _, labels in batches])
    count = len(data)  # 2,000: the fifth batch is the first one again
    for rows, other in ((images, data.batch(slice(None))[0]), (labels, data.labels)):
        assert torch.equal(rows[count:], rows[: len(rows) - count])
        assert not torch.equal(rows[:count], other)
    distinct = {row.sum().item() for row in data.batch(slice(None))[0].double()}
    assert {row.sum().item() for row in images[:count].double()} == distinct
    assert len(distinct) > 0.99 * count


def test_mobilenet_trains_through_data_parallel_with_its_own_schedule(monkeypatch):
    """The loop is tested above; here only what it is given, with a small net instead."""
    given = {}

    def train(model, optimizer, schedule, batches, home):
        shapes = [(images.shape, len(labels)) for images, labels in batches]
        given.update(model=model, optimizer=optimizer, shapes=shapes, home=home)
        given["rates"] = [schedule.get_last_lr()[0]]
        for _ in shapes:
            optimizer.step()
            schedule.step()
            given["rates"].append(schedule.get_last_lr()[0])
        return "history"

    monkeypatch.setattr(experiments, "train", train)
    pair = devices(2)
    assert experiments.train_mobilenet(pair, steps=2, batch=6, side=40) == "history"
    assert given["shapes"] == [((6, 3, 40, 40), 6)] * 2 and given["home"] == pair[0]
    assert given["model"].devices == pair and len(given["model"].module.classifier) == 2
    assert given["rates"] == pytest.approx([0.1, 0.05, 0.0])
    assert given["optimizer"].defaults["momentum"] == 0.9
    assert given["optimizer"].param_groups[0]["weight_decay"] == 5e-4
