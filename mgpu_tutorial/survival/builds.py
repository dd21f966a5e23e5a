"""What `save_whole`, `resume_or_start`, `leave_together` and `samples_of` must do."""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.shared import checkpoint
from mgpu_tutorial.survival import elastic, figures

AWAY = "os.fork", "os.posix_spawn", "subprocess.Popen"  # what Python says it is about to do


def _write(rank: int, world_size: int, save: Callable, path: str, number: int) -> list[str]:
    """Save 2,000 numbers alike, and look at the file before each call; returns the first
    call at which there was no whole file, or by which the save left this process.
    """
    old = Path(path).read_bytes() if number > 1 else None
    torn: list[str] = []

    def look(frame: FrameType, event: str, function: Any) -> None:
        if event not in ("call", "c_call") or torn:
            return
        try:
            if Path(path).read_bytes() != old:
                weights = torch.load(path, weights_only=True)["weights"]
                assert len(weights.unique()) == 1
        except Exception as error:
            name = function.__name__ if event == "c_call" else frame.f_code.co_name
            torn.append(f"{name}: the file is torn or gone ({type(error).__name__})")

    def leave(event: str, _: tuple) -> None:
        if event in AWAY and sys.getprofile() is look:
            torn.append(f"{event}: another process writes, which can die as well")

    sys.addaudithook(leave)
    sys.setprofile(look if old else None)
    save(path, {"weights": torch.full((2000,), number)})
    if old and sys.getprofile() is not look:
        torn.append("sys.setprofile, by which this build looks at the file")
    sys.setprofile(None)
    return torn


def writes_what_can_be_read(save: Callable) -> None:
    """write a file that torch.load reads, and replace it at the next save"""
    with TemporaryDirectory() as folder:
        for number in (1, 2):
            launch(_write, 1, save, f"{folder}/run.pt", number)
            found = os.listdir(folder)
            assert "run.pt" in found, f"there is no file at `path`, but {found}"
            weights = torch.load(f"{folder}/run.pt", weights_only=True)["weights"]
            expect(weights, torch.full((2000,), number), "what was read")


def survives_a_death(save: Callable) -> None:
    """leave the old file or the new one whole, at whichever call the process is killed"""
    with TemporaryDirectory() as folder:
        launch(_write, 1, save, f"{folder}/run.pt", 1)
        for call in launch(_write, 1, save, f"{folder}/run.pt", 2).results[0]:
            raise AssertionError(f"killed in the second save, at its call of {call}")


def _not_ours(path: str, state: dict) -> None:
    raise AssertionError("`checkpoint.save` used its own save_whole. Pass write=save_whole")


def _steps_of(
    rank: int,
    world_size: int,
    resume: Callable,
    path: str,
    steps: int,
    until: int,
    every: int = 3,
) -> tuple[int | None, list[int], float]:
    """The first step, the steps taken, and a weight to which each step adds its number."""
    checkpoint.save_whole = _not_ours
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    nn.init.zeros_(model.weight)
    first, taken = None, []

    def take_step(step: int) -> None:
        if step == until < steps:
            raise InterruptedError
        taken.append(step)
        model.weight.grad = torch.full((1, 1), -float(step))
        optimizer.step()

    how = {} if every == 3 else {"every": every}
    with suppress(InterruptedError):
        first = resume(path, model, optimizer, take_step, steps, **how)
    return first, taken, model.weight.item()


def _expect_steps(
    resume: Callable, path: str, steps: int, expected: range, every: int = 3
) -> float:
    """Two ranks live until they die behind the steps expected; returns the weight then."""
    found = launch(_steps_of, 2, resume, path, steps, expected.stop, every).results
    life = "the second life" if expected.start else "the first life"
    for first, taken, _ in found:
        expect(taken, list(expected), f"the steps of {life}")
        if expected.stop == steps:
            expect(first, expected.start, f"what {life} returned")
    return found[0][2]


def goes_on(resume: Callable) -> None:
    """take all steps and none past the last, and after a death go on from the last save, with
    its momentum; save after every third step, or as often as `every` says
    """
    with TemporaryDirectory() as folder:  # the last but one has ended
        for steps, death, saved, n in (8, 4, 3, 3), (8, 7, 6, 3), (6, 6, 6, 3), (8, 5, 4, 2):
            path = f"{folder}/{death}.pt"
            _expect_steps(resume, path, steps, range(death), n)
            weight = _expect_steps(resume, path, steps, range(saved, steps), n)
            whole = _expect_steps(resume, f"{path}.whole", steps, range(steps))
            expect(weight, whole, f"the weight at the end, after a death in step {death}")


def saves_the_last(resume: Callable) -> None:
    """save after the last step too, so that a run that asks for more goes on from there"""
    with TemporaryDirectory() as folder:
        _expect_steps(resume, f"{folder}/run.pt", 5, range(5))
        _expect_steps(resume, f"{folder}/run.pt", 8, range(5, 8))


def _draw(rank: int, world_size: int, resume: Callable, path: str, steps: int) -> list[float]:
    """The rate and a random number of each step, which a scheduler and a generator give."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
    generator, drawn = torch.Generator().manual_seed(rank), []

    def take_step(step: int) -> None:
        rate_now = optimizer.param_groups[0]["lr"]
        drawn.extend([rate_now, torch.rand(1, generator=generator).item()])
        optimizer.step()
        rate.step()

    resume(path, model, optimizer, take_step, steps, rate=rate, generator=generator)
    return drawn


def restores_the_rest(resume: Callable) -> None:
    """restore what else it is given, on each rank its own: a scheduler and a generator"""
    with TemporaryDirectory() as folder:
        lives = [launch(_draw, 2, resume, f"{folder}/run.pt", n).results for n in (3, 6)]
        whole = launch(_draw, 2, resume, f"{folder}/whole.pt", 6).results
        for rank, (first, second, expected) in enumerate(zip(*lives, whole, strict=True)):
            what = f"rank {rank}, rates and random numbers in two lives and in one"
            expect(first + second, expected, what)


def _asked(rank: int, world_size: int, resume: Callable, path: str, steps: int) -> str:
    """What became of a call that asks for so many steps."""
    try:
        return f"{_steps_of(rank, world_size, resume, path, steps, steps)[0]} was returned"
    except ValueError:
        return "a ValueError"


def refuses_fewer_steps(resume: Callable) -> None:
    """raise a ValueError on every rank where more steps are done than are asked for"""
    with TemporaryDirectory() as folder:
        launch(_steps_of, 2, resume, f"{folder}/run.pt", 6, 6)
        for rank, said in enumerate(launch(_asked, 2, resume, f"{folder}/run.pt", 4).results):
            expect(said, "a ValueError", f"4 steps, and 6 are done: on rank {rank}")


def ends_with_the_same_bits(resume: Callable) -> None:
    """end with the same bits after twenty deaths at random moments"""
    with TemporaryDirectory() as whole, TemporaryDirectory() as killed:
        launch(elastic.train, 2, whole, elastic.resume_or_start, 200)
        figures.kill(killed, 20, resume)
        same = figures.same_bits([killed, whole])
        assert all(same), f"{sum(same)} of {len(same)} tensors have the same bits at the end"


def _not_heard(number: int, frame: FrameType | None) -> None:
    raise AssertionError("the SIGTERM came, and no handler of yours was set by then")


def _leave(
    rank: int, world_size: int, leave: Callable, told: int, at: int
) -> tuple[list[int], list[tuple], Any]:
    """Six steps in turn; rank `told` gets a SIGTERM in the middle of step `at`.

    Returns the steps that were taken whole, each save with those before it, and the end.
    """
    taken: list[int] = []
    saved: list[tuple] = []

    def take_step(step: int) -> None:
        if (rank, step) == (told, at):
            os.kill(os.getpid(), signal.SIGTERM)
        dist.all_reduce(torch.ones(1))
        taken.append(step)

    signal.signal(signal.SIGTERM, _not_heard)
    step_once = leave(take_step, lambda step: saved.append((step, list(taken))))
    assert callable(step_once), "no function came back. Is a `return` missing?"
    try:
        for step in range(6):
            step_once(step)
    except SystemExit as end:
        return taken, saved, end.code or 0
    return taken, saved, "it went on"


def goes_on_untold(leave: Callable) -> None:
    """take all steps and save nothing, where no rank is told to leave"""
    for ranks in 1, 2:
        for rank, (taken, saved, end) in enumerate(
            launch(_leave, ranks, leave, -1, 0).results
        ):
            what = f"nobody was told, rank {rank} of {ranks}: "
            expect(taken, list(range(6)), what + "the steps")
            expect(saved, [], what + "the saves")
            expect(end, "it went on", what + "the end")


def _told(leave: Callable) -> Iterator[tuple[str, int, tuple]]:
    """What each rank did, wherever and whenever one of them was told."""
    for ranks, told, at in (1, 0, 2), (2, 1, 2), (3, 0, 0), (3, 2, 3):
        results = launch(_leave, ranks, leave, told, at).results
        for rank, found in enumerate(results):
            what = f"rank {told} of {ranks} was told in step {at}, and on rank {rank} "
            yield what, at, found


def leaves_together(leave: Callable) -> None:
    """end the step in which one rank is told, and then leave on every rank, with code 0"""
    for what, at, (taken, _, end) in _told(leave):
        expect(taken, list(range(at + 1)), what + "the whole steps")
        expect(end, 0, what + "the exit code")


def saves_once(leave: Callable) -> None:
    """save once on every rank, after the whole step, with the number of the next one"""
    for what, at, (_, saved, _) in _told(leave):
        expect([step for step, _ in saved], [at + 1], what + "the numbers given to `save`")
        expect(len(saved[0][1]), at + 1, what + "the whole steps before the save")


def _all_of(samples_of: Callable, step: int, world_size: int, batch: int, samples: int):
    """The indices of each rank, as lists."""
    found = [samples_of(step, rank, world_size, batch, samples) for rank in range(world_size)]
    assert all(f is not None for f in found), "nothing was returned. Is a `return` missing?"
    return [list(map(int, indices)) for indices in found]


def shares_a_batch(samples_of: Callable) -> None:
    """give 1, 2, 3 and 5 ranks the same batch of different samples, in equal shares"""
    for world_size, step in product((1, 2, 3, 5), (1, 4, 8)):  # 4 and 8 begin an epoch
        shares = _all_of(samples_of, step, world_size, 12, 50)
        together = sorted(sum(shares, []))
        what = f"world_size {world_size}, batch 12 of 50 samples, step {step}: "
        expect(len(set(together) & set(range(50))), 12, what + "different samples")
        sizes = sorted(map(len, shares))
        assert sizes[-1] - sizes[0] <= 1, what + f"the shares have {sizes} samples"
        (one,) = _all_of(samples_of, step, 1, 12, 50)
        expect(together, sorted(one), what + "the samples of all, and of one rank")


def sees_each_sample_once(samples_of: Callable) -> None:
    """show each sample once in an epoch, in a different order in the next"""
    steps = [sum(_all_of(samples_of, step, 2, 12, 48), []) for step in range(8)]
    for epoch in (0, 1):
        seen = set(sum(steps[4 * epoch :][:4], []))
        expect(len(seen), 48, f"epoch {epoch} of 48 samples: different samples")
    assert set(steps[0]) != set(steps[4]), "both epochs begin with the same batch"


def keeps_no_state(samples_of: Callable) -> None:
    """answer the same in any order of calls, after any seed, and leave torch's, Python's and
    NumPy's generators alone
    """
    first = _all_of(samples_of, 7, 2, 12, 50)
    torch.manual_seed(3)
    dropout = torch.rand(4)
    torch.manual_seed(3)
    others = random.getstate(), str(np.random.get_state())
    _all_of(samples_of, 2, 2, 12, 50)
    for name, before, now in zip(
        ("Python's random", "NumPy's random"),
        others,
        (random.getstate(), str(np.random.get_state())),
        strict=True,
    ):
        assert before == now, f"the call changed the generator of {name}, which others use"
    expect(torch.rand(4), dropout, "what dropout draws from torch's generator after the call")
    expect(_all_of(samples_of, 7, 2, 12, 50), first, "step 7, asked again after step 2")


def refuses_what_is_not_there(samples_of: Callable) -> None:
    """raise a ValueError for a rank or a step that is not there, and for a batch that the
    samples do not fill
    """
    names = "step", "rank", "world_size", "batch", "samples"
    for given in (
        (0, 2, 2, 12, 50),
        (0, -1, 2, 12, 50),
        (-1, 0, 2, 12, 50),
        (0, 0, 2, 51, 50),
        (0, 0, 2, 0, 50),
    ):
        try:
            found = f"{samples_of(*given)} was returned"
        except ValueError:
            continue
        except Exception as error:
            found = f"{type(error).__name__} was raised"
        asked = ", ".join(f"{n} {g}" for n, g in zip(names, given, strict=True))
        raise AssertionError(f"{asked}: {found}, expected a ValueError")


SAMPLES = [shares_a_batch, sees_each_sample_once, keeps_no_state]
SAMPLES += [refuses_what_is_not_there]
build = Builder(
    "survival",
    {
        checkpoint.save_whole: [writes_what_can_be_read, survives_a_death],
        elastic.resume_or_start: [
            goes_on,
            saves_the_last,
            restores_the_rest,
            refuses_fewer_steps,
            ends_with_the_same_bits,
        ],
        elastic.leave_together: [goes_on_untold, leaves_together, saves_once],
        elastic.samples_of: SAMPLES,
    },
)
