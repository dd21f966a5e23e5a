"""What every split of the work must equal: one process, one micro-batch after the other."""

import torch
from torch.nn.functional import cross_entropy

SIDE = 40  # pixels; layer4 puts out two by two, so one picture is enough for BatchNorm


def one_process(model, images, labels, micro):
    """The mean loss, and the gradients by name, of `micro` parts one after the other."""
    for parameter in model.parameters():
        parameter.grad = None
    size, losses = len(images) // micro, []
    for begin in range(0, len(images), size):
        output = model(images[begin : begin + size])
        loss = cross_entropy(output, labels[begin : begin + size])
        (loss / micro).backward()
        losses.append(loss.item())
    return sum(losses) / micro, gradients_of(model)


def gradients_of(model):
    """Those of a model whose parts lie on several devices, on the CPU."""
    return {name: p.grad.cpu().clone() for name, p in model.named_parameters()}


def equal_stacks(depth, width, count):
    """`count` layers of `depth` linear maps each, the same in every process."""
    torch.manual_seed(0)
    return [
        torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
        for _ in range(count)
    ]


def ideal_idle_share(tasks, seconds):
    """The bubble where each row works off its tasks in their order, and messages are free.

    A task lasts `seconds[kind]`; F waits for F of the stage before, B for B of the stage
    behind and for its own F. I is a B without the weights' gradients, W waits for its I.
    """
    last = max(task.stage for task in tasks)
    rows = {}
    for task in sorted(tasks, key=lambda task: task.begin):
        rows.setdefault(task.row, []).append((task.kind, task.stage, task.micro))

    def needs(kind, stage, i):
        if kind == "F":
            return [("F", stage - 1, i)] if stage else []
        if kind == "W":
            return [("I", stage, i)]
        return [("F", stage, i)] + [(kind, stage + 1, i)] * (stage < last)

    ends, clocks = {}, dict.fromkeys(rows, 0.0)
    while any(rows.values()):
        row = next(
            row
            for row, waiting in rows.items()
            if waiting and all(need in ends for need in needs(*waiting[0]))
        )  # StopIteration where the ranks wait for each other
        task = rows[row].pop(0)
        begin = max([clocks[row], *(ends[need] for need in needs(*task))])
        clocks[row] = ends[task] = begin + seconds[task[0]]
    busy = sum(seconds[task.kind] for task in tasks)
    return 1 - busy / (len(rows) * max(clocks.values()))
