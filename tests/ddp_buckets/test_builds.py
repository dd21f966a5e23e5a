"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.ddp_buckets.builds import build
from tests.builds import Right, Wrong, edited

AVERAGE = "dist.all_reduce(p.grad, dist.ReduceOp.AVG, self.group)"
SUM = "dist.all_reduce(p.grad, group=self.group)"
SEND, ALL = (
    "dist.broadcast(tensor.detach(), group_src=0, group=group)",
    "[*shared.values(), *module.buffers()]",
)
BY_RANK = "dist.broadcast(tensor.detach(), src=first, group=group)"
CHECK = "if p.grad is None:"
NAIVE = [
    Right(
        "NaiveDDP", replace={SEND: "dist.broadcast(tensor.data, group_src=0, group=group)"}
    ),
    Right(
        "NaiveDDP",
        replace={
            SEND: "first = dist.get_global_rank(self.group or dist.group.WORLD, 0); "
            f"{BY_RANK}"
        },
    ),
    Right(
        "NaiveDDP",
        replace={
            CHECK: "assert p.grad is not None, f'{name} has none'\n            if False:"
        },
    ),
    Right(
        "NaiveDDP",
        replace={
            AVERAGE: f"{SUM}\n            p.grad /= dist.get_world_size(group=self.group)"
        },
    ),
    Wrong("NaiveDDP", replace={SEND: "pass"}, says="rank 1: 6, expected 5"),
    Wrong(
        "NaiveDDP",
        replace={ALL: "module.parameters()"},
        says="rank 0 has 5 in `not_in_state_dict`, and rank 1: 6",
    ),
    Wrong(
        "NaiveDDP",
        replace={ALL: "module.state_dict().values()"},
        says="rank 0 has 5 in `not_in_state_dict`",
    ),
    Wrong(
        "NaiveDDP",
        replace={AVERAGE: "pass"},
        says="rank 0 of 2, step 0, gradient of `head.weight`: still rank 0's own",
    ),
    Wrong(
        "NaiveDDP",
        replace={AVERAGE: AVERAGE.replace("grad", "data")},
        says="gradient of `head.weight`: still rank 0's own",
    ),
    Wrong(
        "NaiveDDP",
        replace={AVERAGE: AVERAGE.replace(", self.group", "")},
        says="rank 0: weight and gradient, entry 1",
    ),
    Wrong(
        "NaiveDDP",
        replace={SEND: "dist.broadcast(tensor.detach(), group_src=0)"},
        says="rank 1: weight and gradient, entry 0 of 2: 0, expected 1",
    ),
    Wrong(
        "NaiveDDP",
        replace={SEND: "dist.broadcast(tensor.detach(), src=0, group=group)"},
        says="Global rank 0 is not part of the group of ranks 1 and 3",
    ),
    Wrong(
        "NaiveDDP",
        replace={
            ", group: dist.ProcessGroup | None = None": "",
            "super().__init__()": "super().__init__(); group = None",
        },
        says="it takes no argument `group`",
    ),
    Wrong("NaiveDDP", replace={AVERAGE: f"p.grad = {AVERAGE}"}, says="is None after finish"),
    Wrong("NaiveDDP", replace={CHECK: "if False:"}, says="ranks 0 and 1 raised TypeError"),
    Wrong("NaiveDDP", replace={AVERAGE: SUM}, says="but 2 times as long"),
    Wrong(
        "NaiveDDP",
        replace={"for p in self.trained:": "for p in self.module.parameters():"},
        says="TypeError",
    ),
    Wrong(
        "NaiveDDP",
        replace={AVERAGE: f"{AVERAGE}; p.grad += 1e-9 * dist.get_rank()"},
        says="other bits",
    ),
    Wrong(
        "NaiveDDP",
        replace={AVERAGE: f"{AVERAGE}; {AVERAGE}"},
        says="the calls of the second step: 16, expected 8",
    ),
]
LAST_GROWS = """buckets = []
    for parameter in list(parameters)[::-1]:
        if not buckets or sum(p.nbytes for p in buckets[-1]) >= bucket_cap_mb * 2**20:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets"""
POPS = "in iter(lambda: parameters.pop() if parameters else None, None)"
REST = "if bucket:\n        buckets.append(bucket)"
BUCKETS = [
    Right("into_buckets", replace={"buckets, bucket, nbytes =…": LAST_GROWS}),
    Wrong("into_buckets", replace={"in reversed(parameters)": POPS}, says="it was given is"),
    Wrong(
        "into_buckets",
        replace={"reversed(parameters)": "parameters"},
        says="the buckets are [[10, 20, 30]]",
    ),
    Wrong(
        "into_buckets",
        replace={">=": ">"},
        says="[[2, 58, 40, 60], [40]], expected [[2, 58, 40], [60, 40]]",
    ),
    Wrong(
        "into_buckets",
        replace={"bucket_cap_mb * 2**20": "bucket_cap_mb * 1e6"},
        says="a cap of 100/2**20 MiB",
    ),
    Wrong(
        "into_buckets", replace={REST: ""}, says="the buckets are [], expected [[30, 20, 10]]"
    ),
    Wrong(
        "into_buckets",
        replace={REST: "buckets.append(bucket)"},
        says="[60, 40], []], expected [[2, 58, 40], [60, 40]]",
    ),
    Wrong(
        "into_buckets",
        replace={"parameter.nbytes": "parameter.numel()"},
        says="[[2, 58, 40, 60, 40]], expected",
    ),
]
FLAT = "flat = torch.cat([p.grad.flatten() for p in bucket])"
CALL = "return dist.all_reduce(flat, dist.ReduceOp.AVG, group, async_op=True)"
DIVIDED = "flat = torch.cat([p.grad.view(-1) / dist.get_world_size(group) for p in bucket])"
EACH = """works = [dist.all_reduce(p.grad, async_op=True) for p in bucket]
    return works[-1]"""
SENDING = [
    Right("send_bucket", replace={FLAT: DIVIDED, "dist.ReduceOp.AVG, group": "group=group"}),
    Wrong(
        "send_bucket",
        replace={"return dist": "dist"},
        says="Is a `return` missing, or `async_op=True`?",
    ),
    Wrong(
        "send_bucket",
        replace={"p.grad = part.view_as(p)": "pass"},
        says="rank 0 of 3: the gradients lie in 2 tensors",
    ),
    Wrong(
        "send_bucket",
        replace={"p.grad = part.view_as(p)": "p.grad.copy_(part.view_as(p))"},
        says="must be a view into",
    ),
    Wrong(
        "send_bucket",
        replace={"dist.ReduceOp.AVG, group": "group=group"},
        says="rank 0 of 3: the gradient of the weight: [30, 33, 36, ",
    ),
    Wrong(
        "send_bucket",
        replace={CALL: f"{CALL.replace('return', 'work =')}; work.wait(); return work"},
        says="it waits for",
    ),
    Wrong(
        "send_bucket",
        replace={CALL: CALL.replace("AVG, group", "AVG")},
        says="rank 0: the mean of ten times the rank",
    ),
    Wrong(
        "send_bucket",
        replace={CALL: EACH},
        says="the bytes of each all_reduce: 2 of them, expected 1",
    ),
]
LEAVES = "self.works.append(send_bucket(bucket, self.group))"
AT_ONCE = f"{LEAVES}\n            self.works[-1].wait()"
LATE = """for bucket in self.buckets:
            send_bucket(bucket, self.group).wait()
        self.ready = set()"""
WHOEVER = """for i, bucket in enumerate(self.buckets):
            if i not in self.works and self.ready.issuperset(bucket):
                self.works[i] = send_bucket(bucket, self.group)

    def finish_gradient_synchronization(self):
        for work in self.works.values():
            work.wait()
        self.ready, self.works = set(), {}"""
WAIT, RESET = "work.wait()", "self.ready, self.works = set(), []"
ALL_READY = "if p not in self.ready:"
COUNTED = "if len(self.works) < len(self.buckets):"
TWICE = "if parameter in self.ready:"
INCOMPLETE = "not self.ready.issuperset(bucket)"
BUCKETED = [
    Right("BucketedDDP", replace={INCOMPLETE: "any(p not in self.ready for p in bucket)"}),
    Right("BucketedDDP", replace={ALL_READY: COUNTED}),
    Wrong(
        "BucketedDDP",
        replace={ALL_READY: "if False:"},
        says="no rank used the second of two layers, whose bucket never left, and rank 0",
    ),
    Wrong(
        "BucketedDDP",
        replace={TWICE: "if False:"},
        says="a second backward began before finish, and rank 0 said nothing",
    ),
    Wrong(
        "BucketedDDP",
        replace={f"            {WAIT}": "            pass"},
        says="still on their way",
    ),
    Wrong(
        "BucketedDDP",
        replace={INCOMPLETE: "len(self.ready) < len(self.trained)"},
        says="before layer 0 is ready: 0",
    ),
    Wrong(
        "BucketedDDP", replace={LEAVES: AT_ONCE}, says="backward waits until a call is over"
    ),
    Wrong(
        "BucketedDDP",
        replace={LEAVES: "send_bucket(bucket, self.group)"},
        says="the calls of the second step: ",
    ),
    Wrong(
        "BucketedDDP",
        replace={LEAVES: "self.works.append(send_bucket(bucket))"},
        says="rank 0: weight and gradient",
    ),
    Wrong(
        "BucketedDDP",
        replace={f"{WAIT}\n        {RESET}": f"{WAIT}\n        self.works = []"},
        says="a second backward before finish",
    ),
    Wrong(
        "BucketedDDP",
        replace={LEAVES: "pass", "for work…": LATE},
        says="begin during backward: 0, expected 4",
    ),
    Wrong(
        "BucketedDDP",
        replace={"in self.trained:": "in []:"},
        says="`0.weight` sent no gradient",
    ),
    Wrong(
        "BucketedDDP",
        replace={"in self.trained:": "in []:", ALL_READY: "if False:"},
        says="of the second step: 0, expected 4",
    ),
    Wrong(
        "BucketedDDP",
        replace={"set(), []": "set(), {}", "for bucket…": WHOEVER},
        says="use two layers in different orders",
    ),
]
test_right, test_wrong = edited(build, [*NAIVE, *BUCKETS, *SENDING, *BUCKETED])
