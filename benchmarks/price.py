"""Published steps and their memory beside the price of the same code, taped here.

    python benchmarks/price.py [--save] [--ours]

A worker with `fully_shard` is taped with two and with four layers; each further layer counts
as much as these two differ by. The share of the peak that products reach is that of
`cost_model/machines.py`, to which the formulas were fitted with other programs, or for MPT
with the first row itself; the tape, which counts more than they do, was fitted to nothing.
Its prices are too fast by 8 to 35 %: no claim of accuracy stands on them. The last columns
are the cost model's formulas and the null guess of 22. `--ours` prices the course's own
wrappers first, and `--save` writes price.md.

Memory is what the tensors hold; the published figure is larger, probably because it is what
the allocator had reserved. Not seen: kernels worse than the share, congestion,
ranks that are late, the processors that NCCL takes, programs that are compiled.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from common import options
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP
from mgpu_tutorial.lab import Table, span
from mgpu_tutorial.sharding.blocks import PrefetchingBlock, linked
from mgpu_tutorial.shared.cost_model.machines import A100_2021, H100
from mgpu_tutorial.shared.price import llama_3_8b, price, train_llama
from mgpu_tutorial.shared.price.machine import machine_of
from mgpu_tutorial.shared.price.models import Layer, decoder
from mgpu_tutorial.step_time.published import predict

RESULT = Path(__file__).with_suffix(".md")


class Row(NamedTuple):
    """A published run: tokens per second and GPU, and GiB where they were told."""

    name: str
    machine: str
    model: str
    batch: int  # sequences of a rank
    sequence: int
    published: float
    gib: float | None = None
    family: tuple[str, str] | None = None  # where 22 has it


def mpt_7b(layers: int) -> nn.Sequential:
    """MPT 7B, or so many of its 32 layers; its biases of attention cost nothing here."""
    return decoder(layers, 4096, 32, 32, 16_384, 50_368, gated=False)


MODELS = {"llama": llama_3_8b, "mpt": mpt_7b}
TITAN, MPT = "torchtitan 8B", "MPT, FSDP"
ROWS = [
    Row("Llama 3.1 8B", "8 x H100-500W", "llama", 2, 8192, 5762, 82.4, (TITAN, "8 GPUs")),
    Row("Llama 3.1 8B", "128 x H100-500W", "llama", 2, 8192, 5605, None, (TITAN, "128 GPUs")),
    Row("Llama 3 8B", "64 x A100", "llama", 1, 8192, 2973),
    Row("MPT 7B", "8 x A100-40GB", "mpt", 12, 2048, 3679, None, (MPT, "7B on 8")),
    Row("MPT 7B", "128 x A100-40GB", "mpt", 18, 2048, 3623, None, (MPT, "7B on 128")),
]
# the others have what products reach in their row of `cost_model`
SHARES = {"H100-500W": H100.matmul_efficiency, "A100": A100_2021.matmul_efficiency}


def every_second_product():
    """torchtitan's selective checkpointing: attention and every second product are kept."""
    products = 0

    def policy(_, operation, *args, **kwargs):
        nonlocal products
        products += operation == torch.ops.aten.mm.default
        is_product = operation == torch.ops.aten.mm.default and products % 2
        is_kept = is_product or "attention" in str(operation)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def train(rank, world_size, model, layers, batch, sequence):
    """Two steps as the published programs do them: parameters in 32 bits, products in 16."""
    selective = {"context_fn": every_second_product} if model == "llama" else {}
    network = MODELS[model](layers)
    reduced = torch.float32 if model == "llama" else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    for part in network:
        if isinstance(part, Layer):
            part.forward = partial(checkpoint, part.forward, use_reentrant=False, **selective)
        fully_shard(part, mp_policy=policy)
    fully_shard(network, mp_policy=policy)
    optimizer = torch.optim.AdamW(network.parameters(), foreach=True)
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    for _ in range(2):
        with span("step"):
            logits = network(tokens).flatten(0, 1)
            cross_entropy(logits.float(), tokens.flatten()).backward()
            del logits
            optimizer.step()
            optimizer.zero_grad()


def at_32_layers(row: Row) -> tuple[float, float, float]:
    """Seconds of a step, those with messages hidden, and GiB at the fullest."""
    machine, name = machine_of(row.machine), row.machine.split()[-1]
    if name in SHARES:
        peak = 312e12 if "A100" in name else H100.peak
        machine = machine._replace(flops=peak * SHARES[name])
    found = []
    for layers in (2, 4):
        worker = (row.model, layers, row.batch, row.sequence)
        priced = price(train, machine.gpus, *worker, machine=machine, timeout=600)
        rank = priced.played[0]
        found.append((rank.seconds, rank.computing, priced.fullest().total() / 2**30))
    return tuple(two + 15 * (four - two) for two, four in zip(*found, strict=True))


def of_22(row: Row) -> list[str]:
    """The errors of the formulas and of the null guess, if 22 has the row."""
    if not row.family:
        return ["", ""]
    family, name = row.family
    (found,) = (p for p in predict(family) if p.run.name == name)
    is_fitted = " (fitted)" if found.run.fitted else ""
    return [f"{found.error:+.1%}{is_fitted}", f"{found.null_error:+.1%}"]


def sharded(model):
    """The reader's own stage 3, which gathers ahead."""
    return linked([PrefetchingBlock(part) for part in model])


def ours() -> Table:
    """The course's own wrappers on four layers of Llama 3 8B, 8,192 tokens a GPU."""
    wrappers = {"one GPU": None, "NaiveDDP": NaiveDDP, "BucketedDDP": BucketedDDP}
    rows = []
    for name, wrapper in (wrappers | {"PrefetchingBlock": sharded}).items():
        found = price(train_llama, 8, wrapper, layers=4, timeout=600)
        rows.append([name, *found.table().rows[0][1:]])
    return Table(["on 8 x H100", *found.table().header[1:]], rows)


def table() -> Table:
    """A row per published run: rates per GPU, and errors of the rate."""
    rows = []
    for row in ROWS:
        seconds, computing, gib = at_32_layers(row)
        rate, hidden = (row.batch * row.sequence / s for s in (seconds, computing))
        error = f"{rate / row.published - 1:+.1%}"
        memory = f"{gib:.1f}" + (f" ({row.gib})" if row.gib else "")
        line = [row.name, row.machine, f"{row.published:,}", f"{rate:,.0f}", error]
        rows.append([*line, f"{hidden:,.0f}", memory, *of_22(row)])
        print(rows[-1], flush=True)
    header = ["model", "machine", "published tokens/s", "priced", "error", "messages hidden"]
    return Table([*header, "GiB (published)", "formulas of 22", "null guess"], rows)


if __name__ == "__main__":
    given = options(__doc__, "save", "ours")
    if given.ours:
        print(ours())
    found = table()
    print(found)
    if given.save:
        lines = [f"| {' | '.join(map(str, line))} |" for line in (found.header, *found.rows)]
        lines.insert(1, "|---" * len(found.header) + "|")
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
