"""Survival: a run goes on after a death, to the same bits, and on fewer ranks too."""
