"""Who is where: a box for each node, in it a process for each GPU with its two numbers."""

from mgpu_tutorial.lab.colours import colour
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing

COLUMN, GAP, TOP = 104, 24, 62  # pixels: a GPU's width, between nodes, above the nodes
NODE = 178  # pixels: the height of a node


def cluster_map(nodes: int, gpus: int) -> Drawing:
    """Draw `nodes` machines with `gpus` GPUs each, one process per GPU.

    Ranks are counted through all nodes, local ranks begin at 0 on each. The local rank
    is also the number of the GPU. As text, one line per node.
    """
    _at_least_one(nodes=nodes, gpus=gpus)
    inside = COLUMN * gpus + 12
    width = GAP + (inside + GAP) * nodes
    machines = f"{_count(nodes, 'node')} with {_count(gpus, 'GPU')} each"
    title = f"{machines}: world size {nodes * gpus}"
    lines = [title, *(_line(node, gpus) for node in range(nodes))]
    drawing = Drawing(width, TOP + NODE + 20, "\n".join(lines), f"{title}, one rank per GPU")
    drawing.label(GAP, 24, title, 15, anchor="start", weight="bold")
    for node in range(nodes):
        x = GAP + (inside + GAP) * node
        if node:
            drawing.line(x - GAP, TOP + NODE / 2, x, TOP + NODE / 2, INK, 3)
        drawing.box(x, TOP, inside, NODE, FAINT, "#f4f4f4")
        drawing.label(x + 8, TOP - 8, f"node {node}", 14, anchor="start", weight="bold")
        for local_rank in range(gpus):
            left = x + 6 + COLUMN * local_rank
            _process_and_gpu(drawing, left, node * gpus + local_rank, local_rank)
    return drawing


def _process_and_gpu(drawing: Drawing, x: float, rank: int, local_rank: int) -> None:
    """A process above, the GPU that it drives below, a line between them."""
    middle = x + COLUMN / 2
    drawing.box(x + 6, TOP + 14, COLUMN - 12, 78, colour(rank), width=4)
    drawing.label(middle, TOP + 38, "process", 14)
    drawing.label(middle, TOP + 58, f"rank {rank}", 16, weight="bold")
    drawing.label(middle, TOP + 78, f"local rank {local_rank}", 14)
    drawing.line(middle, TOP + 94, middle, TOP + 124)
    drawing.box(x + 14, TOP + 124, COLUMN - 28, 38, INK, "#dddddd", radius=0)
    drawing.label(middle, TOP + 148, f"cuda:{local_rank}", 15)


def _line(node: int, gpus: int) -> str:
    ranks = ", ".join(f"{node * gpus + local} on cuda:{local}" for local in range(gpus))
    return f"node {node}: rank {ranks}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _at_least_one(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
