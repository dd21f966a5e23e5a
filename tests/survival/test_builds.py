"""Right and wrong ways to save, to go on, and to choose the samples of a step."""

from mgpu_tutorial.survival.builds import build
from tests.builds import right_and_wrong

SAVE = """
import os, shutil, tempfile, torch

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
    ],
    wrong=[
        (SAVE + "    torch.save(state, path)", "the file is torn"),
        (
            SAVE
            + """    torch.save(state, path + '.new')
    shutil.copy(path + '.new', path)""",
            "the file is torn",
        ),
        (
            SAVE
            + """    torch.save(state, path + '.draft')
    if os.path.exists(path):
        os.remove(path)
    os.rename(path + '.draft', path)""",
            "rename: the file is torn or gone (FileNotFoundError)",
        ),
        (
            SAVE
            + """    with open(path + '.draft', 'xb') as file:
        torch.save(state, file)
    os.replace(path + '.draft', path)""",
            "FileExistsError",
        ),
        (SAVE + "    torch.save(state, path + '.draft')", "there is no file"),
        (resume(first="state['step']"), "KeyError"),
        (resume(save="checkpoint.save(path, model, optimizer, epoch=1)"), 'no "step" in'),
        (resume(save=KEEP.replace("step + 1", "step")), 'the "step" in the file'),
        (resume(when="step % 3 == 0"), 'the "step" in the file'),
        (resume(when="False"), "no file after a death"),
        (
            ORDER
            + """    epoch, place = divmod(step * batch, samples)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
    return order[place : place + batch].tensor_split(world_size)[rank]""",
            "step 4: different samples: 2, expected 12",
        ),
        (
            ORDER
            + """    epoch, place = divmod(step, samples // batch)
    torch.manual_seed(epoch)
    mine = torch.randperm(samples)[place * batch :][:batch]
    return mine.tensor_split(world_size)[rank]""",
            "what dropout draws",
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
            + """    lot = torch.Generator().manual_seed(world_size)
    order = torch.randperm(samples, generator=lot)
    return order[:batch].tensor_split(world_size)[rank]""",
            "the samples of 2 ranks together",
        ),
    ],
)
