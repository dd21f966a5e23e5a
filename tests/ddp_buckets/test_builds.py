"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.ddp_buckets.builds import build
from tests.builds import edited

AVERAGE = "dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=self.group)"
SUM = "dist.all_reduce(parameter.grad, group=self.group)"
SEND, ALL = (
    "dist.broadcast(tensor.detach(), group_src=0, group=group)",
    "[*module.parameters(), *module.buffers()]",
)
BY_RANK = "dist.broadcast(tensor.detach(), src=first, group=group)"
CHECK = "require_gradients(self.module, self.trained, ready)"
NAIVE = [
    (SEND, "dist.broadcast(tensor.data, group_src=0, group=group)"),
    (SEND, f"first = dist.get_global_rank(self.group or dist.group.WORLD, 0); {BY_RANK}"),
    (CHECK, "assert len(ready) == len(self.trained), 'a gradient is missing'"),
    (AVERAGE, f"{SUM}\n            parameter.grad /= dist.get_world_size(group=self.group)"),
    (SEND, "pass", "rank 1: 6, expected 5"),
    (ALL, "module.parameters()", "rank 0 has 5 in `not_in_state_dict`, and rank 1: 6"),
    (ALL, "module.state_dict().values()", "rank 0 has 5 in `not_in_state_dict`"),
    (AVERAGE, "pass", "rank 0 of 2, step 0, gradient of `head.weight`: still rank 0's own"),
    (
        AVERAGE,
        AVERAGE.replace("grad", "data"),
        "gradient of `head.weight`: still rank 0's own",
    ),
    (
        AVERAGE,
        AVERAGE.replace(", group=self.group", ""),
        "rank 0: weight and gradient, entry 1",
    ),
    (
        SEND,
        "dist.broadcast(tensor.detach(), group_src=0)",
        "rank 1: weight and gradient, entry 0 of 2: 0, expected 1",
    ),
    (SEND, "dist.broadcast(tensor.detach(), src=0, group=group)", "raised ValueError"),
    (
        ", group: dist.ProcessGroup | None = None",
        "",
        "super().__init__()",
        "super().__init__(); group = None",
        "it takes no argument `group`",
    ),
    (AVERAGE, f"parameter.grad = {AVERAGE}", "is None after finish"),
    (CHECK, "pass", "ranks 0 and 1 raised TypeError"),
    (AVERAGE, SUM, "but 2 times as long"),
    ("in self.trained", "in self.module.parameters()", "TypeError"),
    (AVERAGE, f"{AVERAGE}; parameter.grad += 1e-9 * dist.get_rank()", "other bits"),
    (AVERAGE, f"{AVERAGE}; {AVERAGE}", "the calls of the second step: 16, expected 8"),
]
LAST_GROWS = """buckets = []
    for parameter in parameters[::-1]:
        if not buckets or sum(p.nbytes for p in buckets[-1]) >= bucket_cap_mb * 2**20:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets"""
POPS = "in iter(lambda: parameters.pop() if parameters else None, None)"
REST = "if bucket:\n        buckets.append(bucket)"
BUCKETS = [
    ("buckets, bucket, nbytes =…", LAST_GROWS),
    ("parameters = list(parameters)", "", "in reversed(parameters)", POPS, "it was given is"),
    ("reversed(parameters)", "parameters", "the buckets are [[10, 20, 30]]"),
    (">=", ">", "[[2, 58, 40, 60], [40]], expected [[2, 58, 40], [60, 40]]"),
    ("bucket_cap_mb * 2**20", "bucket_cap_mb * 1e6", "a cap of 100/2**20 MiB"),
    (REST, "", "the buckets are [], expected [[30, 20, 10]]"),
    (REST, "buckets.append(bucket)", "[60, 40], []], expected [[2, 58, 40], [60, 40]]"),
    ("parameter.nbytes", "parameter.numel()", "[[2, 58, 40, 60, 40]], expected"),
]
FLAT = "flat = torch.cat([p.grad.flatten() for p in bucket])"
CALL = "return dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group, async_op=True)"
DIVIDED = "flat = torch.cat([p.grad.view(-1) / dist.get_world_size(group) for p in bucket])"
EACH = """works = [dist.all_reduce(p.grad, async_op=True) for p in bucket]
    return works[-1]"""
SENDING = [
    (FLAT, DIVIDED, "op=dist.ReduceOp.AVG, ", ""),
    ("return dist", "dist", "Is a `return` missing, or `async_op=True`?"),
    ("p.grad = part.view_as(p)", "pass", "rank 0 of 3: the gradients lie in 2 tensors"),
    ("p.grad = part.view_as(p)", "p.grad.copy_(part.view_as(p))", "must be a view into"),
    ("op=dist.ReduceOp.AVG, ", "", "rank 0 of 3: the gradient of the weight: [30, 33, 36, "),
    (CALL, f"{CALL.replace('return', 'work =')}; work.wait(); return work", "it waits for"),
    (CALL, CALL.replace("group=group, ", ""), "rank 0: the mean of ten times the rank"),
    (CALL, EACH, "the bytes of each all_reduce: 2 of them, expected 1"),
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
ALL_READY = "require_gradients(self.module, self.trained, self.ready)"
COUNTED = "assert len(self.works) == len(self.buckets), 'a bucket never left'"
TWICE = "if parameter in self.ready:"
INCOMPLETE = "not self.ready.issuperset(bucket)"
BUCKETED = [
    (INCOMPLETE, "any(p not in self.ready for p in bucket)"),
    (ALL_READY, COUNTED),
    (
        ALL_READY,
        "",
        "no rank used the second of two layers, whose bucket never left, and rank 0",
    ),
    (TWICE, "if False:", "a second backward began before finish, and rank 0 said nothing"),
    (f"            {WAIT}", "            pass", "still on their way"),
    (INCOMPLETE, "len(self.ready) < len(self.trained)", "before layer 0 is ready: 0"),
    (LEAVES, AT_ONCE, "backward waits until a call is over"),
    (LEAVES, "send_bucket(bucket, self.group)", "the calls of the second step: "),
    (LEAVES, "self.works.append(send_bucket(bucket))", "rank 0: weight and gradient"),
    (
        f"{WAIT}\n        {RESET}",
        f"{WAIT}\n        self.works = []",
        "a second backward before finish",
    ),
    (LEAVES, "pass", "for work…", LATE, "begin during backward: 0, expected 4"),
    ("in self.trained", "in []", "`0.weight` got no gradient"),
    ("in self.trained", "in []", ALL_READY, "", "of the second step: 0, expected 4"),
    ("set(), []", "set(), {}", "for bucket…", WHOEVER, "use two layers in different orders"),
]
test_right, test_wrong = edited(
    build,
    {
        "NaiveDDP": NAIVE,
        "into_buckets": BUCKETS,
        "send_bucket": SENDING,
        "BucketedDDP": BUCKETED,
    },
)
