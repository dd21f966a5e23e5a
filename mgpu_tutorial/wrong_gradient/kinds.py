"""What a tensor is along the ranks of a tp group, and what its gradient must then be."""

DUALS = {
    "replicated": "partial",
    "partial": "replicated",
    "varying": "varying",
    "invariant": "invariant",
}
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
    if kind not in DUALS:
        raise ValueError(f"{kind!r} is no kind: expected one of {', '.join(DUALS)}")
    return DUALS[kind]
