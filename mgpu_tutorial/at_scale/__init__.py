"""At scale: which plan for a cluster that nobody has here, and what limits it.

`planner.py`      all plans for a model and a cluster, ranked
`commands.py`     a plan as flags of Megatron-LM and torchtitan
`world.py`        the real code of a rank of 16,384, in one process
`mix.py`          the best mix of sharding and tensor parallelism, in closed form
`figures.py`      apparatus: a film, two maps, a table

From a terminal: `python -m mgpu_tutorial.at_scale --params 70e9 --gpus 512`.
"""
