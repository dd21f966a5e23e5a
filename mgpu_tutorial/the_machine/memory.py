"""A step of Llama 3's layers on one GPU, to be priced: four ways to keep activations."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from mgpu_tutorial.instruments.price import llama_3_8b
from mgpu_tutorial.lab import borrowed, span
from mgpu_tutorial.shared.cost_model.machines import HOST_4
from mgpu_tutorial.shared.guards import divides, whole

Forward = Callable[[Tensor], Tensor]


def everything(forward: Forward) -> Forward:
    """Autograd's own way: all that backward needs stays in the GPU's memory."""
    return forward


def only_inputs(forward: Forward) -> Forward:
    """Full recomputation: only a layer's input stays, and backward repeats its forward."""
    return partial(checkpoint, forward, use_reentrant=False)


def only_products(forward: Forward) -> Forward:
    """Selective: results of products and attention stay, and what is cheap is repeated."""
    attention = borrowed.flash.thing.default
    kept = [torch.ops.aten.mm.default, attention]  # of the forward
    contexts = partial(create_selective_checkpoint_contexts, kept)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def on_the_host(forward: Forward) -> Forward:
    """Offloading: to the host's memory and back, while the GPU waits for the copy."""

    def offloaded(x: Tensor) -> Tensor:
        with saved_tensors_hooks(to_host, from_host):
            return forward(x)

    return offloaded


def to_host(tensor: Tensor) -> Tensor | tuple:
    """Takes as long as the copy; a priced tensor has no numbers, so its shape is kept."""
    if isinstance(borrowed.base_of(tensor), nn.Parameter) or isinstance(tensor, nn.Parameter):
        return tensor  # no activation: it stays where it is
    time.sleep(tensor.nbytes / HOST_4)  # the price takes it for a kernel of that length
    return tensor.shape, tensor.stride(), tensor.dtype


def from_host(packed: Tensor | tuple) -> Tensor:
    """Takes as long as the copy back."""
    if isinstance(packed, Tensor):
        return packed
    shape, stride, dtype = packed
    tensor = torch.empty_strided(shape, stride, dtype=dtype)
    time.sleep(tensor.nbytes / HOST_4)
    return tensor


def train_alone(
    rank: int,
    world_size: int,
    keeping: Callable[[Forward], Forward] = everything,
    layers: int = 5,
    micro_batches: int = 1,
    steps: int = 1,
) -> None:
    """Steps of AdamW in bfloat16, each on two sequences of 8,192 tokens.

    A single one is not the first: Adam's moments are there. More begin with the first, and
    `price` takes all of them, because no span is named "step".
    """
    divides("sequences", 2, micro_batches)
    whole("steps", steps)
    torch.set_default_dtype(torch.bfloat16)
    model = llama_3_8b(layers)
    for layer in model[1:-2]:  # not the embedding, the last norm and the head
        layer.forward = keeping(layer.forward)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = torch.zeros(2, 8192, dtype=torch.long)
    if steps == 1:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(steps):
        with span("step" if steps == 1 else ""):
            for part in batch.chunk(micro_batches):
                with span("forward"):
                    loss = cross_entropy(model(part).flatten(0, 1), part.flatten())
                with span("backward"):
                    (loss / micro_batches).backward()
            with span("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
