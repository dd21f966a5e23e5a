"""The progress bar shows while the ranks work, and is gone from what is stored."""

import time

import IPython.display

from mgpu_tutorial.lab import launch, status
from mgpu_tutorial.lab.run import progress as bar
from mgpu_tutorial.lab.run import server


def slow(rank, world_size):
    for step in range(8):
        status(f"loss < {step}")
        time.sleep(0.1)


class Screen(list):
    """What IPython would show, one after the other."""

    def display(self, data, **how):
        self.append(data)
        return self

    update = display


def test_in_a_notebook_the_bar_moves_and_then_leaves_nothing(monkeypatch):
    monkeypatch.setattr(bar, "notebook_kernel", lambda: True)
    monkeypatch.setattr(bar, "AFTER", 0.2)
    monkeypatch.setattr(IPython.display, "display", (screen := Screen()).display)
    launch(slow, 2)
    blank, *shown, last = screen
    assert blank == bar.BLANK and last == {}
    first, *_, latest = [data["text/html"] for data in shown]
    assert "the ranks are at work" in latest and first != latest
    assert all(f"rank {rank}</b> loss &lt; " in latest for rank in (0, 1))


def test_the_first_launch_says_what_it_waits_for(monkeypatch):
    monkeypatch.setattr(bar, "notebook_kernel", lambda: True)
    monkeypatch.setattr(bar, "AFTER", 0)
    monkeypatch.setattr(server, "_warm", set())
    monkeypatch.setattr(IPython.display, "display", (screen := Screen()).display)
    server.await_server()
    blank, *shown, last = screen
    assert blank == bar.BLANK and last == {}
    assert all("the fork server imports PyTorch" in data["text/html"] for data in shown)
