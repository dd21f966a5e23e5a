"""What every split of the work must equal: one process, one piece after the other."""

import torch
from torch.nn.functional import cross_entropy

SIDE = 40  # pixels; layer4 puts out two by two, so one picture is enough for BatchNorm


def one_process(model, images, labels, micro):
    """The mean loss, and the gradients by name, of `micro` pieces one after the other."""
    for parameter in model.parameters():
        parameter.grad = None
    size, losses = len(images) // micro, []
    for begin in range(0, len(images), size):
        output = model(images[begin : begin + size])
        loss = cross_entropy(output, labels[begin : begin + size])
        (loss / micro).backward()
        losses.append(loss.item())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return sum(losses) / micro, gradients


def assert_same(found, expected):
    """The same bits; where they are not, the message says where and by how much."""
    if found.keys() != expected.keys() or not all(
        torch.equal(values, expected[name]) for name, values in found.items()
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        raise AssertionError("not the same bits")


def gradients_of(model):
    """Those of a model whose parts lie on several devices, on the CPU."""
    return {name: p.grad.cpu() for name, p in model.named_parameters()}


def ideal_idle_share(tasks, seconds):
    """The bubble where each row works off its tasks in their order, and messages are free.

    A task lasts `seconds[kind]`; F waits for F of the stage before, B for B of the stage
    behind and for its own F. I is a B without the weights' gradients, W waits for its I.
    """
    last = max(task.stage for task in tasks)
    rows = [
        sorted((t for t in tasks if t.row == row), key=lambda t: t.begin)
        for row in sorted({task.row for task in tasks})
    ]
    ends, clocks, busy = {}, [0.0] * len(rows), 0.0
    while any(rows):
        before = len(ends)
        for row, waiting in enumerate(rows):
            while waiting:
                kind, stage, i = waiting[0].kind, waiting[0].stage, waiting[0].micro
                if kind == "F":
                    needs = [("F", stage - 1, i)] if stage else []
                elif kind == "W":
                    needs = [("I", stage, i)]
                else:
                    needs = [("F", stage, i)] + [(kind, stage + 1, i)] * (stage < last)
                if any(need not in ends for need in needs):
                    break
                begin = max([clocks[row], *(ends[need] for need in needs)])
                clocks[row] = ends[kind, stage, i] = begin + seconds[kind]
                busy += seconds[kind]
                waiting.pop(0)
        assert len(ends) > before, "the ranks wait for each other"
    return 1 - busy / (len(rows) * max(clocks))


def equal_stacks(depth, width, count):
    """`count` layers of `depth` linear maps each, the same in every process."""
    torch.manual_seed(0)
    return [
        torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
        for _ in range(count)
    ]
