"""A job beside PyTorch's debug server, which says what each rank is doing."""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import patch
from urllib.request import urlopen

import torch.distributed as dist

PAGES = "stacks", "fr_trace_json"  # where each rank is, and which calls it has made


def ask_server(
    rank: int,
    world_size: int,
    folder: str,
    ports: tuple[int, int],
    job: Callable,
    *given: Any,
) -> None:
    """Run `job` and the debug server; rank 0 saves two of its pages half a second later.

    A rank that returns waits for that, so that the server can ask it too.
    """
    from torch.distributed import debug

    # what torchrun sets
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(ports[0])}
    store = dist.TCPStore("localhost", ports[0], world_size, is_master=rank == 0)
    here = patch("socket.gethostname", return_value="localhost")  # of a laptop, too
    with here:
        debug.start_debug_server(port=ports[1], start_method="fork")

    def save_pages() -> None:
        for page in PAGES:
            text = urlopen(f"http://localhost:{ports[1]}/{page}").read()
            Path(folder, page).write_bytes(text)
        debug.stop_debug_server()
        store.set("saved", "")

    if rank == 0:
        Timer(0.5, save_pages).start()
    job(rank, world_size, *given)
    store.wait(["saved"])
