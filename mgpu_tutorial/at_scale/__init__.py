"""At scale: a step predicted by parts, and the plan for a cluster that nobody has here.

`published.py`    steps that others have measured, with plan and source
`predictions.py`  the same steps by the cost model, and how far off it is
`world.py`        the real code of a rank of 16,384, in one process
`planner.py`      all plans for a model and a cluster, ranked
`failures.py`     how often it breaks, and how often one should save
`hierarchy.py`    an all-reduce that knows which ranks share a node
`questions.py`    twenty-five estimates, with answers
`figures.py`       apparatus: tables, and two nodes that are timed and counted

The cost model itself is `mgpu_tutorial/shared/cost_model/`. From a terminal:
`python -m mgpu_tutorial.at_scale --params 70e9 --gpus 512`.
"""
