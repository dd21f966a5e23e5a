"""How long a training step takes, on paper: from a plan and data sheets to seconds.

`plain.py`        the step from seven numbers, and a link's two from two measurements
`published.py`    steps that others have measured, with plan and source
`predictions.py`  the same steps by the cost model, and by the null guess
`figures.py`      apparatus: tables and pictures

The full cost model is `mgpu_tutorial/shared/cost_model/`.
"""
