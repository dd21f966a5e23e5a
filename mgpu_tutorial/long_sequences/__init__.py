"""Long sequences: the ranks share the tokens of one sequence, and meet in its attention."""
