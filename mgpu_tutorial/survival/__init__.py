"""Survival: a run goes on after a death, to the same bits, and on fewer ranks too.

elastic.py     a training script that goes on from its last checkpoint, and can be killed
order.py       the samples of a step, which don't depend on the number of ranks
figures.py     apparatus: two nodes under torchrun, many deaths, a table
builds.py      what the reader's functions must do
"""
