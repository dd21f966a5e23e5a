"""When it breaks: find the fault of a job with the engineers' tools.

jobs.py      eight jobs of two to four ranks, each with one fault
data.py      what these jobs read; it has its own share in the faults
record.py    a job with a time limit, which leaves a flight record behind
jumps.py     four trainings whose loss jumps, and a tool that finds a bad card
figures.py   apparatus: runs torchrun, reads its output and the flight records, and knows
             where the fault of each job is, for the checks
builds.py    what the reader's tool must do
"""
