"""Workers that the tests launch."""

from types import SimpleNamespace

import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.pipelines import measurements, schedules, stages
from mgpu_tutorial.pipelines import work as works
from mgpu_tutorial.shared import pause
from tests.model_parallel.reference import SIDE, equal_stacks


def requested_pauses(rank, world_size, names, micro, forward, split_backward):
    """How long this rank wants to pause in a step of each schedule; it does not."""
    found = []
    for name in names:
        seconds = []
        pause.time = works.time = SimpleNamespace(sleep=seconds.append)
        work = works.Pauses(world_size, forward, split_backward=split_backward)
        schedules.run_schedule(rank, world_size, name, micro, work)
        found.append(sum(seconds))
    return found


class LinearStages:
    """One of the equal stacks for each stage; the stages made are kept to look at."""

    def __init__(self, width, count):
        self.width, self.stacks = width, equal_stacks(2, width, count)

    def batch(self, micro):
        return torch.linspace(-1, 1, 12 * self.width).view(12, -1), torch.arange(
            12
        ) % self.width

    def module(self, index, count):
        return self.stacks[index]

    def shape(self, index, count, micro):
        return [12 // micro, self.width]

    def loss(self, output, target):
        return cross_entropy(output, target)


def gradients_after_repeats(rank, world_size, schedule, micro, repeats):
    work = LinearStages(4, world_size)
    run = measurements.measure_schedule(rank, world_size, schedule, micro, work, repeats)
    mine = work.stacks[rank]
    return run.loss, [parameter.grad for parameter in mine.parameters()]


def measure_each(rank, world_size, cases):
    """One pipeline after the other: `cases` are arguments of `measure_schedule`."""
    return [measurements.measure_schedule(rank, world_size, *case) for case in cases]


def gradients_by_schedule(rank, world_size, names, micro):
    """The gradients of this rank's stages, by schedule and stage."""
    found = {}
    for schedule in names:
        mine = schedules.stages_on_rank(schedule, rank, world_size)
        work = LinearStages(4, len(mine) * world_size)
        schedules.run_schedule(rank, world_size, schedule, micro, work)
        found[schedule] = {i: [p.grad for p in work.stacks[i].parameters()] for i in mine}
    return found


def schedule_of_layers(rank, world_size, schedule, micro):
    return schedules.run_schedule(
        rank, world_size, schedule, micro, LinearStages(4, world_size)
    )


def own_gradients(rank, world_size, run, micro):
    return run(rank, world_size, LinearStages(4, world_size), micro)


def on_cut_stages(rank, world_size, places, micro):
    work = works.ResNetStages(places, image_size=SIDE)
    return stages.run_gpipe(rank, world_size, work, micro)
