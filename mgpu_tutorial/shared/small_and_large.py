"""One worker at two sizes: proved with a small model, priced with a large one."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.instruments.price.models import llama, llama_3_8b
from mgpu_tutorial.lab import span
from mgpu_tutorial.shared.guards import whole

TEXT = 256 * torch.rand(8, 33, generator=torch.Generator().manual_seed(0))
SMALL = TEXT.long()  # tokens of eight sequences
LARGE = torch.zeros(8, 8193, dtype=torch.long)  # the same, of 8,192 tokens and the next


def small() -> nn.Sequential:
    """Two layers of Llama's kind, 64 wide, which know 256 tokens."""
    torch.manual_seed(0)
    return llama(2, 64, 4, 128, kv_heads=2, vocabulary=256, sequence=32)


def large(layers: int = 8) -> nn.Sequential:
    """So many of Llama 3 8B's 32 layers, with its embedding and head, in bfloat16."""
    return llama_3_8b(layers).to(torch.bfloat16)


def train(
    rank: int,
    world_size: int,
    wrapper: Callable[[nn.Sequential], nn.Module],
    model_of: Callable[[], nn.Sequential],
    tokens: Tensor,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> Tensor:
    """Two steps on this rank's sequences; returns the loss of the second.

    One process trains the plain model, and several wrap it.

    `tokens` are (sequences, length), in equal shares for all ranks. Raises ValueError for
    others.
    """
    whole(f"sequences for each of {world_size} ranks", len(tokens) / world_size)
    model = model_of()
    if world_size > 1:
        model = wrapper(model)
    stepping = optimizer(model.parameters(), foreach=True)
    mine = tokens.chunk(world_size)[rank]
    for step in range(2):
        with span(f"step {step}"):
            with span("forward"):
                loss = cross_entropy(model(mine[:, :-1]).mT, mine[:, 1:])
            with span("backward"):
                loss.backward()
                if hasattr(model, "finish_gradient_synchronization"):
                    model.finish_gradient_synchronization()
            with span("optimizer"):
                stepping.step()
                stepping.zero_grad()
    return loss.detach()
