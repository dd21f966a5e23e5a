"""What cannot be sent to an expert is refused; what is unusual comes out right."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP
from mgpu_tutorial.experts import layer, mixture
from mgpu_tutorial.experts.parallel import (
    ExpertModel,
    ExpertParallel,
    average_gradients,
    combine,
    dispatch,
    norm_of_all,
    run,
    step,
)
from mgpu_tutorial.shared import small_and_large as sizes


def send(rank, world_size, rows, which, experts=8):
    return dispatch(torch.ones(rows, 2), torch.tensor(which), experts)


@pytest.mark.parametrize(
    "words, given",
    [
        ("experts of shape (3,) for 5 rows", (5, [0, 1, 2])),
        ("experts of shape (5,) for 3 rows", (3, [0, 1, 2, 3, 4])),
        ("experts of shape (2, 2) for 4 rows", (4, [[0, 1], [2, 3]])),
        ("there is no expert 8 of 8", (3, [0, 8, 9])),
        ("there is no expert -1 of 8", (1, [-1])),
        ("in whole numbers, got torch.float32", (2, [0.5, 1.0])),
        ("7 experts on 2 ranks: use a multiple of 2", (1, [0], 7)),
    ],
)
def test_rows_that_have_nowhere_to_go_are_refused(refused, words, given):
    refused(2, words, send, *given)


def return_home(rank, world_size, results, shape):
    way = torch.arange(4), [2, 2], [2, 2]  # four rows left, and four came
    return combine(torch.ones(results, 2), way, torch.ones(shape))


@pytest.mark.parametrize(
    "results, shape", [(3, (2, 2)), (4, (3, 2)), (4, (4,)), (4, (1, 2, 2))]
)
def test_results_that_are_not_those_of_the_rows_are_refused(refused, results, shape):
    refused(2, f"{results} results and weights of shape {shape}", return_home, results, shape)


@pytest.mark.parametrize(
    "words, given",
    [
        ("3 copies of the experts cannot share 4 ranks", (3,)),
        ("0 copies of the experts cannot share 4 ranks", (0,)),
        ("0 tokens have no mean loss", (1, 2, 0)),
    ],
)
def test_a_step_that_cannot_be_is_refused(refused, words, given):
    refused(4, words, step, *given)


@pytest.mark.parametrize("k", [0, 9, -1])
def test_a_token_has_one_to_all_experts(refused, k):
    refused(2, f"k is {k}: a token needs 1 to 8 experts", step, 1, k, sent=True)


def answer(rank, world_size, shape, dtype):
    return ExpertParallel(4, 2)(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize(
    "words, shape, dtype",
    [
        ("x of shape (2, 3, 16): expected (tokens, 16)", (2, 3, 16), torch.float64),
        ("x of shape (16,): expected (tokens, 16)", (16,), torch.float64),
        ("x of shape (3, 8): expected (tokens, 16)", (3, 8), torch.float64),
        ("x is torch.float32, and the layer torch.float64", (3, 16), torch.float32),
        ("x is torch.int64, and the layer torch.float64", (3, 16), torch.int64),
    ],
)
def test_what_are_no_tokens_of_the_layer_is_refused(refused, words, shape, dtype):
    refused(2, words, answer, shape, dtype)


def average_over(rank, world_size, experts, copies):
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    group = {"all": None, "alone": alone}
    model = ExpertModel(ExpertParallel(4, 2, group[experts]))
    run(model)
    average_gradients(model, group[copies])


@pytest.mark.parametrize("experts, copies", [("all", "all"), ("alone", "alone")])
def test_ranks_without_the_same_experts_are_no_copies(refused, experts, copies):
    words = "give the group of the ranks with this rank's experts"
    refused(2, words, average_over, experts, copies, sent=True)


def average_over_the_other_dimension(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    model = ExpertModel(ExpertParallel(4, 2, mesh.get_group("experts")))
    run(model)
    average_gradients(model, mesh.get_group("experts"))


def test_the_ranks_that_share_the_experts_are_no_copies(refused):
    words = "`up` is this rank's part of a layer"
    refused(4, words, average_over_the_other_dimension, sent=True)


def average_a_copy(rank, world_size):
    model = copy.deepcopy(ExpertModel(ExpertParallel(4, 2, dist.new_group([0, 1]))))
    run(model)
    BucketedDDP(model)


def test_a_deep_copy_is_not_taken_for_a_replica(refused):
    refused(2, "`experts.up` is this rank's part of a layer", average_a_copy, sent=True)


def average_with_a_frozen_layer(rank, world_size, function):
    model = ExpertModel(ExpertParallel(4, 2))
    model.below.requires_grad_(False)
    run(model)
    function(model, [dist.new_group([r]) for r in range(world_size)][rank])


@pytest.mark.parametrize("function", [average_gradients, norm_of_all])
def test_a_frozen_layer_is_refused_before_the_average(refused, function):
    words = "no gradient in below: backward comes first"
    refused(2, words, average_with_a_frozen_layer, function, sent=True)


class WithAnother(ExpertModel):
    def __init__(self, experts):
        super().__init__(experts)
        self.head = torch.nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x):
        return self.head(super().forward(x))


def average_with_another_layer(rank, world_size):
    model = WithAnother(ExpertParallel(4, 2))
    run(model)
    average_gradients(model, [dist.new_group([r]) for r in range(world_size)][rank])


def test_a_layer_that_nobody_would_average_is_refused(refused):
    words = "head.weight, head.bias would be averaged by nobody"
    refused(2, words, average_with_another_layer, sent=True)


def average_twice(rank, world_size):
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    model = ExpertModel(ExpertParallel(4, 2))
    for _ in range(2):  # a backward in between, of a step that zeroed its gradients
        model.zero_grad()
        run(model)
        average_gradients(model, alone)
    average_gradients(model, alone)


def test_gradients_are_averaged_once(refused):
    refused(2, "these gradients are averaged already", average_twice, sent=True)


def norm_over(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    model = ExpertModel(ExpertParallel(4, 2, mesh.get_group("experts")))
    run(model)
    norm_of_all(model, None)


def test_a_norm_that_counts_copies_twice_is_refused(refused):
    words = "2 ranks share the experts, and this group has 4"
    refused(4, words, norm_over, sent=True)


def norm_too_early(rank, world_size):
    model = ExpertModel(ExpertParallel(4, 2))
    run(model)
    norm_of_all(model, None)


def test_a_norm_before_the_average_is_refused(refused):
    refused(2, "call average_gradients first", norm_too_early, sent=True)


SCORES, ROWS = torch.ones(3, 4), torch.ones(3, 2)
COUNTS, RATE = torch.tensor([3, 1, 0, 2]), "a rate of 0 or more"
UP, DOWN = torch.ones(4, 2, 5), torch.ones(4, 5, 2)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: layer.choose(SCORES, 5), "k is 5: a token needs 1 to 4"),
        (lambda: layer.choose(SCORES, 0), "k is 0: a token needs 1 to 4"),
        (lambda: layer.Experts(4, 2.0), "k is 2.0: a token needs 1 to 4"),
        (lambda: layer.choose(SCORES, 2.0), "k is 2.0: a token needs 1 to 4"),
        (lambda: layer.Experts(4, 0), "k is 0: a token needs 1 to 4"),
        (lambda: layer.tokens_per_expert(torch.tensor([[4]]), 4), "no expert 4 of 4"),
        (lambda: layer.run_experts(ROWS, torch.tensor([0, 4, 1]), UP, DOWN), "no expert 4"),
        (lambda: layer.run_experts(ROWS, torch.tensor([0]), UP, DOWN), "for 3 rows"),
        (
            lambda: layer.run_experts(ROWS, torch.tensor([0, 0.5, 1]), UP, DOWN),
            "in whole numb",
        ),
        (lambda: layer.auxiliary_loss(SCORES, torch.zeros(4)), "expected 0 or more, and one"),
        (
            lambda: layer.auxiliary_loss(SCORES, torch.tensor([3, -1, 0, 0])),
            r"counts \[3, -1",
        ),
        (lambda: layer.auxiliary_loss(SCORES[:0], torch.ones(4)), "a token at least"),
        (lambda: layer.auxiliary_loss(SCORES, torch.ones(1)), "a count for each expert"),
        (
            lambda: layer.auxiliary_loss(torch.ones(2, 4, 4), torch.ones(4)),
            "a count for each",
        ),
        (lambda: layer.auxiliary_loss(SCORES, torch.ones(4, 2)), "a count for each expert"),
        (lambda: layer.move_bias(torch.zeros(1), COUNTS, 0.1), "one of each for each"),
        (lambda: layer.move_bias(torch.zeros(()), COUNTS, 0.1), "one of each for each"),
        (lambda: layer.move_bias(torch.zeros(4, 1), COUNTS, 0.1), "one of each for each"),
        (lambda: layer.move_bias(torch.zeros(4), COUNTS, -0.1), RATE),
        (
            lambda: layer.move_bias(torch.zeros(4), COUNTS, float("nan")),
            "a rate of 0 or more",
        ),
    ],
)
def test_a_layer_refuses_in_one_process_too(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def there_and_back(rank, world_size, dtype, turned):
    """Experts answer a row times their number + 1; the sum of two answers, by hand beside."""
    x = torch.arange(3.0 * rank, 3.0 * rank + 6, dtype=dtype).view(3, 2)
    x = x.T.contiguous().T if turned else x
    chosen = torch.tensor([[0, 3], [1, 1], [2, 0]])
    weights = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=dtype)
    arrived, which, way = dispatch(x.repeat_interleave(2, dim=0), chosen.flatten(), 4)
    first = 4 // world_size * rank
    found = combine(arrived * (first + which + 1)[:, None], way, weights)
    return found, x * (weights * (chosen + 1)).sum(dim=1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_dtype_and_any_order_of_memory_travels(ranks, world_size, dtype, turned):
    for found, wanted in ranks(world_size, there_and_back, dtype, turned).results:
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=0)


def test_the_auxiliary_loss_is_one_for_equal_loads_and_pushes_the_busy_down():
    scores = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    assert layer.auxiliary_loss(scores, torch.tensor([2, 2, 2])).item() == pytest.approx(1)
    shares = torch.tensor([0.5, 0.25, 0.25])  # all probabilities are 1/3
    loss = layer.auxiliary_loss(scores, torch.tensor([2, 1, 1]))
    (gradient,) = torch.autograd.grad(loss, scores)
    # of 3 Σ f P, softmax leaves 3 P (f - Σ f P), here f - 1/3, for each of four tokens
    assert torch.allclose(gradient, (shares - 1 / 3).double() / 4, rtol=0, atol=1e-8)
    assert gradient[0, 0] > 0 > gradient[0, 1]


def test_the_bias_moves_towards_the_mean_and_not_the_median():
    """The mean of these loads is 5, the median 3: with 4 a bias rises, with 5 it stays."""
    counts, rate = torch.tensor([1, 2, 2, 4, 5, 16]), 0.5
    moved = layer.move_bias(torch.zeros(6, dtype=torch.float64), counts, rate)
    assert moved.tolist() == [0.5, 0.5, 0.5, 0.5, 0, -0.5]


def in_another_group(rank, world_size, call):
    groups = [dist.new_group([r]) for r in range(world_size)]
    return call(groups[1 - rank])


@pytest.mark.parametrize(
    "call",
    [
        lambda group: dispatch(torch.ones(2, 2), torch.tensor([0, 1]), 4, group),
        lambda group: ExpertParallel(4, 1, group),
    ],
)
def test_a_group_without_this_rank_is_refused(refused, call):
    """torch's calls would return at once, and leave each rank with its own part."""
    refused(2, "isn't in the group that it was given", in_another_group, call, sent=True)


def mixed(rank, world_size, experts, sends=dispatch):
    model = mixture.ExpertsDDP(sizes.small(), experts, sends, combine)
    return model, model(sizes.SMALL[:, :-1])


@pytest.mark.parametrize(
    "words, given",
    [
        ("3 experts on 2 ranks: use a multiple of 2", (3,)),
        ("0 experts on 2 ranks", (0,)),
        ("that is right for a price only", (2, mixture.evenly)),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(refused, words, given):
    refused(2, words, mixed, *given)


def average(rank, world_size, times):
    model, output = mixed(rank, world_size, 2)
    if times:
        output.sum().backward()
    for _ in range(times):
        model.finish_gradient_synchronization()
    model.finish_gradient_synchronization()


@pytest.mark.parametrize("words, times", [("has no gradient", 0), ("an average already", 1)])
def test_gradients_of_mixtures_are_averaged_once(refused, words, times):
    refused(2, words, average, times, sent=True)


def alone(rank, world_size):
    mixed(rank, world_size, 1)


def test_one_expert_is_too_few_for_two_choices(refused):
    refused(1, "k is 2: a token needs 1 to 1 experts", alone)
