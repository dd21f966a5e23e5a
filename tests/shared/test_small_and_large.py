"""The worker of both ends: it sees a wrong mean, and asks for equal shares."""

from torch.optim import SGD

from mgpu_tutorial.ddp_buckets.wrappers import NaiveDDP
from mgpu_tutorial.shared.small_and_large import SMALL, small, train


class Sum(NaiveDDP):
    """Gradients four times too long, which AdamW would hide."""

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for parameter in self.parameters():
            parameter.grad *= 4


def test_a_mean_equals_one_process_and_a_sum_does_not(ranks):
    alone = ranks(1, train, NaiveDDP, small, SMALL, SGD).results[0]
    for wrapper, is_equal in ((NaiveDDP, True), (Sum, False)):
        found = ranks(4, train, wrapper, small, SMALL, SGD).results
        assert (abs(sum(found) / 4 - alone) < 1e-5) == is_equal


def test_unequal_shares_are_refused(refused):
    words = "sequences for each of 3 ranks must be a whole number"
    refused(3, words, train, NaiveDDP, small, SMALL, SGD)
