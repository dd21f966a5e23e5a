"""Eight bits under a scale: the cast, and the three products of a linear layer with it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

Cast = Callable[[Tensor], Tensor]


def scales_of(x: Tensor, per: str) -> Tensor:
    """The scales of x: a number for the tensor, for each row, or for each block of 32.

    Divided by its scale, the largest number of a tensor or row becomes 448. The scale of a
    block is a power of two, and what is all zeros has the scale 0. Shapes: (1,), (..., 1),
    (..., blocks).
    """
    if per == "tensor":
        parts = x.reshape(1, -1)
    elif per == "row":
        parts = x.unsqueeze(-2)
    else:
        parts = x.unflatten(-1, (-1, 32))
    scales = parts.abs().amax(-1) / 448
    if per == "block":
        scales = scales.log2().ceil().exp2()
    return scales


def to_float8(x: Tensor, scales: Tensor) -> Tensor:
    """The numbers of x, divided by their scales, in eight bits; the shape is that of x."""
    parts = x.unflatten(-1, (scales.shape[-1], -1))
    scales = scales.where(scales != 0, 1).unsqueeze(-1)
    short = (parts / scales).clamp(-448, 448)
    return short.to(torch.float8_e4m3fn).flatten(-2)


def from_float8(short: Tensor, scales: Tensor) -> Tensor:
    """Eight bits and their scales as float32 numbers."""
    parts = short.unflatten(-1, (scales.shape[-1], -1)).float()
    return (parts * scales.unsqueeze(-1)).flatten(-2)


class ShortProduct(torch.autograd.Function):
    """x @ weight.T, whose three products see what `cast` leaves of their inputs.

    `cast` gets each input so that its rows are what the product multiplies and adds up.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, cast: Cast) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.cast = cast
        return cast(x) @ cast(weight).T

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), cast = ctx.saved_tensors, ctx.cast
        # adds over the layer's outputs
        to_x = cast(gradient) @ cast(weight.T).T
        # adds over the tokens
        by_token = gradient.flatten(0, -2), x.flatten(0, -2)
        to_weight = cast(by_token[0].T) @ cast(by_token[1].T).T
        return to_x, to_weight, None


def cast_products(model: nn.Sequential, cast: Cast) -> None:
    """All linear layers of a model's blocks multiply what `cast` leaves of their inputs."""
    for block in model[1:-2]:
        for part in block.modules():
            if isinstance(part, nn.Linear):
                part.forward = partial(_multiply, part.weight, cast)


def _multiply(weight: Tensor, cast: Cast, x: Tensor) -> Tensor:
    return ShortProduct.apply(x, weight, cast)
