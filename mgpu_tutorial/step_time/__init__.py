"""How long a training step takes, on paper: from a plan and data sheets to seconds.

`plain.py`        the step from seven numbers, and a link's two from two measurements
`published.py`    steps that others have measured, the fit to some, and our predictions
`figures.py`      apparatus: tables and pictures
"""
