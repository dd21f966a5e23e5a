"""How many bytes a rank holds at each stage of ZeRO, by formula: nothing runs here."""

from typing import NamedTuple

STAGE_NAMES = {
    0: "nothing is sharded",
    1: "optimizer state",
    2: "and gradients",
    3: "and parameters",
}


class Recipe(NamedTuple):
    """The bytes per parameter that training with Adam keeps between two steps."""

    parameters: int
    gradients: int
    optimizer: int


# two moments of 4 bytes each; in mixed precision also the master weights
FLOAT32 = Recipe(parameters=4, gradients=4, optimizer=8)
MIXED = Recipe(parameters=2, gradients=2, optimizer=12)


def held(parameters: float, ranks: int, stage: int, recipe: Recipe = MIXED) -> list[float]:
    """Bytes of parameters, gradients and optimizer state on one rank, at a stage of ZeRO."""
    return [
        parameters * recipe.parameters / (ranks if stage >= 3 else 1),
        parameters * recipe.gradients / (ranks if stage >= 2 else 1),
        parameters * recipe.optimizer / (ranks if stage >= 1 else 1),
    ]
