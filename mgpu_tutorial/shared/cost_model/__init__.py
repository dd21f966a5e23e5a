"""What one training step costs on any number of GPUs: its seconds and its bytes.

`links.py`     what a message and a collective take, from latency and bandwidth
`machines.py`  GPUs and clusters: nominal figures, and the two numbers that are fitted
`models.py`    transformers by their shape: parameters and floating-point operations
`plans.py`     how a model and its batch are shared out over the ranks
`memory.py`    the bytes of a GPU, by kind
`step.py`      the seconds of a step, by part: `predict_step` puts everything together
`fitting.py`   the two numbers of a GPU from published or own measurements
`failures.py`  how often a run should save itself

All times are in seconds, sizes in bytes, rates in bytes or operations per second.
"""
