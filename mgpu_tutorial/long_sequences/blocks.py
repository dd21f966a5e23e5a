"""Attention over one block of keys, the merge of two blocks, and the way back.

Tensors are (batch, heads, tokens, size); there may be fewer heads of keys and values than of
queries. `later` is true where a key is later in the sequence than the query (query, key).
"""

import torch
from torch import Tensor


def scores_of(q: Tensor, k: Tensor, later: Tensor) -> Tensor:
    """Scaled products; where the key is later than the query, the lowest number there is."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(later, torch.finfo(scores.dtype).min)


def spread(block: Tensor, heads: int) -> Tensor:
    """Repeat each head of keys or values for the group of query heads that shares it."""
    return block.repeat_interleave(heads // block.shape[1], dim=1)


def attend(q: Tensor, k: Tensor, v: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    """The output of one block, and for each query the log of its sum of exponentials."""
    k, v = spread(k, q.shape[1]), spread(v, q.shape[1])
    scores = scores_of(q, k, later)
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


def merge(
    out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the keys of both, from those of each alone."""
    both = torch.logaddexp(lse, block_lse)
    return (lse - both).exp() * out + (block_lse - both).exp() * block_out, both


def attend_backward(
    q: Tensor, kv: Tensor, later: Tensor, lse: Tensor, gradient: Tensor, inner: Tensor
) -> tuple[Tensor, Tensor]:
    """What one block adds to the gradients of q, and of k and v.

    `lse` is that of all keys, `gradient` the output's, `inner` its product with the output.
    """
    k, v = (spread(block, q.shape[1]) for block in kv)
    weights = (scores_of(q, k, later) - lse).exp()
    dscores = weights * (gradient @ v.mT - inner) / q.shape[-1] ** 0.5
    dkv = torch.stack([dscores.mT @ q, weights.mT @ gradient])
    return dscores @ k, dkv.unflatten(2, (kv.shape[2], -1)).sum(3)  # over each group
