"""Survival: a run goes on after a death, to the same bits, and on fewer ranks too.

elastic.py     a training script for torchrun that goes on from its last checkpoint
accidents.py   a process that is killed, at a step or at any call
order.py       the samples of a step, which don't depend on the number of ranks
shards.py      a checkpoint of parts, saved while the training goes on
figures.py     apparatus: two nodes under torchrun, many deaths, a table
builds.py      what the reader's functions must do
"""
