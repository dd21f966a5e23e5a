"""What the merge of two blocks, the ring and the zig-zag must do."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.long_sequences import documents, ring
from mgpu_tutorial.long_sequences.block import one_by_one, together
from mgpu_tutorial.tensor_parallel.builds import Rows, compare


def _merged(function: Callable, sizes: list[int], scale: float = 1.0) -> None:
    """Merge blocks of these sizes, one after the other, and compare with all keys at once."""
    torch.manual_seed(0)
    q = scale * torch.randn(1, 2, 3, 4, dtype=torch.float64)
    kv = torch.randn(2, 1, 2, sum(sizes), 4, dtype=torch.float64)
    later = torch.tensor(False)  # of no key
    found, *blocks = [ring.attend(q, *part, later) for part in kv.split(sizes, 3)]
    for block in blocks:
        found = function(*found, *block)
    what = f"blocks of {' and '.join(map(str, sizes))} keys: the"
    expect(type(found), tuple, f"{what} type of what is returned")
    out, lse = ring.attend(q, *kv, later)
    expect(found[1], lse, f"{what} log-sum-exp", within=1e-9 * scale)  # the output needs it
    expect(found[0], out, f"{what} output", within=1e-9 * scale)


def _shares(function: Callable) -> None:
    """One key that answers 0 and three that answer 4, all with the score 0."""
    numbers = torch.tensor([0.0, 1.0, 4.0, 3.0])  # for each block its output, its keys
    out, one, block_out, three = numbers.view(4, 1, 1, 1, 1)
    found = function(out, one.log(), block_out, three.log())
    what = "one key that answers 0 and three that answer 4, all with the score 0: the"
    expect(type(found), tuple, f"{what} type of what is returned")
    expect(found[1].exp().item(), 4.0, f"{what} exp of the log-sum-exp", within=1e-4)
    expect(found[0].item(), 3.0, f"{what} output", within=1e-4)


def merges_blocks(function: Callable) -> None:
    """merge two blocks of keys, and then a third one"""
    _shares(function)
    _merged(function, [4, 4])
    _merged(function, [3, 2, 3])


def stays_finite(function: Callable) -> None:
    """stay finite where scores are around 1,000"""
    _merged(function, [4, 4], scale=1000.0)


def _beside_one(
    rank: int, world_size: int, function: Callable, deal: Callable, size: int
) -> Rows:
    """Output, log-sum-exp and gradients of this rank's tokens, and those of one process."""
    torch.manual_seed(0)
    length = 6 * world_size
    whole = torch.randn(3, 1, 2, length, 4, dtype=torch.float64).requires_grad_()
    positions = torch.arange(length)
    mine = deal(length, rank, world_size)
    part = whole.detach()[..., mine, :].requires_grad_()
    hidden = ring.is_later(positions, positions)
    one, found = ring.attend(*whole, hidden), function(*part, deal)
    expect(type(found), tuple, "the type of what is returned")
    for out, _ in one, found:
        out.square().sum().backward()
    right = [full[..., mine, :] for full in (*one, *whole.grad)]
    names = "output", "log-sum-exp", *(f"gradient of {name}" for name in "qkv")
    whats = [f"{name} of tokens {mine.tolist()}" for name in names]
    return list(zip(whats, (*found, *part.grad), right, strict=True))


def _seen(
    rank: int, world_size: int, function: Callable, deal: Callable, groups: list
) -> list[tuple]:
    """The keys that each query of this rank attends to: key i answers with a 1 at place i."""
    given = [dist.new_subgroups_by_enumeration(groups)[0]] if groups else []
    rank, ranks = dist.get_rank(*given), dist.get_world_size(*given)
    mine = deal(2 * ranks, rank, ranks)
    answers = torch.eye(2 * ranks)[None, None, mine]
    alike = torch.zeros_like(answers)  # so all scores are 0
    found = function(alike, alike, answers, deal, *given)
    expect(type(found), tuple, "the type of what is returned")
    keys = [row.nonzero().flatten().tolist() for row in found[0][0, 0]]
    return list(zip(mine.tolist(), keys, strict=True))


def _expect_seen(where: str, *launched: object) -> None:
    for rank, seen in enumerate(launch(_seen, *launched).results):
        for query, keys in seen:
            who = f"{where}, rank {rank}: query {query} attends to keys"
            assert keys == [*range(query + 1)], f"{who} {keys}, expected 0 to {query}"


def sees_what_is_before(function: Callable) -> None:
    """let each query attend to the keys up to its own place, and to no other"""
    deals = (1, ring.contiguous), (2, ring.contiguous), (3, ring.striped), (4, ring.zigzag)
    for n, deal in deals:
        dealt = ", ".join(str(deal(2 * n, rank, n).tolist()) for rank in range(n))
        _expect_seen(f"{n} rank(s) with tokens {dealt}", n, function, deal, [])


def works_in_a_group(function: Callable) -> None:
    """attend so in a group of ranks too: 0 and 2 are one, 1 and 3 the other"""
    groups = [[0, 2], [1, 3]]
    _expect_seen("groups of ranks 0 and 2, 1 and 3", 4, function, ring.striped, groups)


def equals_one_process(function: Callable) -> None:
    """equal one process on 1 to 4 ranks and with any `deal`, with all gradients"""
    deals = (1, ring.contiguous), (2, ring.contiguous), (3, ring.striped), (4, ring.zigzag)
    for n, deal in deals:
        compare(_beside_one, function, deal, groups=[(n, n)])


def _padded(
    rank: int, world_size: int, function: Callable, deal: Callable, size: int
) -> Rows:
    """Attention both ways of two sequences, the second of which ends in padding."""
    torch.manual_seed(0)
    length = 4 * world_size
    whole = torch.randn(3, 2, 2, length, 4, dtype=torch.float64).requires_grad_()
    padding = torch.arange(length) >= torch.tensor([[length], [3]])  # (batch, length)
    mine = deal(length, rank, world_size)
    part = whole.detach()[..., mine, :].requires_grad_()
    one = ring.attend(*whole, padding[:, None, None])[0]
    found = function(*part, deal, None, lambda _, keys: padding[:, None, None, keys])[0]
    one.square().sum().backward()
    found.square().sum().backward()
    right = [full[..., mine, :] for full in (one, *whole.grad)]
    names = "output", *(f"gradient of {name}" for name in "qkv")
    whats = [f"{name} where a padding is hidden and nothing else" for name in names]
    return list(zip(whats, (found, *part.grad), right, strict=True))


def hides_what_it_is_told(function: Callable) -> None:
    """let `hides` say what is hidden, here a padding and no later key"""
    for n, deal in (2, ring.contiguous), (3, ring.striped):
        compare(_padded, function, deal, groups=[(n, n)])


def _in_autocast(rank: int, world_size: int, function: Callable) -> float:
    """How far output and gradients in bfloat16 are from float64, at most, by its length."""
    torch.manual_seed(0)
    inputs = torch.randn(3, 1, 2, 8 * world_size, 16).bfloat16()
    mine = ring.contiguous(8 * world_size, rank, world_size)
    part = inputs[..., mine, :].requires_grad_()
    with torch.autocast(inputs.device.type, torch.bfloat16):
        out = function(*part, ring.contiguous)[0]
    whole = inputs.double().requires_grad_()
    positions = torch.arange(8 * world_size)
    one = ring.attend(*whole, ring.is_later(positions, positions))[0]
    out.double().square().sum().backward()
    one.square().sum().backward()
    pairs = [(out, one[..., mine, :]), (part.grad, whole.grad[..., mine, :])]
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def bears_autocast(function: Callable) -> None:
    """be off by no more than bfloat16 rounds in autocast"""
    off = max(launch(_in_autocast, 4, function).results)
    assert off < 0.005, f"4 ranks in bfloat16 autocast: off by {off:.1%}, and ours by 0.3%"


def keeps_the_dtype(function: Callable) -> None:
    """give the output in the dtype of the queries, here bfloat16"""

    def dtype_of(rank: int, world_size: int) -> torch.dtype:
        qkv = torch.ones(3, 1, 2, 6, 4, dtype=torch.bfloat16)
        return function(*qkv, ring.contiguous)[0].dtype

    found = launch(dtype_of, 2).results[0]
    assert found == torch.bfloat16, f"the output is {found}, expected torch.bfloat16"


def sends_a_hop_less(function: Callable) -> None:
    """send one message fewer than there are ranks, each to the right"""

    def forward(rank: int, world_size: int) -> None:
        function(*torch.randn(3, 1, 2, 6, 4), ring.contiguous)

    report = launch(forward, 4, trace=True)
    for rank in range(4):
        peers = [e.peer for e in report.events if e.rank == rank and e.sends]
        expect(peers, [(rank + 1) % 4] * 3, f"on 4 ranks, rank {rank} sends to ranks")


def pairs_front_and_end(function: Callable) -> None:
    """give each rank a chunk from the front, then the one that is as far from the end"""
    four = [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    for dealt in four, [[0, 5], [1, 4], [2, 3]], [[0, 1, 2, 3]]:
        length, n = sum(map(len, dealt)), len(dealt)
        for rank, places in enumerate(dealt):
            who = f"{length} tokens: rank {rank} of {n} gets"
            found = function(length, rank, n)
            expect(found, torch.tensor(places), who)
            expect(type(found), torch.Tensor, f"{who} positions of the type")


def refuses(function: Callable) -> None:
    """refuse 12 tokens on 4 ranks, which need 8 chunks"""
    try:
        found = function(12, 0, 4)
    except ValueError:
        return
    raise AssertionError(f"no ValueError, but {found.tolist()}")


LENGTHS = [5, 20, 7]  # of documents, whose ends lie inside of the chunks
PLACES = {"neighbours": ring.contiguous, "zig-zag": ring.zigzag}


def _packs(
    function: Callable, lengths: list[int]
) -> tuple[Callable, torch.Tensor, torch.Tensor]:
    """What the reader's returns, of which there must be three."""
    found = function(lengths)
    expect(type(found), tuple, f"documents of {lengths}: the type of what is returned")
    expect(len(found), 3, f"documents of {lengths}: the number of things that are returned")
    return found


def keeps_documents_apart(function: Callable) -> None:
    """hide later keys and the keys of other documents, by the places that were dealt"""
    hides = _packs(function, LENGTHS)[0]
    document = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
    for name, deal in PLACES.items():
        for rank, other in (0, 0), (3, 0), (1, 2):
            queries, keys = deal(32, rank, 4), deal(32, other, 4)
            hidden = hides(queries, keys)
            who = f"documents of {LENGTHS}, {name}: query"
            expect(hidden.shape, (8, 8), f"{who} and key, the shape of 8 and 8")
            for query, row in zip(queries.tolist(), hidden, strict=True):
                sees = keys[~row.bool()].tolist()
                before = [key for key in keys.tolist() if key <= query]
                right = [key for key in before if document[key] == document[query]]
                what = f"{who} {query} sees {sees} of the keys {keys.tolist()}"
                assert sees == right, f"{what}, expected {right}"


def restarts_positions(function: Callable) -> None:
    """count the positions of each document from 0"""
    for lengths in LENGTHS, [3, 2]:
        right = [place for length in lengths for place in range(length)]
        positions = _packs(function, lengths)[1]
        expect(positions, torch.tensor(right), f"documents of {lengths}: the positions")


def weighs_documents_alike(function: Callable) -> None:
    """weigh the labels of a document alike, and all documents alike, 1 together"""
    quarter = 1 / 4
    right = [quarter, quarter, 0, 1 / 2, 0]
    weights = _packs(function, [3, 2])[2]
    last = "documents of [3, 2]: the weights (a last token has none)"
    expect(weights[[2, 4]], torch.zeros(2), f"{last} at 2 and 4", within=1e-6)
    expect(weights, torch.tensor(right), "documents of [3, 2]: the weights", within=1e-6)


def _probe(
    rank: int, world_size: int, function: Callable, changed: int, deal: Callable
) -> list[int]:
    """The places whose outputs move on this rank when one token changes."""
    hides, places = function(LENGTHS)[0], deal(sum(LENGTHS), rank, world_size)
    torch.manual_seed(0)
    x, outs = torch.randn(1, 2, sum(LENGTHS), 4), []
    for change in 0, 1:
        x[:, :, changed] += change
        part = x[:, :, places]
        outs.append(ring.ring_attention(part, part, part, deal, None, hides)[0])
    return places[(outs[0] != outs[1]).any(-1).any(1)[0]].tolist()


def moves_no_other(function: Callable) -> None:
    """let a changed token move its own document's outputs, from itself on, and no other"""
    for changed, end in (2, 5), (6, 25):
        moved = sum(launch(_probe, 4, function, changed, ring.zigzag).results, [])
        what = f"documents of {LENGTHS} on 4 ranks by zig-zag, token {changed} changed: moved"
        expect(sorted(moved), [*range(changed, end)], what)


def reads_as_one_by_one(function: Callable) -> None:
    """give the loss and the gradients of documents that one process reads one by one"""
    one = launch(one_by_one, 1, LENGTHS).results[0]
    for ranks in 2, 4:
        found = launch(together, ranks, LENGTHS, function).results[0]
        what = f"documents of {LENGTHS} on {ranks} ranks:"
        expect(found[0].item(), one[0].item(), f"{what} the loss", within=1e-5)
        expect(found[1:], one[1:], f"{what} the gradients", within=1e-5)


build = Builder(
    "long_sequences",
    {
        ring.merge: [merges_blocks, stays_finite],
        ring.ring_attention: [
            sees_what_is_before,
            equals_one_process,
            hides_what_it_is_told,
            keeps_the_dtype,
            bears_autocast,
            sends_a_hop_less,
            works_in_a_group,
        ],
        ring.zigzag: [pairs_front_and_end, refuses],
        documents.packed: [
            keeps_documents_apart,
            restarts_positions,
            weighs_documents_alike,
            moves_no_other,
            reads_as_one_by_one,
        ],
    },
)
