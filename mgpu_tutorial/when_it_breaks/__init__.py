"""When it breaks: find the fault of a job with the engineers' tools.

jobs.py      jobs with one fault each, and a tool that finds a bad card
data.py      what these jobs read; it has its own share in the faults
record.py    a job with a time limit, which leaves a flight record behind
"""
