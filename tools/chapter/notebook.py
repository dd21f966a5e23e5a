# %% markdown
# # New topic
#
# (navigation)
#
# **You will be able to** say what a mean over ranks is. List here what the reader can do at the end, with verbs.
#
# **You need** (before). No GPU. About 30 minutes.

# %%
from mgpu_tutorial import new_topic as ch
from mgpu_tutorial.lab import check, launch, sequence_chart, show_source

# %% markdown
# ## 1. One call
#
# Every rank has a number, its own rank. All of them need the mean. We begin with what the reader knows, and show the worker that does it. A section goes predict, run, explain, change.

# %%
show_source(ch.mean)

# %% markdown
# **Predict.** Four ranks: which number does each return?

# %%
launch(ch.mean, 4)

# %% markdown
# Each returns 1.5, for `all_reduce` leaves the sum on every rank, and each divides it by the world size. What we saw is explained after the cell, in a sentence or two. The reader then changes something: try three ranks.
#
# ## 2. Who waits
#
# A chart of the recorded run shows who calls what, and who waits for whom.
#
# **Predict.** Which of three ranks can go on before the others have called?

# %% {"handout": {"caption": "All ranks call, and none goes on alone."}}
report = launch(ch.mean, 3, trace=True)
sequence_chart(report)

# %% markdown
# None: every rank needs a number of each other rank, so `all_reduce` returns when all have called.
#
# ## 3. A mistake
#
# A mistake that people meet in practice is run too, safely, and its error is read together. Here rank 0 does not take part.

# %%
show_source(ch.one_stays_away)

# %% markdown
# **Predict.** What does rank 1 do?

# %% {"tags": ["raises-exception"]}
launch(ch.one_stays_away, 2, timeout=10)

# %% markdown
# It waits for ever. The launcher sees that rank 0 has ended, and says so instead of waiting with it. A collective is called by all ranks or by none.
#
# ## Same answer as one process?
#
# One process adds up the same numbers without sending anything. The ranks must return exactly that.

# %%
alone = sum(range(3)) / 3
print(launch(ch.mean, 3).results, alone)
assert launch(ch.mean, 3).results == [alone] * 3

# %% markdown
# ## Exercises
#
# **1.** How many ranks must there be for a mean of 2?

# %% {"tags": ["exercise"]}
ranks = ...
check(lambda: launch(ch.mean, ranks).results[0], 2.0, hint="half of the last rank")

# %% {"tags": ["solution"], "jupyter": {"source_hidden": true, "outputs_hidden": true}}
# Solution (click to open)
ranks = 5
check(lambda: launch(ch.mean, ranks).results[0], 2.0)

# %% markdown
# **2.** Write a worker that returns the largest number of all ranks on every rank. (The last rank does not hold it.)

# %% {"tags": ["exercise"]}
import torch
import torch.distributed as dist


def largest(rank, world_size):
    number = torch.tensor([float(rank % 3)])
    return ...


check(lambda: launch(largest, 4), [2.0, 2.0, 2.0, 2.0])


# %% {"tags": ["solution"], "jupyter": {"source_hidden": true, "outputs_hidden": true}}
# Solution (click to open)
def largest(rank, world_size):
    number = torch.tensor([float(rank % 3)])
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return number.item()


check(lambda: launch(largest, 4), [2.0, 2.0, 2.0, 2.0])

# %% markdown
# ## Summary
#
# - A mean over ranks is a sum over ranks, divided by how many there are.
# - What a collective does can be written with send and recv, and drawn.
# - All ranks call a collective, or none.
#
# ## Next
#
# [The contents](../README.md) list all notebooks.
