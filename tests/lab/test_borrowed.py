"""The private names of others: each exists, and only one module knows them."""

import ast
from pathlib import Path

import pytest

import mgpu_tutorial
from mgpu_tutorial.lab import borrowed

PACKAGE = Path(mgpu_tutorial.__file__).parent
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
TABLE = [p.place for p in vars(borrowed).values() if isinstance(p, borrowed.Private)]
ATTRIBUTES = [  # that functions of the module read or set, the last one a notebook
    "multiprocessing.forkserver:_forkserver._forkserver_pid",
    "multiprocessing.forkserver:_forkserver._forkserver_address",
    "torch.distributed._functional_collectives:all_reduce",
    "torch.distributed._functional_collectives:all_gather_tensor",
    "torch.distributed._functional_collectives:reduce_scatter_tensor",
    "torch:Tensor._version",
    "torch:ops.aten.add.Tensor._schema",
    "torch:_C._distributed_c10d._dump_fr_trace",
    "torch.distributed.distributed_c10d:_world.pg_group_ranks",
    "torch.distributed.rendezvous:TCPStore",
    "torch.distributed.tensor.experimental._context_parallel._attention:custom_ops",
    "torch.cuda:_parse_visible_devices",
]
PUBLIC = {
    *("_exit", "_getframe", "_current_frames"),  # documented by Python
    *("_asdict", "_replace", "_fields"),  # of a NamedTuple, documented
    *("_repr_html_", "_repr_mimebundle_", "_render_traceback_", "_repr_svg_"),  # IPython's
    "_dynamo",  # a module's name that people do write
}


@pytest.mark.parametrize("place", [*TABLE, *ATTRIBUTES])
def test_a_borrowed_name_exists(place):
    borrowed.Private(place).thing  # noqa: B018  raises where there is none


def private_names(path: Path) -> set[str]:
    """The names with an underscore that a module takes from others."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            # what a module sets on its own objects, it may read on them
            if isinstance(node.ctx, ast.Store) or of_own:
                defined.add(node.attr)
            else:
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("mgpu"):
            found.update((node.module or "").split("."), (a.name for a in node.names))
        elif isinstance(node, ast.Import):
            found.update(part for a in node.names for part in a.name.split("."))
    private = {n for n in found if n.startswith("_") and not n.startswith("__")}
    return private - defined - PUBLIC


@pytest.mark.parametrize("module", MODULES)
def test_only_one_module_knows_private_names(module):
    assert bool(private_names(PACKAGE / module)) == (module == "lab/borrowed.py")
