"""A run that cannot be is refused at once on every rank; one that can be is right."""

import os
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.language_model import PARTS, ask, own_text, train
from mgpu_tutorial.language_model.model import (
    SHIPPED,
    batch_of,
    decode,
    encode,
    load_checkpoint,
    new_model,
)
from mgpu_tutorial.language_model.plan import Plan, forward_backward, mesh_of, plan_of
from mgpu_tutorial.language_model.rank import build_rank

WEIGHTS = new_model().state_dict()
GOOD = {"step": 4, "updates": 4, "tensors": {name: [w] * 3 for name, w in WEIGHTS.items()}}
RAGGED = GOOD["tensors"] | {"5.scores.bias": [WEIGHTS["5.scores.bias"]]}
NAN = GOOD["tensors"] | {"5.scores.bias": [torch.full((96,), torch.nan)] * 3}
WHOLE = GOOD["tensors"] | {"5.scores.bias": [torch.zeros(96, dtype=torch.int64)] * 3}
UNREADABLE = "holds no readable checkpoint"
FILES = {
    "text": (b"some text that is no checkpoint", UNREADABLE),
    "empty": (b"", UNREADABLE),
    "cut": (slice(0, 5000), UNREADABLE),
    "without its end": (slice(0, -100), UNREADABLE),
    "another program's": ({"model": WEIGHTS, "optimizer": {}}, UNREADABLE),
    "a state_dict": (WEIGHTS, UNREADABLE),
    "a list": ([1, 2], UNREADABLE),
    "no tensors": (GOOD | {"tensors": {}}, "not each parameter has two moments"),
    "ragged": (GOOD | {"tensors": RAGGED}, "not each parameter has two moments"),
    "whole numbers": (GOOD | {"tensors": WHOLE}, "not all of it is numbers with a point"),
    "not finite": (GOOD | {"tensors": NAN}, "some of its numbers are not finite"),
    "step below 0": (GOOD | {"step": -5}, "its step is -5"),
    "step a word": (GOOD | {"step": "three"}, "its step is 'three'"),
    "updates below 0": (GOOD | {"updates": -1}, "after -1 updates"),
    "a layer short": (
        GOOD | {"tensors": {n: t for n, t in GOOD["tensors"].items() if n[0] != "5"}},
        "is of another model",
    ),
}


def written(path, content):
    if isinstance(content, slice):
        content = SHIPPED.read_bytes()[content]
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    return str(path)


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_is_no_checkpoint_is_refused_by_name(refused, tmp_path, what):
    content, words = FILES[what]
    file = written(tmp_path / "run.pt", content)
    refused(2, words, train, "dp=2", 6, file)
    with pytest.raises(ValueError, match=f"^{file} "):
        load_checkpoint(file)


def test_a_file_that_is_not_there_is_refused(refused, tmp_path):
    refused(2, "there is no such file", train, "dp=2", 6, str(tmp_path / "run.pt"))


@pytest.mark.parametrize("path", ["no/run.pt", "", "a_file/run.pt"])
def test_a_place_that_cannot_be_written_is_refused_before_the_first_step(
    refused, tmp_path, path
):
    (tmp_path / "a_file").touch()
    refused(2, "no such file can be written", train, "dp=2", 1, "", str(tmp_path / path))


@pytest.mark.parametrize(
    "name, steps, more",
    [
        ("steps=0", 0, {}),
        ("steps=3000", 3000, {"resume": str(SHIPPED)}),
        ("steps=20", 20, {"resume": str(SHIPPED)}),
        ("every", 2, {"every": 0}),
        ("every", 2, {"every": 1.5}),
        ("'float8'", 2, {"dtype": "float8"}),
        ("lr", 2, {"lr": "1e-3"}),
        ("lr", 2, {"lr": 0}),
        ("65 characters", 2, {"text": torch.zeros(65, dtype=torch.int64)}),
    ],
)
def test_a_run_that_cannot_be_is_refused(refused, name, steps, more):
    refused(2, ValueError(name), run, steps, more, sent="text" in more)


def run(rank, world_size, steps, more):
    return train(rank, world_size, "dp=2", steps, **more)


@pytest.mark.parametrize("plan", [None, 2, "", "dp", "dp=two", "dp=2,dp"])
def test_what_is_no_plan_is_refused(refused, plan):
    refused(2, "expected something like dp=2,tp=2", train, plan)


def test_a_plan_names_each_dimension_once(refused):
    refused(2, "plan dp=4,dp=2: a name stands there twice", train, "dp=4,dp=2")


def saved(rank, world_size, folder, plan, dtype):
    """Go on from weights without moments, with `every` above the number of steps."""
    file = os.path.join(folder, "run.pt")
    how = {"save": file, "dtype": dtype}
    losses = train(rank, world_size, plan, 3002, str(SHIPPED), every=100, **how)
    state = torch.load(file)
    return losses, state["step"], state["updates"], os.listdir(folder)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_the_last_step_is_saved_and_updates_are_counted_from_the_weights(
    ranks, tmp_path, dtype
):
    for losses, *found in ranks(2, saved, str(tmp_path), "dp=2,zero=1", dtype).results:
        assert found == [3002, 2, ["run.pt"]]
        assert len(losses) == 2 and max(losses) < 1.6


def die_while_saving(rank, world_size, file):
    """As a notebook's interrupt, which kills the ranks, but at a place that is certain."""

    save = torch.save

    def half(state, to, **options):
        if not str(getattr(to, "name", "")).endswith(".draft"):
            return save(state, to, **options)
        to.write(b"half of it")
        to.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half
    train(rank, world_size, "dp=2", 1, save=file)


def test_the_next_run_removes_the_draft_of_one_that_died_while_saving(ranks, tmp_path):
    file, others = tmp_path / "run.pt", ["run.pt.draft", "other.pt.1f.draft"]
    for name in others:
        (tmp_path / name).touch()
    with pytest.raises(RankFailed):
        ranks(2, die_while_saving, str(file))
    assert len(os.listdir(tmp_path)) == 3 and not file.exists()
    ranks(2, train, "dp=2", 1, save=str(file))
    assert sorted(os.listdir(tmp_path)) == sorted(["run.pt", *others])


def three_sequences(rank, world_size):
    inputs, targets = (part[:3] for part in batch_of(0))
    given = inputs, targets, None, cross_entropy
    return forward_backward(new_model(), mesh_of(Plan(dp=2)), *given)


def test_micro_batches_are_equal(refused):
    refused(2, ValueError("3 sequences"), three_sequences, sent=True)


@pytest.mark.parametrize(
    "words, world_size, prompt, count",
    [
        ("plan tp=3: 3 ranks cannot share 8 heads", 3, "Returns", 5),
        ("0 characters to go on from", 2, "", 5),
        ("7 characters to go on from, and -1 to write", 2, "Returns", -1),
        ("7 + 58 characters: the model sees 64", 2, "Returns", 58),
    ],
)
def test_what_cannot_be_written_is_refused(refused, words, world_size, prompt, count):
    refused(world_size, words, ask.write, new_model(), encode(prompt), count, PARTS)


@pytest.mark.parametrize("prompt", ["Returns", b"Returns", torch.ones(3), encode("a")[None]])
def test_a_prompt_that_is_no_row_of_characters_is_refused(refused, prompt):
    refused(2, "expected a row of whole numbers", ask.write, new_model(), prompt, 5, PARTS)


@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=9))
def test_what_is_encoded_is_decoded(words):
    words = f"{words}\n"
    assert decode(encode(words)) == words


@pytest.mark.parametrize("words", ["naïve", "a\tb", "€", "a\rb", "\x7f"])
def test_a_character_that_the_model_does_not_know_is_refused(words):
    with pytest.raises(ValueError, match="the model knows no "):
        encode(words)


@pytest.mark.parametrize("number", [-1, 96, 300])
def test_a_number_that_is_no_character_is_refused(number):
    with pytest.raises(ValueError, match=f"{number} is no character"):
        decode(torch.tensor([5, number]))


def test_nobody_can_change_the_text_of_others():
    first = batch_of(0)[0].clone()
    for numbers in encode("Returns"), batch_of(0)[0]:
        numbers.zero_()
    assert encode("Returns")[0] == ord("R") - 31 and torch.equal(batch_of(0)[0], first)
    with pytest.raises(ValueError, match="there is no step -1"):
        batch_of(-1)


@pytest.mark.parametrize(
    "plan, words",
    [
        ("zero=2", "zero is 0, 1 or 3"),
        ("tp=2,zero=3", "the norm would count copies twice: take zero=1, or tp=1"),
        ("dp=8,cp=4,pp=2,zero=1", "32 ranks own the 24 parameters of a stage's blocks"),
        ("dp=2,ep=2,zero=1", "with ep their experts differ: take zero=0, or ep=1"),
        ("dp=2,ep=2,zero=3", "with ep their experts differ: take zero=0, or ep=1"),
    ],
)
def test_a_kind_of_zero_that_cannot_be_is_refused(plan, words):
    with pytest.raises(ValueError, match=f"^plan {plan}: .*{words}"):
        plan_of(plan)


@pytest.mark.parametrize(
    "plan", ["ep=2", "dp=4,ep=3", "dp=2,ep=4", "dp=2,ep=0", "dp=2,ep=-1"]
)
def test_experts_are_shared_by_ranks_that_share_the_batch(plan):
    with pytest.raises(ValueError, match=f"^plan {plan}: .* ep must divide dp"):
        plan_of(plan)


def of_experts(rank, world_size, plan, experts, resume=""):
    train(rank, world_size, plan, 3001, resume, experts=experts)


@pytest.mark.parametrize(
    "plan, experts",
    [("dp=2,ep=2", 0), ("dp=2,ep=2", 3), ("dp=2", 1), ("dp=2", -2), ("dp=2", "4")],
)
def test_experts_that_ranks_cannot_share_are_refused(refused, plan, experts):
    refused(2, ValueError("experts", str(experts)), of_experts, plan, experts)


def test_a_checkpoint_has_the_experts_of_the_run(refused):
    words = "has 0 experts in each block: give experts=0"
    refused(2, words, of_experts, "dp=2,ep=2", 4, str(SHIPPED))


def test_ranks_that_share_products_do_not_write_with_experts(refused):
    words = "a model with 4 experts in each block"
    refused(2, words, ask.write, new_model(4), encode("Returns"), 5, PARTS)


def tied_over(rank, world_size, words):
    model, sizes = new_model(), plan_of(words)
    model[-1].scores.weight = model[0].character.weight
    job = build_rank(model, sizes, mesh_of(sizes), PARTS)
    return job.stage[-1].scores.weight is job.stage[0].character.weight


@pytest.mark.parametrize("words", ["pp=2", "tp=2"])
def test_a_tied_head_is_not_made_two_weights(refused, words):
    names = "0.character.weight", "5.scores.weight"
    refused(2, ValueError(*names), tied_over, words, sent=True)


def test_ranks_that_share_the_batch_keep_a_tied_head(ranks):
    assert ranks(2, tied_over, "dp=2").results == [True, True]


WORDS = "some words, and more of them, which are enough to train on. " * 20
TEXTS = {
    "short": (b"too short", "has 9 characters"),
    "latin": (("caf\u00e9 " * 300).encode("latin-1"), "is no UTF-8: save it as plain text"),
    "other letters": (("\u043c\u0438\u0440 " * 300).encode(), "the model does not know 900"),
}


@pytest.mark.parametrize("what", TEXTS)
def test_a_text_that_the_model_cannot_read_is_refused(refused, tmp_path, what):
    content, words = TEXTS[what]
    (tmp_path / "own.txt").write_bytes(content)
    refused(2, words, own_text.train_on, str(tmp_path / "own.txt"))


def test_a_text_that_is_not_there_is_refused(refused):
    refused(2, "text='no.txt': cannot be read", own_text.train_on, "no.txt")


@pytest.mark.parametrize("minutes", [0, "3"])
def test_no_time_at_all_is_refused(refused, tmp_path, minutes):
    (tmp_path / "own.txt").write_text(WORDS)
    refused(
        2,
        "expected a number above 0",
        own_text.train_on,
        str(tmp_path / "own.txt"),
        "dp=2",
        minutes,
    )


@pytest.mark.parametrize("prompt, count, warmth", [("", 5, 1), ("a", -1, 1), ("a", 5, 0)])
def test_what_cannot_be_said_is_refused(prompt, count, warmth):
    with pytest.raises(ValueError, match="expected one or more, none or more, and above 0"):
        own_text.talk("own.txt", prompt, count, warmth)
