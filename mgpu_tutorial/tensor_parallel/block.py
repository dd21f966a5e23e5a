"""A block of a transformer, its layers on several ranks, and what must be the same on all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.nn.utils.parametrize import is_parametrized

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.shared.models import MLP
from mgpu_tutorial.shared.parameters import fingerprint
from mgpu_tutorial.tensor_parallel.layers import (
    ColumnParallelLinear,
    Group,
    RowParallelLinear,
    Shard,
)


class Attention(nn.Module):
    """Each token looks at itself and those before it; (batch, sequence, width) both ways."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads cannot share {width} features evenly")
        self.per_head = width // heads
        self.qkv = nn.Linear(width, 3 * width)  # head by head: query, key, value
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.per_head))
        # each (batch, heads, sequence, per head)
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(-2))
        mixed = self.attend(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """Attention, then an MLP; each takes the normed input and adds its output to x."""

    def __init__(self, width: int = 48, heads: int = 12) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


PLAN = {
    "attention.qkv": ColumnParallelLinear,
    "attention.out": RowParallelLinear,
    "mlp.up": ColumnParallelLinear,
    "mlp.down": RowParallelLinear,
}


def parallelize(model: nn.Module, plan: dict[str, type], group: Group = None) -> nn.Module:
    """Replace the layers whose names end as the plan says, each by one of that kind.

    From columns to rows each column, or head, must stay alone: a GLU or softmax over columns
    is refused in a Sequential, and in a forward nobody sees it. Where one layer makes
    queries, keys and values, they stand head by head, as in Attention. `clip_grad_norm_`
    would take another norm on each rank: the squares of shards add up over the ranks. Dropout
    behind rows must draw the same on all ranks, and behind columns another mask on each.
    """
    for name, kind, layer in planned(model, plan, group):
        model.set_submodule(name, kind(layer, group))
    return model


def planned(
    model: nn.Module, plan: dict[str, type], group: Group
) -> list[tuple[str, type, nn.Module]]:
    """The layers that a plan names, and their kinds; ValueError where it does not fit.

    Nothing is sent, so ranks whose models differ, as by another seed, are not found here:
    call `copies_that_differ` after it.
    """
    ranks, modules = dist.get_world_size(group), dict(model.named_modules())
    rows = []
    # each name in the plan has a layer, and no layer is cut twice
    for ending, kind in plan.items():
        fitting = [name for name in modules if f".{name}".endswith(f".{ending}")]
        if not fitting:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in modules if name}))
            raise ValueError(f"no layer's name ends with {ending!r}; names end with {known}")
        rows += [(name, kind, modules[name]) for name in fitting]
    if any(isinstance(p, Shard) for _, _, layer in rows for p in layer.parameters()):
        raise ValueError("a layer of the plan has shards already: cut a model once")
    cut = {name for name, _, _ in rows}
    # a rank has whole heads
    for name, _, layer in rows:
        path, _, child = name.rpartition(".")
        per_head = getattr(modules[path], "per_head", None)
        if per_head and isinstance(layer, nn.Linear):
            features = layer.weight.shape[1 if child == "out" else 0]
            heads = features // (3 * per_head if child == "qkv" else per_head)
            if heads % ranks:
                raise ValueError(f"{ranks} ranks cannot share {heads} heads evenly: {path}")
    # between columns and rows nothing mixes the columns, and no shard has a twin
    kinds = {name: kind for name, kind, _ in rows}
    require_unmixed(modules, kinds)
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name and cut & {n.rpartition(".")[0] for n in (name, other)}:
            raise ValueError(
                f"{other} and {name} are one parameter, and their shards would be two: "
                f"make the model without tied weights"
            )
    # no module reads a weight past its layer, and each layer is a plain product
    for name, layer in modules.items():
        own = f"{name}.out_proj".lstrip(".")
        if isinstance(layer, nn.MultiheadAttention) and own in cut:
            raise TypeError(
                f"{name or 'the model'} is a MultiheadAttention, which reads the weights "
                "itself and would sum nothing: write the attention with layers of its own"
            )
        if isinstance(layer, nn.TransformerEncoderLayer) and any(
            one.startswith(f"{name}.") or not name for one in cut
        ):
            raise TypeError(
                f"{name or 'the model'} is a TransformerEncoderLayer, whose fast path in "
                "eval() reads the weights itself and would sum nothing: write the block "
                "with layers of its own, as new_block does"
            )
    for name, kind, layer in rows:
        if not isinstance(layer, nn.Linear | nn.Embedding):
            raise TypeError(
                f"{name} is a {type(layer).__name__}, of which {kind.__name__} cannot be "
                "made: a plan names layers that are products or embeddings"
            )
        require_plain(name, kind, layer)
    require_rows(modules, kinds)
    return rows


MIXING = nn.GLU, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm
MIXING += nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d


def require_rows(modules: dict[str, nn.Module], kinds: dict[str, type]) -> None:
    """ValueError where columns have no rows beside them: nobody would add up what they make.

    Beside means in the same module, or in the one that holds the columns' Sequential.
    """
    for name, kind in kinds.items():
        home = name.rpartition(".")[0]
        while home and isinstance(modules[home], nn.Sequential | nn.ModuleList):
            home = home.rpartition(".")[0]
        beside = (
            other for n, other in kinds.items() if f".{n}".startswith(f".{home}.") or not home
        )
        if is_kind("Column", kind) and not any(is_kind("Row", other) for other in beside):
            raise ValueError(
                f"{name} is cut by columns, and nothing in {home or 'the model'} by rows: "
                "each rank would go on with its share of the features; name a "
                "RowParallelLinear too"
            )


def is_kind(word: str, kind: type) -> bool:
    """True for a kind of columns or rows; a reader's own is known by its name."""
    return any(word in base.__name__ for base in kind.__mro__)


def require_unmixed(modules: dict[str, nn.Module], kinds: dict[str, type]) -> None:
    """ValueError where a Sequential mixes columns before the ranks have added up the rows."""
    for path, row in modules.items():
        columns = ""
        for number, layer in row.named_children() if isinstance(row, nn.Sequential) else ():
            name = f"{path}.{number}".lstrip(".")
            if name in kinds:
                columns = name if is_kind("Column", kinds[name]) else ""
            elif columns and (isinstance(layer, MIXING) or is_own(layer)):
                raise ValueError(
                    f"{name} is a {type(layer).__name__}, which mixes the columns of "
                    f"{columns} or learns from all of them, and each rank has only some: "
                    "leave those layers whole"
                )


def is_own(layer: nn.Module) -> bool:
    """True for a leaf that has parameters, as a PReLU or a BatchNorm has."""
    return not list(layer.children()) and any(True for _ in layer.parameters())


def require_plain(name: str, kind: type, layer: nn.Module) -> None:
    """TypeError for a layer that does more than its product: `kind` would leave that out."""
    plain = type(layer).forward in (nn.Linear.forward, nn.Embedding.forward)
    hooks = (len(found(layer)) for found in borrowed.HOOKS)
    if not plain or is_parametrized(layer) or any(hooks):
        raise TypeError(
            f"{name} is a {type(layer).__name__} with a forward, a hook or a parametrization "
            f"of its own, which {kind.__name__} would leave out: make it a plain layer, or "
            "cut it yourself"
        )


def copies(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that every rank has whole, by name."""
    return {n: p for n, p in model.named_parameters() if not isinstance(p, Shard)}


def copies_that_differ(model: nn.Module, group: Group = None) -> list[str]:
    """The copies whose bits differ between ranks; all ranks of the group call it.

    Raises ValueError, on every rank, where the ranks have copies of other names or shapes.
    """
    mine = {
        name: (tuple(p.shape), fingerprint(nn.ParameterList([p])))
        for name, p in copies(model).items()
    }
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    require_same_copies(everyone)
    return [name for name in mine if len({other[name] for other in everyone}) > 1]


def require_same_copies(everyone: list[dict[str, tuple]]) -> None:
    """ValueError where ranks have copies of other names or shapes than rank 0."""
    shapes = [{name: shape for name, (shape, _) in copies.items()} for copies in everyone]
    for rank, other in enumerate(shapes):
        for name in sorted(shapes[0].keys() | other.keys()):
            here, there = shapes[0].get(name, "missing"), other.get(name, "missing")
            if here != there:
                raise ValueError(
                    f"the copy `{name}` is {here} on rank 0 and {there} on rank {rank}: only "
                    "one and the same model on all ranks can be compared"
                )


def whole_of(tensor: torch.Tensor | None, parameter: nn.Parameter) -> torch.Tensor:
    """Put together what all ranks have of `parameter`: its values, or its gradient."""
    if tensor is None:
        raise ValueError("this parameter has no gradient: is it frozen, or unused?")
    if not isinstance(parameter, Shard):
        return tensor.detach()
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(parameter.group))]
    dist.all_gather(every, tensor.detach().contiguous(), group=parameter.group)
    return torch.cat(every, parameter.cut)


def new_block() -> Block:
    """A block of width 48 with twelve heads, in float64; the same on every rank."""
    torch.manual_seed(0)
    return Block().double()


def gradients_of(block: Block, step: int = 0) -> torch.Tensor:
    """Forward and backward of a batch that all ranks have; returns the loss."""
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, 4, 12, 48, generator=generator, dtype=torch.float64)
    loss = mse_loss(block(x), target)
    loss.backward()
    return loss.detach()
