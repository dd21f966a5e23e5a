"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.ddp_buckets.builds import build
from tests.builds import right_and_wrong

HEAD = """
import torch
import torch.distributed as dist
from torch import nn
from mgpu_tutorial.ddp_buckets.wrappers import NaiveDDP, OverlappedDDP, into_buckets
AVG = dist.ReduceOp.AVG
"""


def naive(
    send="dist.broadcast(tensor, src=0)",
    tensors="module.state_dict().values()",
    body="pass",
    early="",
):
    return f"""{HEAD}
class NaiveDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.trained = [p for p in module.parameters() if p.requires_grad]
        for tensor in {tensors}:
            {send}
        {early}

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self):
        {body}
"""


AVERAGE = """for p in self.trained:
            dist.all_reduce(p.grad, op=AVG)"""
SUM = """for p in self.trained:
            dist.all_reduce(p.grad)"""
ONE_BY_ONE = """for p in self.trained:
            every = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(every, p.grad)
            others = [g for r, g in enumerate(every) if r != dist.get_rank()]
            p.grad = sum(others, p.grad) / len(every)"""


def overlapped(
    parameters="self.trained",
    send="work = dist.all_reduce(parameter.grad, op=AVG, async_op=True)",
    keep="self.works.append(work)",
    finish="for work in self.works:\n            work.wait()\n        self.works.clear()",
):
    return f"""{HEAD}
class OverlappedDDP(NaiveDDP):
    def __init__(self, module):
        super().__init__(module)
        self.works = []
        for parameter in {parameters}:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, parameter):
        {send}
        {keep}

    def finish_gradient_synchronization(self):
        {finish}
"""


def bucketed(
    flat="torch.cat([p.grad.flatten() for p in bucket])",
    views="for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):\n"
    "                p.grad = part.view_as(p)",
    work="dist.all_reduce(flat, op=AVG, async_op=True)",
    more="",
):
    return f"""{HEAD}
class BucketedDDP(OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module)
        self.buckets = into_buckets(self.trained, bucket_cap_mb)
        self.ready = set()

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        for bucket in self.buckets[len(self.works) :]:
            if not self.ready.issuperset(bucket):
                return
            self.ready -= set(bucket)
            flat = {flat}
            {views}
            work = {work}
            self.works.append(work)
    {more}
"""


def buckets(body):
    lines = "\n".join(f"    {line}" for line in body.strip("\n").split("\n"))
    return f"def into_buckets(parameters, bucket_cap_mb):\n{lines}\n"


FROM_THE_FRONT = """
buckets = []
for parameter in parameters[::-1]:
    if not buckets or sum(p.nbytes for p in buckets[-1]) >= bucket_cap_mb * 2**20:
        buckets.append([])
    buckets[-1].append(parameter)
return buckets
"""
BACKWARDS = """
buckets, bucket, room = [], [], bucket_cap_mb * 2**20
for parameter in reversed(parameters):
    bucket.append(parameter)
    room -= parameter.element_size() * parameter.numel()
    if room <= 0:
        buckets += [bucket]
        bucket, room = [], bucket_cap_mb * 2**20
return buckets + [bucket] * bool(bucket)
"""
OWN_ORDER = """
        self.held = {}

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        for i, bucket in enumerate(self.buckets):
            if i not in self.held and self.ready.issuperset(bucket):
                self.held[i] = torch.cat([p.grad.flatten() for p in bucket])
                work = dist.all_reduce(self.held[i], op=AVG, async_op=True)
                self.works.append(work)

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for i, flat in self.held.items():
            sizes = [p.numel() for p in self.buckets[i]]
            for p, part in zip(self.buckets[i], flat.split(sizes)):
                p.grad = part.view_as(p)
        self.ready, self.held = set(), {}
"""

RIGHT = {
    "detached parameters and buffers": naive(
        body=AVERAGE,
        tensors="[*module.parameters(), *module.buffers()]",
        send="dist.broadcast(tensor.detach(), src=0)",
    ),
    "a sum that is divided": naive(
        body=f"{SUM}\n            p.grad /= dist.get_world_size()"
    ),
    "a new list of works": overlapped(
        keep="self.works += [work]",
        finish="[work.wait() for work in self.works]\n        self.works = []",
    ),
    "divided in the hook": overlapped(
        send="parameter.grad /= dist.get_world_size()\n"
        "        work = dist.all_reduce(parameter.grad, async_op=True)",
        parameters="[p for p in module.parameters() if p.requires_grad]",
    ),
    "the last bucket grows": buckets(FROM_THE_FRONT),
    "room that is left": buckets(BACKWARDS),
    "filled part by part": bucketed(
        flat="torch.empty(sum(p.numel() for p in bucket))",
        views="for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):\n"
        "                p.grad = part.view_as(p).copy_(p.grad)",
    ),
    "divided in the bucket": bucketed(
        flat="torch.cat([p.grad.view(-1) / dist.get_world_size() for p in bucket])",
        work="dist.all_reduce(flat, async_op=True)",
    ),
}

WRONG = {
    "nothing is sent at the start": (naive(send="pass"), "rank 1: 6, expected 5"),
    "no buffers": (
        naive(tensors="module.parameters()", send="dist.broadcast(tensor.detach(), src=0)"),
        "has 5 in `1.running_mean`, and rank 1: 6, expected 5",
    ),
    "a sum": (naive(body=SUM), "is 2 times that of one process"),
    "nothing is averaged": (naive(), "on 2 ranks, step 0: rank "),
    "frozen ones too": (
        naive(body=AVERAGE.replace("self.trained", "self.module.parameters()")),
        "TypeError",
    ),
    "each rank adds its own first": (naive(body=ONE_BY_ONE), "other bits than rank 0"),
    "sent by hooks": (
        naive(
            early="for p in self.trained: "
            "p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, op=AVG))"
        ),
        "the calls that begin during backward: 8, expected 0",
    ),
    "nobody waits": (overlapped(finish="self.works.clear()"), ""),
    "a sum in the hook": (
        overlapped(send="work = dist.all_reduce(parameter.grad, async_op=True)"),
        "on 2 ranks, step 0",
    ),
    "synchronous": (
        overlapped(send="dist.all_reduce(parameter.grad, op=AVG)", keep="pass"),
        "backward waits until each call is over",
    ),
    "waited for at once": (
        overlapped(keep="work.wait()"),
        "backward waits until each call is over",
    ),
    "works of the step before": (
        overlapped(finish="for work in self.works:\n            work.wait()"),
        "finish waits once more for the calls of the step before",
    ),
    "sent in finish": (
        overlapped(
            send="pass",
            keep="self.works.append(parameter)",
            finish="for p in self.works:\n            dist.all_reduce(p.grad, op=AVG)\n"
            "        self.works.clear()",
        ),
        "the calls that begin during backward: 0, expected 8",
    ),
    "the first one first": (
        buckets(FROM_THE_FRONT.replace("[::-1]", "")),
        "of 10, 20, 30 bytes and a cap of 1000: the buckets are [[10, 20, 30]]",
    ),
    "more than the cap": (buckets(FROM_THE_FRONT.replace(">=", ">")), "a cap of 100"),
    "the rest is lost": (
        buckets(BACKWARDS.replace(" + [bucket] * bool(bucket)", "")),
        "the buckets are [], expected [[30, 20, 10]]",
    ),
    "an empty one at the end": (
        buckets(BACKWARDS.replace(" * bool(bucket)", "")),
        "[60, 40], []], expected [[1, 59, 40], [60, 40]]",
    ),
    "numbers, not bytes": (
        buckets(BACKWARDS.replace("parameter.element_size() * ", "")),
        "80 and 20 bytes in turn",
    ),
    "no views": (bucketed(views="pass"), "on 2 ranks, step 0"),
    "whichever is complete first": (
        bucketed(more=OWN_ORDER.replace("\n        self.held = {}\n", "", 1)).replace(
            "self.ready = set()\n", "self.ready, self.held = set(), {}\n", 1
        ),
        "ranks use two layers in different orders: rank 0, number 0: 2.5, expected 3",
    ),
}


test_right, test_wrong = right_and_wrong(build, RIGHT.values(), WRONG.values())
