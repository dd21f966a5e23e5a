"""What one training step costs on any number of GPUs: its seconds and its bytes.

`links.py`     what a message and a collective take, from latency and bandwidth
`machines.py`  GPUs and clusters: nominal figures, and the two numbers that are fitted
`plans.py`     models by their shape, plans that share them out, and a GPU's bytes by kind
`step.py`      the seconds of a step, by part: `predict_step` puts everything together

All times are in seconds, sizes in bytes, rates in bytes or operations per second.
"""
