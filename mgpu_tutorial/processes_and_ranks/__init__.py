"""Processes and ranks: what starts, what it is called, and how the ranks find each other."""
