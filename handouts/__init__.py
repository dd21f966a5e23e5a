"""Lecture handouts from the notebooks: PDF for students and instructors, HTML, slides.

`make handouts` builds all of them from the stored outputs; see build.py.
"""
