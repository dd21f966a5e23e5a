"""The operations of every form of product, by the shapes that go in.

PyTorch's own counter knows the plain forms. Here are those that it leaves out (in place,
summed over a batch, of vectors, of distances), convolutions, whose groups it forgets in
backward, and the attention of a CPU. What is a product by its name, and has no count, is
refused.
"""

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from mgpu_tutorial.lab import borrowed

# Kernels with far more work than the bytes that they move, which no count here knows.
UNCOUNTED = re.compile(
    r"_?linalg_(?!vector_norm|cross|check_errors)|_fft_|_?thnn_|cholesky|ormqr|geqrf|"
    r"_?transformer_|triangular_solve|_?lu_|_?histogramdd"
)
# A word of a kernel's name, between underscores, that says product: addmm, conv2d, cdist.
PRODUCT = re.compile(
    r"\w*(?:mm|mv|gemm)|v?dot|conv(?:olution)?(?:\d[dD])?|tbc|linear|attention|"
    r"[cp]dist|euclidean|trilinear|rnn|lstm|gru"
)
FREE = ("prim", "prims", "profiler", "c10d", "streams")  # move nothing
FREE_KINDS = ("_c10d", "_dtensor", "symm_mem", "inductor")


class Unpriced(ValueError):
    """What a pretended rank cannot price, said in a sentence for the reader."""


def flops_of(func: Any, args: tuple, kwargs: dict, out: Any) -> float:
    """What this kernel multiplies and adds; Unpriced where it does, and has no count."""
    packet = func.overloadpacket
    count = counts().get(packet) or flop_counter.flop_registry.get(packet)
    if count in counts().values():
        return count(out, *args, **kwargs)
    if count:
        return count(*args, **kwargs, out_val=out)
    name = packet.__name__
    is_product = any(PRODUCT.fullmatch(word) for word in name.split("_"))
    if is_product and not name.startswith("upsample") or UNCOUNTED.match(name):
        raise uncounted(name)
    return 0


def uncounted(name: str) -> Unpriced:
    """The refusal of a kernel whose operations nobody counts."""
    return Unpriced(
        f"what {name} computes is not counted, so it would have no price: write it as "
        "matrix products, or leave it out"
    )


def is_free(namespace: str) -> bool:
    """Whether a namespace has no kernels: calls and marks are taped elsewhere."""
    return namespace in FREE or namespace.startswith(FREE_KINDS)


def matrices(
    out: Tensor, /, added: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any
) -> float:
    """Of `added` + a @ b, also where a batch of products is summed."""
    return 2 * a.numel() * (b.shape[-1] if b.ndim > 1 else 1)


def plain(out: Tensor, /, a: Tensor, b: Tensor, *_: Any, **__: Any) -> float:
    """Of a @ b, of matrices or vectors."""
    return matrices(out, out, a, b)


def outer(out: Tensor, /, added: Tensor, a: Tensor, b: Tensor, **_: Any) -> float:
    """Of `added` + a column times a row."""
    return 2 * a.numel() * b.numel()


def grouped(out: Tensor, /, a: Tensor, b: Tensor, *_: Any, **__: Any) -> float:
    """Of experts, to whom the rows of `a`, or the columns of `b`, are dealt."""
    if a.ndim == 3 and b.ndim == 2:
        return 2 * b.numel() * a.shape[-2]
    return 2 * a.numel() * b.shape[-1]


def distances(out: Tensor, /, a: Tensor, b: Tensor, *_: Any, **__: Any) -> float:
    """Between all rows of `a` and of `b`."""
    return 2 * a.numel() * b.shape[-2]


def distances_back(out: Tensor, /, gradient: Tensor, a: Tensor, b: Tensor, *_: Any) -> float:
    """As many again."""
    return distances(out, a, b)


def trilinear(out: Tensor, /, a: Tensor, b: Tensor, c: Tensor, *expanded: Any) -> float:
    """Of `bilinear`: each product of three numbers, added up."""
    shapes = []
    for tensor, places in zip((a, b, c), expanded, strict=False):
        shape = list(tensor.shape)
        for place in sorted(places):
            shape.insert(place, 1)
        shapes.append(shape)
    return 2 * math.prod(torch.broadcast_shapes(*shapes))


def convolution(
    out: Tensor, /, x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, *_: Any, **__: Any,
) -> float:  # fmt: skip
    """A number of the output, or of the input if transposed, meets a part of the weight."""
    return 2 * (x if transposed else out).numel() * weight.numel() / weight.shape[0]


def convolution_back(
    out: Any, /, gradient: Tensor, x: Tensor, weight: Tensor, bias: Any, stride: Any,
    padding: Any, dilation: Any, transposed: bool, outside: Any, groups: int, mask: Any,
) -> float:  # fmt: skip
    """As much as forward for the input's gradient, and as much for the weight's."""
    forward = convolution(gradient, x, weight, bias, stride, padding, dilation, transposed)
    return forward * (mask[0] + mask[1])


def time_batch(out: Tensor, /, x: Tensor, weight: Tensor, *_: Any) -> float:
    """Of `conv_tbc`: (time, batch, channels) with (width, channels, new channels)."""
    return 2 * out.numel() * weight.shape[0] * weight.shape[1]


def time_batch_back(
    out: Any, /, gradient: Tensor, x: Tensor, weight: Tensor, *_: Any
) -> float:
    """As much as forward for each of two gradients."""
    return 2 * time_batch(gradient, x, weight)


def attention(
    out: Any, /, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0,
    is_causal: bool = False, **_: Any,
) -> float:  # fmt: skip
    """Of the CPU's attention; half if no token looks ahead."""
    shapes = [tuple(tensor.shape) for tensor in (q, k, v)]
    return flop_counter.sdpa_flop_count(*shapes) / (2 if is_causal else 1)


def attention_back(
    out: Any, /, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor,
    logsumexp: Tensor, dropout: float, is_causal: bool, **_: Any,
) -> float:  # fmt: skip
    """Five products for the two of forward, whose scores it computes again."""
    shapes = [tuple(tensor.shape) for tensor in (gradient, q, k, v)]
    return flop_counter.sdpa_backward_flop_count(*shapes) / (2 if is_causal else 1)


@cache
def counts() -> dict[Any, Callable]:
    """A count for each kernel that PyTorch's counter lacks, or counts otherwise."""
    aten = torch.ops.aten
    names = {
        matrices: "addmm_ _addmm_activation baddbmm_ addbmm addbmm_ addmv addmv_",
        plain: "mv dot vdot _int_mm",
        outer: "addr addr_",
        grouped: "_grouped_mm _scaled_grouped_mm",
        distances: "_euclidean_dist _cdist_forward",
        distances_back: "_cdist_backward",
        trilinear: "_trilinear",
        convolution: "convolution _convolution",
        convolution_back: "convolution_backward",
        time_batch: "conv_tbc",
        time_batch_back: "conv_tbc_backward",
    }
    found = {
        getattr(aten, name): count for count, all_ in names.items() for name in all_.split()
    }
    return found | {
        borrowed.flash.thing: attention,
        borrowed.flash_backward.thing: attention_back,
    }
