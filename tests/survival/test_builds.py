"""Right and wrong ways to save, to go on, and to choose the samples of a step."""

from mgpu_tutorial.survival.builds import build
from tests.builds import right_and_wrong

SAVE = """
import os, tempfile, torch

def save_whole(path, state):
"""
RESUME = """
import os, torch
import torch.distributed as dist
from mgpu_tutorial.shared import checkpoint

def resume_or_start(path, model, optimizer, take_step, steps):
    state = checkpoint.load(path, model, optimizer)
    first = {first}
    for step in range(first, steps):
        take_step(step)
        if {when}:
            {save}
    return first
"""
GET = "state.get('step', 0)"
THIRD = "(step + 1) % 3 == 0"
KEEP = "checkpoint.save(path, model, optimizer, step=step + 1)"
ORDER = """
import torch

def samples_of(step, rank, world_size, batch, samples):
"""


def resume(first=GET, when=THIRD, save=KEEP):
    return RESUME.format(first=first, when=when, save=save)


test_right, test_wrong = right_and_wrong(
    build,
    right=[
        SAVE
        + """    folder = os.path.dirname(path)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        torch.save(state, file)
    os.rename(file.name, path)""",
        SAVE
        + """    torch.save(state, path + '.new')
    os.replace(path + '.new', path)""",
        resume(first="state['step'] if state else 0", when="step % 3 == 2"),
        resume(first="state.pop('step', 0)"),
        ORDER
        + """    per_epoch = samples // batch
    epoch = step // per_epoch
    lot = torch.Generator()
    lot.manual_seed(1000 + epoch)
    order = torch.randperm(samples, generator=lot).tolist()
    begin = batch * (step % per_epoch)
    return order[begin + rank : begin + batch : world_size]""",
        ORDER
        + """    import random
    per_epoch = samples // batch
    order = random.Random(step // per_epoch).sample(range(samples), samples)
    begin = batch * (step % per_epoch)
    mine = order[begin : begin + batch]
    return mine[rank * batch // world_size : (rank + 1) * batch // world_size]""",
    ],
    wrong=[
        (SAVE + "    torch.save(state, path)", "the file is torn"),
        (
            SAVE
            + """    if os.path.exists(path):
        os.remove(path)
    torch.save(state, path + '.draft')
    os.rename(path + '.draft', path)""",
            "the file is torn",
        ),
        (SAVE + "    torch.save(state, path + '.draft')", "there is no file"),
        (resume(first="0"), "the steps of the second life"),
        (resume(save=KEEP.replace("step + 1", "step")), 'the "step" in the file'),
        (resume(when="step % 3 == 0"), 'the "step" in the file'),
        (resume(first="state.get('step', -1) + 1"), "the steps of the second life"),
        (resume(when="False"), "no file after a death"),
        (
            ORDER
            + """    lot = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randperm(samples, generator=lot)[: batch // world_size]""",
            "different samples",
        ),
        (
            ORDER
            + """    lot = torch.Generator().manual_seed(0)
    order = torch.randperm(samples, generator=lot)
    place = step % (samples // batch)
    return order[place * batch :][:batch].tensor_split(world_size)[rank]""",
            "begin with the same batch",
        ),
        (
            ORDER
            + """    torch.manual_seed(step)
    return torch.randperm(samples)[:batch].tensor_split(world_size)[rank]""",
            "of 48 samples: different samples",
        ),
        (
            ORDER
            + """    lot = torch.Generator().manual_seed(world_size)
    order = torch.randperm(samples, generator=lot)
    return order[:batch].tensor_split(world_size)[rank]""",
            "the samples of 2 ranks together",
        ),
        (
            ORDER
            + """    epoch, place = divmod(step, samples // batch)
    lot = torch.Generator().manual_seed(epoch)
    order = torch.randperm(samples, generator=lot)
    size = batch // world_size
    return order[place * batch + rank * size :][:size]""",
            "5 ranks, batch 12",
        ),
    ],
)
