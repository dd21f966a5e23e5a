"""At scale: which plan for a cluster that nobody has here, and what limits it.

`planner.py`      all plans for a model and a cluster, ranked
`world.py`        the real code of a rank of 16,384, in one process
`hierarchy.py`    an all-reduce that knows which ranks share a node
`fewer.py`        models averaged every few steps, instead of gradients in every one
`figures.py`      apparatus: a film, and tables

The cost model is `mgpu_tutorial/shared/cost_model/`. From a terminal:
`python -m mgpu_tutorial.at_scale --params 70e9 --gpus 512`.
"""
