"""Show source, check answers, move a slider."""
