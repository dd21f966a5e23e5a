"""When it breaks: find the fault of a job with the engineers' tools, and a run that survives.

jobs.py      eight jobs of two to four ranks, each with one fault
data.py      what these jobs read; it has its own share in the faults
record.py    a job with a time limit, which leaves a flight record behind
elastic.py   a training script for torchrun that goes on after a restart
interval.py  how often to save: a run with failures drawn by lot
figures.py   apparatus: runs torchrun, reads its output and the flight records, and knows
             where the fault of each job is, for the checks
"""
