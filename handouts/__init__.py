"""Lecture handouts from the notebooks, from their stored outputs: build.py."""
