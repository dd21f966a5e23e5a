"""The set-up's choice of PyTorch: the build for CPUs where no GPU is, if it can be had."""

import sys

import pytest

from tools import torch_build


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("answers", [True, False])
def test_the_build_for_cpus_is_taken_where_no_gpu_is_or_who_asks(monkeypatch, gpu, answers):
    monkeypatch.setattr(torch_build, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(torch_build, "succeeds", lambda *words, **_: answers)
    monkeypatch.setattr(sys, "platform", "linux")
    index = "index" if answers else ""
    assert torch_build.choose("", "index")[0] == ("" if gpu else index)
    assert torch_build.choose("cpu", "index")[0] == index
    assert torch_build.choose("cuda", "index") == ("", "")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert torch_build.choose("", "index") == ("", "")
