"""At scale: which plan for a cluster that nobody has here, and what limits it.

`questions.py`    twenty-five estimates, with worked answers
`planner.py`      all plans for a model and a cluster, ranked
`world.py`        the real code of a rank of 16,384, in one process
`pretend.py`      one process as one rank of a large world
`failures.py`     how often it breaks, and what that costs
`hierarchy.py`    an all-reduce that knows which ranks share a node
`figures.py`      apparatus: a film, and tables

The cost model is `mgpu_tutorial/shared/cost_model/`. From a terminal:
`python -m mgpu_tutorial.at_scale --params 70e9 --gpus 512`.
"""
