"""A whole training step: proved on four ranks, priced on 64 GPUs, and watched there."""

import ast
import inspect
import random
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.functional import cross_entropy
from torch.utils.weak import WeakIdKeyDictionary

from mgpu_tutorial.challenges.score import Problem, asked, require, require_own, returned
from mgpu_tutorial.instruments.price import Priced, price
from mgpu_tutorial.instruments.price.machine import Machine, machine_of
from mgpu_tutorial.instruments.price.models import llama, llama_3_8b
from mgpu_tutorial.instruments.price.tape import Operation, tensors_of
from mgpu_tutorial.lab import borrowed, span
from mgpu_tutorial.lab.draw.drawing import Drawing
from mgpu_tutorial.lab.record.trace import COLLECTIVES
from mgpu_tutorial.lab.run.launch import launch
from mgpu_tutorial.lab.teach.build import Behaviour
from mgpu_tutorial.lab.teach.source import source_of
from mgpu_tutorial.shared.cost_model.links import Link, all_gather_seconds

RANKS, STEPS = 4, 3  # of the proof
GPUS, MEMORY = 64, 80e9
PARAMETERS, EMBEDDING = 8_030_261_248, 525_336_576  # of Llama 3 8B
LAYERS = 32
FLOPS = 430.4e12  # of the products of a step on 8,192 tokens, as a test counts them
# Of an embedding a few rows can be enough. All else goes twice, in 16 bits: the gradients to
# where they are added, and the new parameters back.
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
    same class is priced at full size, where nothing may touch what is on its way.
    """

    chapter = "fully_shard"
    unit = "ms a step"
    must = f"train on {RANKS} ranks as one process does, with two small models"
    why = "The link is never idle, and carries no more than gradients and parameters."
    target = 1013
    sends = True

    def other(self, rng: random.Random, layers: int = 0) -> tuple:
        heads = rng.choice([1, 3])  # so that four ranks divide few of the sizes
        per_head, inside = rng.choice([6, 10]), 2 * rng.randint(8, 15) + 1
        few = rng.randint(2, 4)
        return layers or few, heads * per_head, heads, inside, rng.randint(40, 60)

    def bound(self, case: tuple) -> float:
        """Milliseconds of the link, in one call for all gradients and one for the rest."""
        to = network()
        half = SENDS / 2 * GPUS / (GPUS - 1)
        size = GPUS, to.per_node, to.inside, to.between
        return int(2 * 1000 * all_gather_seconds(half, *size))

    def cases(self, function: Callable) -> list[tuple]:
        rng = random.Random(source_of(function))
        return [self.other(rng), self.other(rng, LAYERS)]

    def ask(self, function: Callable, cases: Sequence[tuple]) -> list:
        """What the four ranks have in each case, what one process has, and the price."""
        more = {"device": "cpu", "timeout": 120}
        ranks = returned(launch, prove, RANKS, function, list(cases), **more).results
        (right,) = launch(references, 1, list(cases), backend="none", **more).results
        priced = priced_step(function)
        return [(found, one, priced) for *found, one in zip(*ranks, right, strict=True)]

    def play(self, case: tuple, answer: Any) -> float:
        """The price in whole milliseconds."""
        *_, priced = answer
        require(isinstance(priced, Priced), f"at full size: {priced}")
        return round(1000 * priced.seconds)

    def compare(self, ranks: Sequence[tuple], losses: list, weights: list[Tensor]) -> None:
        """AssertionError unless the ranks have what one process has."""
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

    def behaviours(self) -> list[Behaviour]:
        alone, _, _, reach = super().behaviours()

        def calls(function: Callable) -> None:
            require_own(function, self.sends, require_calls)

        def proved(function: Callable) -> None:
            for case, (ranks, one, _) in self.answers(function):
                try:
                    self.compare(ranks, *one)
                except AssertionError as error:
                    raise AssertionError(f"{self.named(case)}: {error}") from None

        def fits(function: Callable) -> None:
            (_, (*_, priced)), *_ = self.answers(function)
            require(isinstance(priced, Priced), f"at full size: {priced}")
            full = priced.fullest(0).total()
            require(full <= MEMORY, f"it holds {full / 1e9:.1f} GB at its fullest")
            kernels = [e for e in priced.tapes[0].events if isinstance(e, Operation)]
            flops = sum(kernel.flops for kernel in kernels if kernel.stream == 0)
            says = f"{flops / 1e12:.0f} teraflops in the step, expected {FLOPS / 1e12:.0f}"
            require(flops >= 0.99 * FLOPS, says)
            sent = priced.sent(0)
            says = f"{sent / 1e9:.2f} GB sent in the step, expected {SENDS / 1e9:.2f} or more"
            require(sent >= SENDS - 1e6, says)

        calls.__doc__, proved.__doc__ = alone.__doc__, self.must
        fits.__doc__ = "hold at most 80 GB at full size, and do there all that a step needs"
        return [calls, proved, fits, reach]

    def drawing(self, function: Callable) -> Drawing:
        """The priced step; `build.picture` asks for no more than that, and proves nothing."""
        answers = asked.get((self, function))
        priced = answers[0][1][-1] if answers else priced_step(function)
        require(isinstance(priced, Priced), f"at full size: {priced}")
        return priced.drawing()

    def named(self, case: tuple) -> str:
        layers, width, heads, inside, words = case
        return (
            f"{layers} layers of width {width}, {heads} heads, {inside} inside, {words} words"
        )


def priced_step(trainer: type) -> Priced | str:
    """The second step at full size, or why it has no price."""
    try:
        return price(
            *(watched, GPUS, trainer, llama_in_16_bits, torch.optim.AdamW, 2),
            torch.zeros(GPUS, 2, 8193, dtype=torch.long),
            machine=network(),
            timeout=300,
        )
    except (RuntimeError, ValueError) as error:
        return str(error)


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


def references(rank: int, world_size: int, cases: Sequence[tuple]) -> list[tuple]:
    """What one process has in each case, in a rank, whose one thread is soon done."""
    return [one_process(case) for case in cases]


def prove(rank: int, world_size: int, trainer: type, cases: Sequence[tuple]) -> list[tuple]:
    """Of each case the losses and the weights of this rank.

    Nothing that is sent arrives before it is waited for.
    """
    found = []
    arrive_late()
    for case in cases:
        model_of = partial(small, case)
        more = trainer, model_of, optimizer_of_the_proof, STEPS, text_of(case)
        one, losses = train(rank, world_size, *more)
        weights = [w.detach().clone() for w in one.weights()]
        found.append(([float(loss) for loss in losses], weights))
    return found


def train(
    rank: int,
    world_size: int,
    trainer: type,
    model_of: Callable[[], nn.Sequential],
    optimizer: Callable,
    steps: int,
    text: Tensor,
) -> tuple[Any, list]:
    """Steps on this rank's sequences: the trainer after them, and the losses."""
    one, losses = trainer(model_of(), rank, world_size, optimizer), []
    for step in range(steps):
        tokens = text[rank, step : step + 1]
        with span(f"step {step}"):
            losses.append(one.step(tokens[:, :-1], tokens[:, 1:]))
    return one, losses


def watched(rank: int, world_size: int, *given: Any) -> None:
    """The steps, where a kernel raises RuntimeError that touches what is on its way."""
    with Watching() as watching:
        watching.calls()
        train(rank, world_size, *given)


class Watching(borrowed.dispatch_mode.thing):
    """Knows which memory a message is reading or writing, and looks at each kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by storage: the flights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        makes_new = "empty" in name or name.startswith("new_") or name.endswith("_like")
        if func.namespace == "aten" and not makes_new:
            known = borrowed.schema_of(func).arguments
            named = dict(zip((one.name for one in known), args, strict=False)) | kwargs
            for one in known:
                self.look(name, one.alias_info, named.get(one.name))
        return func(*args, **kwargs)

    def look(self, kernel: str, alias: Any, value: Any) -> None:
        """RuntimeError for an argument that a message is writing, or this kernel changes."""
        if alias is not None and not alias.is_write:
            return  # a view, which reads nothing
        for tensor in tensors_of(value):
            for call, is_input in self.under_way.get(tensor.untyped_storage(), {}).values():
                if alias is not None or not is_input:
                    does = "changes" if alias is not None else "reads"
                    raise RuntimeError(
                        f"`{kernel}` {does} what `{call}` still has on its way: wait first"
                    )

    def calls(self) -> None:
        """Let each asynchronous collective of this process note its memory until a wait."""

        def noted(name: str, original: Callable) -> Callable:
            signature = inspect.signature(original)

            @wraps(original)  # `span` finds the tape by its attributes
            def call(*args: Any, **kwargs: Any) -> Any:
                work = original(*args, **kwargs)
                given = signature.bind(*args, **kwargs).arguments
                if not given.get("async_op"):
                    return work
                lists = {"tensor_list", "gather_list"} & given.keys()
                for argument, value in given.items():
                    is_input = argument.startswith("input") or argument == "scatter_list"
                    is_input |= bool(lists) and argument == "tensor"
                    for tensor in tensors_of(value):
                        flights = self.under_way.setdefault(tensor.untyped_storage(), {})
                        flights[id(work)] = name, is_input
                return Landing(work, self.under_way)

            return call

        for name in COLLECTIVES:
            if original := getattr(dist, name, None):
                setattr(dist, name, noted(name, original))


class Landing:
    """The handle of a call whose memory is free again after a wait."""

    def __init__(self, work: Any, under_way: WeakIdKeyDictionary) -> None:
        self.work, self.under_way = work, under_way

    def wait(self, *given: Any) -> bool:
        for flights in self.under_way.values():
            flights.pop(id(self.work), None)
        return self.work.wait(*given)

    def is_completed(self) -> bool:
        return self.work.is_completed()


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
