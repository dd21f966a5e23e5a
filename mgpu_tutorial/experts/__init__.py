"""Experts: a router sends each token to a few of many perceptrons, on other ranks too."""
