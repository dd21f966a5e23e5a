"""What a tensor is along the ranks of a tp group, and what its gradient must then be."""

RULES = {  # what an operation makes of a kind; a pair that is not here is a mistake
    ("norm", "invariant"): "invariant",
    ("f", "invariant"): "replicated",
    ("columns", "replicated"): "varying",
    ("gelu", "varying"): "varying",
    ("rows", "varying"): "partial",
    ("g", "partial"): "invariant",
    ("bias", "invariant"): "invariant",
}


def dual(kind: str) -> str:
    """The kind of the gradient of a tensor of this kind; ValueError for another word."""
    duals = {"replicated": "partial", "partial": "replicated"}
    duals |= {"varying": "varying", "invariant": "invariant"}
    if kind not in duals:
        raise ValueError(f"{kind!r} is no kind")
    return duals[kind]
