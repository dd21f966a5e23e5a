"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.ddp_buckets.builds import build
from tests.builds import right_and_wrong

HEAD = """
import torch
import torch.distributed as dist
from torch import nn
from mgpu_tutorial.ddp_buckets.wrappers import NaiveDDP, into_buckets, send_bucket
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


def bucketed(
    parameters="self.trained",
    bucket="not self.ready.issuperset(bucket)",
    send="self.works.append(send_bucket(bucket))",
    finish="for work in self.works:\n            work.wait()\n"
    "        self.ready, self.works = set(), []",
):
    return f"""{HEAD}
class BucketedDDP(NaiveDDP):
    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module)
        self.buckets = into_buckets(self.trained, bucket_cap_mb)
        self.ready, self.works = set(), []
        for parameter in {parameters}:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        for bucket in self.buckets[len(self.works) :]:
            if {bucket}:
                return
            {send}

    def finish_gradient_synchronization(self):
        {finish}
"""


def sending(
    flat="torch.cat([p.grad.flatten() for p in bucket])",
    views="for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):\n"
    "        p.grad = part.view_as(p)",
    work="return dist.all_reduce(flat, op=AVG, async_op=True)",
):
    return f"""{HEAD}
def send_bucket(bucket):
    flat = {flat}
    {views}
    {work}
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
import torch
import torch.distributed as dist
from mgpu_tutorial.ddp_buckets.wrappers import NaiveDDP, into_buckets, send_bucket

class BucketedDDP(NaiveDDP):
    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module)
        self.buckets = into_buckets(self.trained, bucket_cap_mb)
        self.ready, self.works = set(), {}
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        for i, bucket in enumerate(self.buckets):
            if i not in self.works and self.ready.issuperset(bucket):
                self.works[i] = send_bucket(bucket)

    def finish_gradient_synchronization(self):
        for work in self.works.values():
            work.wait()
        self.ready, self.works = set(), {}
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
    "the last bucket grows": buckets(FROM_THE_FRONT),
    "room that is left": buckets(BACKWARDS),
    "filled part by part": sending(
        flat="torch.empty(sum(p.numel() for p in bucket))",
        views="for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):\n"
        "        p.grad = part.view_as(p).copy_(p.grad)",
    ),
    "divided in the bucket": sending(
        flat="torch.cat([p.grad.view(-1) / dist.get_world_size() for p in bucket])",
        work="work = dist.all_reduce(flat, async_op=True)\n    return work",
    ),
    "cleared, and a new list of parameters": bucketed(
        parameters="[p for p in module.parameters() if p.requires_grad]",
        finish="[work.wait() for work in self.works]\n"
        "        self.works.clear()\n        self.ready.clear()",
    ),
    "counted": bucketed(
        bucket="any(p not in self.ready for p in bucket)",
        send="self.ready -= set(bucket)\n            self.works += [send_bucket(bucket)]",
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
    "no return": (
        sending(work="dist.all_reduce(flat, op=AVG, async_op=True)"),
        "Is a `return` missing, or `async_op=True`?",
    ),
    "waited for at once": (
        sending(work="work = dist.all_reduce(flat, op=AVG)\n    return work"),
        "Is a `return` missing, or `async_op=True`?",
    ),
    "no views": (sending(views="pass"), "rank 0 of 3: the gradient of the weight"),
    "a sum in the bucket": (
        sending(work="return dist.all_reduce(flat, async_op=True)"),
        "rank 0 of 3: the gradient of the weight: [30, 33, 36, ",
    ),
    "a call per parameter": (
        sending(
            flat="None",
            views="works = [dist.all_reduce(p.grad, op=AVG, async_op=True) for p in bucket]",
            work="return works[-1]",
        ),
        "the bytes of each all_reduce: 2 of them, expected 1",
    ),
    "copies": (
        sending(views="flat.wait = lambda: None", work="return flat"),
        "the bytes of each all_reduce: 0 of them, expected 1",
    ),
    "nobody waits": (bucketed(finish="self.ready, self.works = set(), []"), ""),
    "waits in the hook": (
        bucketed(
            send="work = send_bucket(bucket)\n            work.wait()\n"
            "            self.works.append(work)"
        ),
        "backward waits until each call is over",
    ),
    "the Work is lost": (bucketed(send="send_bucket(bucket)"), "on "),
    "works of the step before": (
        bucketed(finish="for work in self.works:\n            work.wait()"),
        "on 2 ranks, step 1: rank ",
    ),
    "sent in finish": (
        bucketed(
            send="pass",
            finish="for bucket in self.buckets:\n            send_bucket(bucket).wait()",
        ),
        "the calls that begin during backward: 0, expected 4",
    ),
    "no hook": (bucketed(parameters="[]"), "on 2 ranks, step 0: rank "),
    "whichever is complete first": (
        OWN_ORDER,
        "ranks use two layers in different orders: rank 0, number 0: 2.5, expected 3",
    ),
}


test_right, test_wrong = right_and_wrong(build, RIGHT.values(), WRONG.values())
