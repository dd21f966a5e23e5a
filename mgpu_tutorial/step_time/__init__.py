"""How long a training step takes, on paper: from a plan and data sheets to seconds.

`plain.py`        the step from seven numbers, and a link's two from two measurements
`published.py`    steps that others have measured, with plan and source, and our predictions
`figures.py`      apparatus: tables and pictures

The full cost model is `mgpu_tutorial/shared/cost_model/`.
"""
