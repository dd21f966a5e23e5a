"""Every form of product that PyTorch has: the tape counts what its shapes say, or refuses."""

from collections import Counter

import pytest
import torch
from torch import nn, ones
from torch.nn import functional

from mgpu_tutorial.instruments.price import price
from mgpu_tutorial.instruments.price.products import PRODUCT, UNCOUNTED
from mgpu_tutorial.instruments.price.tape import Mark, Operation
from mgpu_tutorial.lab import span
from tests.instruments.price.test_tape import preloaded  # noqa: F401

M, K, N, B = 4, 8, 5, 3
MATRICES = 2 * M * K * N
A, C, OUT = (M, K), (K, N), (M, N)
IMAGE, FILTER = (2, 8, 10, 10), (6, 8, 3, 3)
IMAGES = 2 * 2 * 6 * 8 * 8 * 8 * 9  # batch, channels out, 8 x 8 places, channels in, 3 x 3
HEADS, SCORES = (2, 3, 7, 8), 2 * 2 * 2 * 3 * 7 * 7 * 8  # batch, heads, tokens, per head


def grad(*shape):
    return ones(*shape, requires_grad=True)


def heads(is_trained=False, **options):
    q, k, v = (ones(HEADS, requires_grad=is_trained) for _ in range(3))
    return functional.scaled_dot_product_attention(q, k, v, **options)


def experts(*shapes):
    a, b = (ones(*shape, dtype=torch.bfloat16) for shape in shapes)
    ends = torch.tensor([8, 16], dtype=torch.int32)
    return functional.grouped_mm(a, b, offs=ends if min(a.ndim, b.ndim) < 3 else None)


FORMS = {
    "mm": (lambda: ones(A) @ ones(C), MATRICES),
    "mm, out": (lambda: torch.mm(ones(A), ones(C), out=ones(OUT)), MATRICES),
    "addmm": (lambda: torch.addmm(ones(OUT), ones(A), ones(C)), MATRICES),
    "addmm, out": (lambda: torch.addmm(ones(N), ones(A), ones(C), out=ones(OUT)), MATRICES),
    "addmm_": (lambda: ones(OUT).addmm_(ones(A), ones(C)), MATRICES),
    "linear": (lambda: nn.Linear(K, N)(ones(A)), MATRICES),
    "linear, 3-D": (lambda: nn.Linear(K, N)(ones(B, *A)), B * MATRICES),
    "bmm": (lambda: torch.bmm(ones(B, *A), ones(B, *C)), B * MATRICES),
    "bmm, out": (
        lambda: torch.bmm(ones(B, *A), ones(B, *C), out=ones(B, *OUT)),
        B * MATRICES,
    ),
    "baddbmm": (lambda: torch.baddbmm(ones(B, *OUT), ones(B, *A), ones(B, *C)), B * MATRICES),
    "baddbmm_": (lambda: ones(B, *OUT).baddbmm_(ones(B, *A), ones(B, *C)), B * MATRICES),
    "addbmm": (lambda: torch.addbmm(ones(OUT), ones(B, *A), ones(B, *C)), B * MATRICES),
    "addbmm_": (lambda: ones(OUT).addbmm_(ones(B, *A), ones(B, *C)), B * MATRICES),
    "addbmm, out": (
        lambda: torch.addbmm(ones(OUT), ones(B, *A), ones(B, *C), out=ones(OUT)),
        B * MATRICES,
    ),
    "matmul, broadcast": (lambda: ones(B, *A) @ ones(C), B * MATRICES),
    "mv": (lambda: torch.mv(ones(A), ones(K)), 2 * M * K),
    "addmv": (lambda: torch.addmv(ones(M), ones(A), ones(K)), 2 * M * K),
    "addmv_": (lambda: ones(M).addmv_(ones(A), ones(K)), 2 * M * K),
    "dot": (lambda: torch.dot(ones(K), ones(K)), 2 * K),
    "vdot": (lambda: torch.vdot(ones(K), ones(K)), 2 * K),
    "addr": (lambda: torch.addr(ones(M, N), ones(M), ones(N)), 2 * M * N),
    "addr_": (lambda: ones(M, N).addr_(ones(M), ones(N)), 2 * M * N),
    "inner": (lambda: torch.inner(ones(A), ones(N, K)), MATRICES),
    "einsum": (lambda: torch.einsum("bij,bjk->bik", ones(B, *A), ones(B, *C)), B * MATRICES),
    "tensordot": (lambda: torch.tensordot(ones(A), ones(C), 1), MATRICES),
    "multi_dot": (
        lambda: torch.linalg.multi_dot([ones(A), ones(C), ones(N, 2)]),
        2 * (K * N * 2 + M * K * 2),
    ),
    "matrix_power": (lambda: torch.matrix_power(ones(M, M), 3), 2 * 2 * M**3),
    "with an activation": (
        lambda: torch._addmm_activation(ones(N), ones(A), ones(C)),
        MATRICES,
    ),
    "8 bits": (
        lambda: torch._int_mm(*(ones(32, 32, dtype=torch.int8) for _ in range(2))),
        2 * 32**3,
    ),
    "experts, rows": (lambda: experts((16, 32), (2, 32, 16)), 2 * 16 * 32 * 16),
    "experts, batch": (lambda: experts((2, 8, 32), (2, 32, 16)), 2 * 2 * 8 * 32 * 16),
    "cdist": (lambda: torch.cdist(ones(40, K), ones(50, K)), 2 * 40 * 50 * K),
    "cdist, few": (lambda: torch.cdist(ones(M, K), ones(N, K)), MATRICES),
    "bilinear": (lambda: nn.Bilinear(K, N, 6)(ones(M, K), ones(M, N)), 2 * M * 6 * K * N),
    "conv1d": (
        lambda: functional.conv1d(ones(2, K, 10), ones(N, K, 3)),
        2 * 2 * N * 8 * K * 3,
    ),
    "conv2d": (lambda: functional.conv2d(ones(IMAGE), ones(FILTER)), IMAGES),
    "conv2d, groups": (
        lambda: functional.conv2d(ones(IMAGE), ones(8, 1, 3, 3), groups=8),
        2 * 2 * 8 * 8 * 8 * 9,
    ),
    "conv2d, stride": (
        lambda: functional.conv2d(ones(IMAGE), ones(FILTER), stride=2, padding=1),
        IMAGES * 25 / 64,
    ),
    "conv_transpose2d": (
        lambda: functional.conv_transpose2d(ones(IMAGE), ones(8, 6, 3, 3)),
        2 * 2 * 8 * 100 * 6 * 9,
    ),
    "conv3d": (
        lambda: functional.conv3d(ones(2, 8, 4, 4, 4), ones(5, 8, 3, 3, 3)),
        2 * 2 * 5 * 8 * 8 * 27,
    ),
    "conv_tbc": (
        lambda: torch.conv_tbc(ones(10, 2, K), ones(3, K, N), ones(N)),
        2 * 8 * 2 * N * 3 * K,
    ),
    "attention": (heads, SCORES),
    "attention, causal": (lambda: heads(is_causal=True), SCORES / 2),
    "attention, mask": (lambda: heads(attn_mask=ones(7, 7).bool()), SCORES),
    "attention, dropout": (lambda: heads(dropout_p=0.1), SCORES),
    "attention, a module": (
        lambda: nn.MultiheadAttention(8, 2)(*(ones(7, 2, 8) for _ in range(3))),
        2 * 14 * 8 * 8 * 4 + 2 * 2 * 2 * 7 * 7 * 8,
    ),
    "backward": (lambda: (grad(*A) @ grad(*C)).sum().backward(), 3 * MATRICES),
    "backward, conv2d": (
        lambda: functional.conv2d(grad(*IMAGE), grad(*FILTER)).sum().backward(),
        3 * IMAGES,
    ),
    "backward, groups": (
        lambda: functional.conv2d(grad(*IMAGE), grad(8, 1, 3, 3), groups=8).sum().backward(),
        3 * 2 * 2 * 8 * 8 * 8 * 9,
    ),
    "backward, weight only": (
        lambda: functional.conv2d(ones(IMAGE), grad(*FILTER)).sum().backward(),
        2 * IMAGES,
    ),
    "backward, conv_tbc": (
        lambda: torch.conv_tbc(grad(10, 2, K), grad(3, K, N), ones(N)).sum().backward(),
        3 * 2 * 8 * 2 * N * 3 * K,
    ),
    "backward, attention": (lambda: heads(is_trained=True).sum().backward(), 3.5 * SCORES),
    "backward, causal": (
        lambda: heads(is_trained=True, is_causal=True).sum().backward(),
        3.5 * SCORES / 2,
    ),
    "backward, bilinear": (
        lambda: functional.bilinear(grad(M, K), grad(M, N), grad(6, K, N)).sum().backward(),
        4 * 2 * M * 6 * K * N,
    ),
}
REFUSED = {
    "lstm": lambda: nn.LSTM(4, 4)(ones(3, 2, 4)),
    "pdist": lambda: functional.pdist(ones(A)),
    "weights of 8 bits": lambda: torch._weight_int8pack_mm(
        ones(4, 32).bfloat16(), ones(8, 32, dtype=torch.int8), ones(8).bfloat16()
    ),
    "svd": lambda: torch.linalg.svd(ones(4, 4)),
    "solve": lambda: torch.linalg.solve(ones(4, 4), ones(4, 4)),
    "fft": lambda: torch.fft.fft(ones(8)),
}


def compute(rank, world_size):
    for name, (form, _) in FORMS.items():
        with span(name):
            form()


def refuse(rank, world_size, form):
    REFUSED[form]()


@pytest.fixture(scope="module")
def taped():
    """The operations of each form, which are between its two marks."""
    found, name = Counter(), ""
    for event in price(compute, 1).tapes[0].events:
        if isinstance(event, Mark):
            name = event.name if event.begins else ""
        elif isinstance(event, Operation):
            found[name] += event.flops
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_product_has_the_operations_of_its_shapes(taped, form):
    assert taped[form] == FORMS[form][1]


@pytest.mark.parametrize("form", REFUSED)
def test_a_product_that_nobody_counts_is_refused_by_name(form):
    with pytest.raises(ValueError, match=r"what \w+ computes is not counted"):
        price(refuse, 1, form)


@torch.library.custom_op("test_products::secret", mutates_args=())
def secret(x: torch.Tensor) -> torch.Tensor:
    """A kernel of the reader's own, whose insides no tape sees."""
    return x @ x


@secret.register_fake
def _(x):
    return torch.empty_like(x)


def use_secret(rank, world_size):
    secret(ones(4, 4))


def test_a_kernel_of_ones_own_is_refused_by_name():
    with pytest.raises(ValueError, match="test_products::secret computes is not counted"):
        price(use_secret, 1)


@pytest.mark.parametrize("name", ["lgamma", "cummax", "upsample_bilinear2d", "linalg_cross"])
def test_what_only_sounds_like_a_product_has_a_price(name):
    words = [] if name.startswith("upsample") else name.split("_")
    assert not any(PRODUCT.fullmatch(word) for word in words)
    assert not UNCOUNTED.match(name)
