"""Point to point: one rank sends, one rank receives, both wait for each other."""
