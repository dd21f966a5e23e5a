"""The machine: what a device, a node and a cluster are made of, and what a step takes there.

`plain.py`   the roofline, a replay of a step, and the threshold of data parallelism
`laptop.py`  measures this machine: the two roads through it, and the road between its ranks
`memory.py`  a step of one GPU, with four ways to keep what backward needs
`together.py` a step of several GPUs, whose gradients travel during backward
"""
