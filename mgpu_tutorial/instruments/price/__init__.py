"""What your own worker would take at full size, on a machine that is not here.

`tape.py`     runs a worker as a pretended rank and notes what it computes, sends and holds
`products.py` the operations of every form of product
`ddp.py`      PyTorch's own DDP, with what it sends
`machine.py`  "8 x H100": what a kernel and a call take there, from `cost_model`
`replay.py`   the tapes on a machine: clocks for streams and links
`pricing.py`  `price(worker, 8, …, machine="8 x H100")`, and its result
`picture.py`  the timeline of a rank, and its memory under it
`sliders.py`  `explore`: bandwidth, latency, tokens, ranks; `explore.js` is theirs on a page
`models.py`   models of full size in one line; `small_and_large.py` trains one

What it carries: the count of operations is that of the formulas, so are the bytes of FSDP's
messages, and memory is what tensors hold. What products reach of the peak differs between
programs from 44 to 69%, and no tape tells it: `fit` it to one step of your own program.
Then published rows come out within 4%, one program's on H100s within 10%
(`benchmarks/price.md`), on other numbers of GPUs no better than by the null guess. Not seen:
kernels that a compiler fuses (a norm is taped as several, which newer PyTorch fuses on a
GPU), kernels worse than the share, congestion, late ranks, processors that NCCL takes, and
what the allocator reserves beside what tensors hold.

    from mgpu_tutorial.shared.small_and_large import LARGE, large, train
    price(train, 8, BucketedDDP, large, LARGE, machine="8 x H100")
"""

from mgpu_tutorial.instruments.price.machine import Machine
from mgpu_tutorial.instruments.price.models import llama_3_8b
from mgpu_tutorial.instruments.price.pricing import Priced, fit, price
from mgpu_tutorial.instruments.price.sliders import explore
from mgpu_tutorial.shared.cost_model.links import Link
