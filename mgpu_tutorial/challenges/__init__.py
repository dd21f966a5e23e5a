"""Open problems with a score: an interface, what must hold, a target, and a bound.

`score.py`      a problem, its judge, and the best scores, kept beside `mine.py`
`messages.py`   the problems after part I
`batches.py`    those after part II
`models.py`     those after part III
`together.py`   those after part IV
`builds.py`     all of them by name
`figures.py`    the picture of an answer
`solutions.py`  what we reach: open it last

    python -m mgpu_tutorial challenges             problems, targets, own scores
    python -m mgpu_tutorial challenges FOLDER      the table of a class
"""
