"""A whole training step: proved on four ranks, priced on 64 GPUs, by the same lines."""

import ast
import inspect
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.functional import cross_entropy

from mgpu_tutorial.challenges.score import Problem, require, require_own
from mgpu_tutorial.lab import span
from mgpu_tutorial.lab.draw.drawing import Drawing
from mgpu_tutorial.lab.record.trace import COLLECTIVES
from mgpu_tutorial.lab.run.launch import launch
from mgpu_tutorial.lab.teach.build import Behaviour
from mgpu_tutorial.lab.teach.source import source_of
from mgpu_tutorial.shared.cost_model.links import Link
from mgpu_tutorial.shared.price import Priced, price
from mgpu_tutorial.shared.price.machine import Machine, machine_of
from mgpu_tutorial.shared.price.models import llama, llama_3_8b
from mgpu_tutorial.shared.price.tape import Operation

RANKS, STEPS = 4, 3  # of the proof
GPUS, MEMORY = 64, 80e9
PARAMETERS, EMBEDDING = 8_030_261_248, 525_336_576  # of Llama 3 8B
FLOPS = 430.4e12  # of the products of a step on 8,192 tokens, as a test counts them
COMPUTES = 850  # ms of the same step without a message and an optimizer
# Nobody needs to send more of an embedding than a few rows: all else goes twice, in 16 bits.
SENDS = 2 * 2 * (PARAMETERS - EMBEDDING) * (GPUS - 1) / GPUS
CALLS = {*COLLECTIVES, "ReduceOp"}  # what may be used of torch.distributed


def network() -> Machine:
    """64 H100s, eight a node, with a network card of 50 Gb/s for each."""
    slow = Link(5e-6, 0.7 * 50e9 / 8)
    return machine_of(f"{GPUS} x H100")._replace(
        name=f"{GPUS} x H100 with 50 Gb/s each", between=slow
    )


class WholeSteps(Problem):
    """A data-parallel step of Llama 3 8B on GPUs of 80 GB, by its price.

    The reader's class gets the model, and a function that makes an optimizer of parameters.
    It is proved on four ranks with small models in 64 bits, against one process. Then the
    same class is priced at full size. What runs there, and did not in the proof, is refused.
    """

    chapter = "fully_shard"
    unit = "ms a step"
    must = f"train on {RANKS} ranks as one process does, with two small models"
    why = "Forward and backward of the model alone take as long."
    target = 1013
    allowed = frozenset({"distributed"})

    def other(self, rng: random.Random) -> tuple:
        heads = rng.choice([1, 3])  # so that four ranks divide few of the sizes
        per_head, inside = rng.choice([6, 10]), 2 * rng.randint(8, 15) + 1
        return rng.randint(2, 4), heads * per_head, heads, inside, rng.randint(40, 60)

    def bound(self, case: tuple) -> float:
        return COMPUTES

    def cases(self, function: Callable) -> list[tuple]:
        rng = random.Random(source_of(function))
        return [self.other(rng) for _ in range(2)]

    def ask(self, function: Callable, cases: Sequence[tuple]) -> list:
        """What the four ranks have in each case, and the price."""
        more = {"device": "cpu", "timeout": 120}
        results = launch(prove, RANKS, function, list(cases), **more).results
        proved = set().union(*(ran for _, ran in results))
        try:
            priced = price(
                *(train, GPUS, function, llama_in_16_bits, torch.optim.AdamW, 2),
                *(torch.zeros(GPUS, 2, 8193, dtype=torch.long), proved),
                machine=network(),
                timeout=300,
            )
        except (RuntimeError, ValueError) as error:
            priced = str(error)
        found = [[own[i] for own, _ in results] for i in range(len(cases))]
        return [(one, priced) for one in found]

    def play(self, case: tuple, answer: Any) -> float:
        """The price, if the ranks have what one process has."""
        ranks, priced = answer
        losses, weights = one_process(case)
        for rank, (own, whole) in enumerate(ranks):
            for step, (got, expected) in enumerate(zip(own, losses[rank], strict=True)):
                says = (
                    f"rank {rank}, step {step}: a loss of {got:.6f}, expected {expected:.6f}"
                )
                require(abs(got - expected) < 1e-6, says)
            require(
                [w.shape for w in whole] == [w.shape for w in weights],
                f"rank {rank}: weights() has other shapes than model.parameters()",
            )
            for i, (got, expected) in enumerate(zip(whole, weights, strict=True)):
                worst = (got - expected).abs().max().item()
                says = f"rank {rank}: parameter {i} is off by {worst:.1g} after {STEPS} steps"
                require(worst < 1e-6, says)
        require(isinstance(priced, Priced), f"at full size: {priced}")
        return round(1000 * priced.seconds)

    def behaviours(self) -> list[Behaviour]:
        alone, holds, _, reach = super().behaviours()

        def calls(function: Callable) -> None:
            alone(function)
            require_own(function, self.allowed, require_calls)

        def fits(function: Callable) -> None:
            (_, (_, priced)), *_ = self.answers(function)
            full = priced.fullest(0).total()
            require(full <= MEMORY, f"it holds {full / 1e9:.1f} GB at its fullest")
            kernels = [e for e in priced.tapes[0].events if isinstance(e, Operation)]
            flops = sum(kernel.flops for kernel in kernels if kernel.stream == 0)
            says = f"{flops / 1e12:.0f} teraflops in the step, expected {FLOPS / 1e12:.0f}"
            require(flops >= 0.99 * FLOPS, says)
            sent = priced.sent(0)
            says = f"{sent / 1e9:.1f} GB sent in the step, expected {SENDS / 1e9:.1f} or more"
            require(sent >= 0.99 * SENDS, says)

        calls.__doc__, holds.__doc__ = alone.__doc__, self.must
        fits.__doc__ = "hold at most 80 GB at full size, and do there all that a step needs"
        return [calls, holds, fits, reach]

    def drawing(self, function: Callable) -> Drawing:
        (_, (_, priced)), *_ = self.answers(function)
        return priced.drawing()

    def named(self, case: tuple) -> str:
        layers, width, heads, inside, words = case
        return (
            f"{layers} layers of width {width}, {heads} heads, {inside} inside, {words} words"
        )


def llama_in_16_bits() -> nn.Sequential:
    """Llama 3 8B with all its layers."""
    return llama_3_8b().to(torch.bfloat16)


def small(case: tuple) -> nn.Sequential:
    """A model of Llama's kind whose sizes four ranks don't divide, in 64 bits."""
    torch.manual_seed(0)
    layers, width, heads, inside, words = case
    return llama(layers, width, heads, inside, 1, words, sequence=16).double()


def text_of(case: tuple) -> Tensor:
    """Tokens for the proof: (ranks, steps, tokens)."""
    numbers = torch.Generator().manual_seed(case[-1])
    return torch.randint(case[-1], (RANKS, STEPS, 17), generator=numbers)


# A wrong factor of the gradient shows, because eps is large.
optimizer_of_the_proof = partial(torch.optim.AdamW, lr=0.01, eps=0.01)


def one_process(case: tuple) -> tuple[list[list[float]], list[Tensor]]:
    """The losses of each rank's sequences, and the weights after the last step."""
    model, text = small(case), text_of(case)
    optimizer = optimizer_of_the_proof(model.parameters())
    losses: list[list[float]] = [[] for _ in range(RANKS)]
    for step in range(STEPS):
        for rank in range(RANKS):
            tokens = text[rank, step : step + 1]
            loss = cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:])
            (loss / RANKS).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach() for p in model.parameters()]


def prove(rank: int, world_size: int, trainer: type, cases: Sequence[tuple]) -> tuple:
    """Of each case the losses and the weights of this rank; and which instructions ran.

    Nothing that is sent arrives before it is waited for.
    """
    found, ran = [], {}
    arrive_late()
    for case in cases:
        model_of = partial(small, case)
        more = trainer, model_of, optimizer_of_the_proof, STEPS, text_of(case)
        losses, weights, new = train(rank, world_size, *more)
        found.append(
            ([float(loss) for loss in losses], [w.detach().clone() for w in weights])
        )
        ran |= new
    return found, set(ran)


def train(
    rank: int,
    world_size: int,
    trainer: type,
    model_of: Callable[[], nn.Sequential],
    optimizer: Callable,
    steps: int,
    text: Tensor,
    proved: set | None = None,
) -> tuple[list, list[Tensor], dict]:
    """Steps on this rank's sequences: the losses, the weights, and the instructions that ran.

    Raises ValueError for an instruction that is not among the proved ones.
    """
    model, losses, weights, ran = model_of(), [], [], {}
    with watched({trainer.__module__, "__main__"}, ran):
        one = trainer(model, rank, world_size, optimizer)
        for step in range(steps):
            tokens = text[rank, step : step + 1]
            with span(f"step {step}"):
                losses.append(one.step(tokens[:, :-1], tokens[:, 1:]))
        if proved is None:
            weights = one.weights()
    new = [] if proved is None else sorted(ran.keys() - proved, key=lambda one: one[1:])
    if new:
        name, line = new[0][0], ran[new[0]]
        raise ValueError(
            f"what runs {line} lines below the `def` of `{name}` did not run in the proof on "
            "few ranks: what is priced must be what was proved"
        )
    return losses, weights, ran


@contextmanager
def watched(modules: set[str], ran: dict):
    """Note each instruction of these modules' functions that runs: (name, line, place)."""

    def called(frame, event, argument):
        if frame.f_globals.get("__name__") not in modules:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    def inside(frame, event, argument):
        if event == "opcode":
            code = frame.f_code
            place = code.co_name, code.co_firstlineno, frame.f_lasti
            ran[place] = (frame.f_lineno or code.co_firstlineno) - code.co_firstlineno
        return inside

    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(None)


class Late:
    """A call that is made when it is waited for: nothing has arrived before."""

    def __init__(self, call: Callable) -> None:
        self.call: Callable | None = call

    def wait(self, *_: Any) -> bool:
        call, self.call = self.call, None
        if call:
            call()
        return True

    def is_completed(self) -> bool:
        return self.call is None


def arrive_late() -> None:
    """Let each asynchronous collective of this process run when it is waited for."""

    def late(original: Callable) -> Callable:
        signature = inspect.signature(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if not given.pop("async_op", False):
                return original(**given)
            return Late(partial(original, **given))

        return call

    for name in COLLECTIVES:
        if original := getattr(c10d, name, None):
            setattr(c10d, name, late(original))
            setattr(dist, name, getattr(c10d, name))


def require_calls(text: str) -> None:
    """AssertionError for anything of torch.distributed but `dist.` and a collective."""
    tree = ast.parse(text)
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and "distributed" in ast.unparse(node):
            raise AssertionError("write `import torch.distributed as dist`")
        if isinstance(node, ast.Import):
            fine = [a.name != "torch.distributed" or a.asname == "dist" for a in node.names]
            require(all(fine), "write `import torch.distributed as dist`")
        if isinstance(node, ast.Attribute):
            is_door = node.attr in ("distributed", "ops")
            require(not is_door, f"`{node.attr}`: write `dist.`, where the judge looks")
            if isinstance(node.value, ast.Name) and node.value.id == "dist":
                says = f"`dist.{node.attr}` has no price here: use collectives of all ranks"
                require(node.attr in CALLS, says)
                inside.add(node.value)
    bare = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "dist" and node not in inside
    ]
    require(not bare, "`dist` is only for calls, such as `dist.all_reduce`")
