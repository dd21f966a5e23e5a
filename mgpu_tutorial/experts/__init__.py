"""Experts: a router sends each token to a few of many MLPs, on other ranks too."""
