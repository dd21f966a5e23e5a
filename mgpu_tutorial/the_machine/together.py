"""A step of several GPUs, to be priced: each has all parameters and samples of its own."""

import torch
import torch.distributed as dist
from torch import Tensor

from mgpu_tutorial.instruments.price import llama_3_8b
from mgpu_tutorial.lab import span


def train_together(
    rank: int, world_size: int, layers: int = 4, tokens: int = 1024, early: bool = True
) -> None:
    """Two steps of AdamW, after which all ranks have averaged their gradients.

    Each gradient goes into an all-reduce: as soon as backward has made it (`early`), or when
    backward has made all of them. Embedding and head of Llama 3 are left out.
    """
    if tokens % 1024:
        raise ValueError(f"tokens come in sequences of 1,024, got {tokens}")
    torch.set_default_dtype(torch.bfloat16)
    model = llama_3_8b(layers)[1:-2]
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = torch.ones(tokens // 1024, 1024, 4096)
    works: list[dist.Work] = []

    def send(parameter: Tensor) -> None:
        mean = dist.ReduceOp.AVG
        works.append(dist.all_reduce(parameter.grad, mean, async_op=True))

    if early:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(send)
    for step in range(2):
        with span(f"step {step}"):
            with span("forward"):
                loss = model(batch).mean()
            with span("backward"):
                loss.backward()
                if not early:
                    for parameter in reversed(list(model.parameters())):
                        send(parameter)
                while works:
                    works.pop().wait()
            with span("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
