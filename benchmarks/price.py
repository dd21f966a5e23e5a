"""Published steps and their memory beside the price of the same program, taped here.

    python benchmarks/price.py [--save] [--ours]

A worker with `fully_shard` is taped with two and with four layers, and each further layer
counts as much as these two differ by. One number is fitted: in the first row of each family
the share of the peak that matrix products reach, as `step_time` fits its formulas. All other
rows are predicted with it: other numbers of GPUs, other recomputation, other sizes of model.
Beside them stand those formulas, fitted to the same row, and the null guess, by which a GPU
computes as many of the taped operations per second as in that row. torchtitan recomputes
every second product, which the formulas' "selective" does not count.

What this carries: programs that are not compiled, sharded by FSDP, on GPUs whose families
have a row to fit. What it does not: compiled programs and float8 (their kernels are fused),
kernels that are worse than the share, congestion, late ranks, and the processors that NCCL
takes. Tensor parallelism and a pipeline are in `tests/instruments/price/test_plans.py`.

Memory is what the tensors hold at the fullest moment. torchtitan publishes something else:
the most that the allocator had reserved from the driver (`max_reserved_gib` in its
metrics.py), which includes freed blocks that nothing fitted into. It must be larger.

`--ours` first prices the course's own wrappers and times the sliders of `explore`, and
`--save` writes price.md.
"""

from functools import partial
from pathlib import Path

import torch
from common import median_ms, options
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP
from mgpu_tutorial.instruments.price import Priced, explore, price
from mgpu_tutorial.instruments.price.models import Layer, llama, mpt_7b
from mgpu_tutorial.lab import Table, span
from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.lab.run import server
from mgpu_tutorial.sharding.blocks import PrefetchingBlock, linked
from mgpu_tutorial.shared import small_and_large as sizes
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.plans import Model, Plan
from mgpu_tutorial.step_time.published import Run, fit_gpu, runs_of

RESULT = Path(__file__).with_suffix(".md")
HEADER = [
    *("program", "run", "published tokens/s", "priced", "error", "formulas of 23"),
    *("null guess", "messages exposed", "GiB held", "GiB reserved, published"),
]
TITAN, DOCS, MPT = "torchtitan 8B", "torchtitan, docs of 2024", "MPT, FSDP"
SIZES = "7B on 8", "13B on 16"
RESERVED = {(TITAN, "8 GPUs"): 82.4, (TITAN, "128 GPUs"): 67.0}  # GiB, where published


def documented() -> list[Run]:
    """torchtitan's docs/performance.md of 2024: 64 A100 of 80 GB, local batch 1.

    "layers" recomputes every second layer, for which the formulas have no word.
    """
    size = {"vocabulary": 128_256, "kv_heads": 8, "gated": True, "tied": False}
    small = Model(32, 4096, 32, 8192, ffn=14_336, **size)
    large = Model(80, 8192, 64, 8192, ffn=28_672, **size)
    rows = {
        "8B, operations": (small, "selective", 2973),
        "8B, layers": (small, "full", 2904),
        "70B, full": (large, "full", 331),
    }
    return [
        Run(
            *(name, model, CLUSTERS["A100"], Plan(dp=64, zero=3, recompute=recompute), 64),
            *(published, "tokens/s", name == "8B, operations"),
        )
        for name, (model, recompute, published) in rows.items()
    ]


def newer() -> dict[str, list[Run]]:
    """MPT's other tables, in which nothing is repeated: A100s of 80 GB, and H100s.

    `scripts/train/benchmarking/README.md` of https://github.com/mosaicml/llm-foundry, at
    061f2c7ce64e655100286584a7629e2a09f827ba. Gradients are reduced in 32 bits there.
    """
    small, large = (next(r.model for r in runs_of(MPT) if r.name == n) for n in SIZES)
    rows = {
        "MPT on A100s of 80 GB": ("A100", (small, 8, 6, 2, 4641), (large, 8, 2, 3, 2262)),
        "MPT on H100s": (
            "H100",
            *((small, 8, 6, 1, 10_643), (large, 8, 2, 1, 4792), (large, 64, 2, 1, 4800)),
        ),
    }
    found: dict[str, list[Run]] = {}
    for family, (cluster, *runs) in rows.items():
        for model, gpus, micro, parts, published in runs:
            name = f"{'7B' if model is small else '13B'} on {gpus}"
            plan = Plan(dp=gpus, zero=3, micro_batch=micro, recompute="none")
            given = name, model, CLUSTERS[cluster], plan, gpus * micro * parts, published
            found.setdefault(family, []).append(
                Run(*given, "tokens/s", not found.get(family))
            )
    return found


def families() -> dict[str, list[Run]]:
    """The rows by program; the first of each is the fitted one."""
    few = "7B on 8", "7B on 32", "7B on 128", "13B on 16", "13B on 128"
    mpt = [run for run in runs_of(MPT) if run.name in few]
    return {TITAN: runs_of(TITAN), DOCS: documented(), MPT: mpt} | newer()


def every_second_product():
    """torchtitan's selective checkpointing: attention and every second product are kept.

    Forward and recomputation count apart, so that both name the same products.
    """
    products = {False: 0, True: 0}

    def policy(context, operation, *args, **kwargs):
        is_product = operation == torch.ops.aten.mm.default
        products[context.is_recompute] += is_product
        is_kept = is_product and products[context.is_recompute] % 2
        if is_kept or "attention" in str(operation):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def network_of(run: Run, layers: int) -> nn.Sequential:
    """The model of a run with so many layers, of which some recompute what they need."""
    model = run.model
    if model.gated:
        network = llama(layers, model.hidden, model.heads, model.ffn)
    else:
        network = mpt_7b(layers, model.hidden, model.heads)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    if run.plan.recompute == "selective":
        options["context_fn"] = every_second_product
    repeated = [] if run.plan.recompute == "none" else list(network)[1:-2]
    for layer in repeated[:: 2 if "layers" in run.name else 1]:
        layer.forward = partial(checkpoint, layer.forward, **options)
    return network


def train(rank, world_size, run, layers):
    """Two steps as the published programs do them: parameters in 32 bits, products in 16."""
    network = network_of(run, layers)
    is_pure = not run.model.gated and run.plan.recompute == "full"
    reduced = torch.bfloat16 if is_pure else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    parts = [part for part in network if isinstance(part, Layer)]
    for part in parts:  # the last is needed again at once
        fully_shard(part, mp_policy=policy, reshard_after_forward=part is not parts[-1])
    fully_shard(network, mp_policy=policy)
    optimizer = torch.optim.AdamW(network.parameters(), foreach=True)
    tokens = torch.zeros(run.plan.micro_batch, run.model.sequence, dtype=torch.long)
    for _ in range(2):
        with span("step"):
            for _ in range(int(run.plan.micro_batches(run.batch))):
                logits = network(tokens).flatten(0, 1)
                cross_entropy(logits.float(), tokens.flatten()).backward()
                del logits
            optimizer.step()
            optimizer.zero_grad()


def taped(run: Run) -> tuple[Priced, Priced]:
    """A run with two layers, and with four."""
    name = next(name for name, cluster in CLUSTERS.items() if cluster is run.cluster)
    machine = f"{run.plan.ranks} x {name}"
    return tuple(
        price(train, run.plan.ranks, run, layers, machine=machine, timeout=900)
        for layers in (2, 4)
    )


def whole(run: Run, both: tuple[Priced, Priced], flops: float) -> tuple[float, float]:
    """Seconds with all layers, and those of it without a kernel."""
    machine = both[0].machine._replace(flops=flops)
    two, four = ((p.seconds, p.exposed) for p in (found.on(machine) for found in both))
    more = (run.model.layers - 2) / 2
    return tuple(b + more * (f - b) for b, f in zip(two, four, strict=True))


def operations(run: Run, both: tuple[Priced, Priced]) -> float:
    """What one GPU computes in a step, recomputation too, in matrix products."""
    two, four = (sum(getattr(e, "flops", 0) for e in p.tapes[0].events) for p in both)
    return two + (run.model.layers - 2) / 2 * (four - two)


def held(run: Run, both: tuple[Priced, Priced]) -> float:
    """GiB of all layers at the fullest moment."""
    two, four = (found.fullest().total() / 2**30 for found in both)
    return two + (run.model.layers - 2) / 2 * (four - two)


def fitted_flops(run: Run, both: tuple[Priced, Priced]) -> float:
    """The operations per second of products with which the price is what was published."""
    low, high = 0.1 * run.cluster.gpu.peak, 1.5 * run.cluster.gpu.peak
    for _ in range(30):
        middle = (low + high) / 2
        is_slow = whole(run, both, middle)[0] > run.seconds
        low, high = (middle, high) if is_slow else (low, middle)
    return low


def rows_of(family: str, runs: list[Run]) -> list[list[str]]:
    """A row for each run: rates per GPU, errors of the rate, memory."""
    gpu, flops, rows = fit_gpu(runs[:1], runs[0].cluster.gpu.activation_passes), 0.0, []
    for run in runs:
        both = taped(run)
        if not flops:
            flops, rate = fitted_flops(run, both), operations(run, both) / run.seconds
        seconds, exposed = whole(run, both, flops)
        error = f"{run.seconds / seconds - 1:+.1%}"
        formulas = f"{run.seconds / run.predicted(gpu).seconds - 1:+.1%}"
        if run is runs[0]:
            share = flops / run.cluster.gpu.peak
            error = f"(fitted: {share:.1%} of the peak)"
            formulas = f"(fitted: {gpu.matmul_efficiency:.1%})"
        null = operations(run, both) / rate
        row = [family, run.name, f"{run.published:,}"]
        row += [f"{run.published * run.seconds / seconds:,.0f}", error]
        row += ["" if run.name == "8B, layers" else formulas]
        row += ["" if run is runs[0] else f"{run.seconds / null - 1:+.1%}"]
        row += [f"{exposed / seconds:.1%}", f"{held(run, both):.1f}"]
        rows.append([*row, str(RESERVED.get((family, run.name), ""))])
        print(rows[-1], flush=True)
    return rows


def sharded(model):
    """The reader's own stage 3, which gathers ahead."""
    return linked([PrefetchingBlock(part) for part in model])


def train_llama(rank, world_size, wrapper, layers=8, tokens=8192):
    """The worker of the notebooks, with a number of tokens for each rank."""
    sequences = torch.zeros(world_size * tokens // 8192, 8193, dtype=torch.long)
    sizes.train(rank, world_size, wrapper, partial(sizes.large, layers), sequences)


def ours() -> Table:
    """The course's own wrappers on four layers of Llama 3 8B, 8,192 tokens a GPU."""
    wrappers = {"one GPU": nn.Sequential, "NaiveDDP": NaiveDDP, "BucketedDDP": BucketedDDP}
    rows = []
    for name, wrapper in (wrappers | {"PrefetchingBlock": sharded}).items():
        found = price(train_llama, 8, wrapper, layers=4, timeout=900)
        rows.append([name, *found.table().rows[0][1:]])
    return Table(["on 8 x H100", *found.table().header[1:]], rows)


def sliders() -> Table:
    """Milliseconds of a slider's move: the replay, and with the drawing."""
    two = 2 * 8192  # in one sequence nothing is copied, so its tape could not be stretched
    explored, rows = explore(price(train_llama, 8, BucketedDDP, 8, two, timeout=900)), []
    for name, slider in explored.sliders.items():
        moved = [partial(explored.at, **{name: value}) for value in slider.values]
        replayed = in_turns({i: lambda at=at: at().seconds for i, at in enumerate(moved)}, 3)
        drawn = in_turns({i: lambda at=at: at().drawing() for i, at in enumerate(moved)}, 3)
        taken = (median_ms(sum(turns.values(), [])) for turns in (replayed, drawn))
        rows.append([slider.says, *(f"{ms:.0f}" for ms in taken)])
    return Table(["8 layers, BucketedDDP", "replay", "and drawing"], rows)


if __name__ == "__main__":
    given = options(__doc__, "save", "ours")
    server.PRELOAD += ["torch._subclasses.fake_tensor", "torch.distributed.fsdp"]
    if given.ours:
        print(ours(), sliders(), sep="\n")
    found = [row for family, runs in families().items() for row in rows_of(family, runs)]
    print(Table(HEADER, found))
    if given.save:
        lines = [f"| {' | '.join(line)} |" for line in (HEADER, *found)]
        lines.insert(1, "|---" * len(HEADER) + "|")
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
