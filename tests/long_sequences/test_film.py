"""The exchange on paper: who gets which tokens, and that they come home."""

from mgpu_tutorial.lab import film
from mgpu_tutorial.long_sequences import figures


def test_a_rank_gets_all_tokens_of_its_head_and_its_own_tokens_back(ranks):
    frames = film(ranks(3, figures.trade, trace=True)).frames
    own, whole, again = (frame.text.splitlines() for frame in frames)
    assert (
        own[1:]
        == again[1:4]
        == [
            f"  rank {rank}: head 0 {{{rank}}}, head 1 {{{rank}}}, head 2 {{{rank}}}"
            for rank in range(3)
        ]
    )
    assert whole[1:4] == [f"  rank {rank}: head {rank} {{0 1 2}}" for rank in range(3)]
    assert whole[5] == "  head 1: ranks 0, 2 → rank 1" and len(again) == 4 + 6
