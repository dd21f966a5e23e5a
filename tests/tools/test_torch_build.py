"""The set-up's choice of PyTorch: the build for CPUs where no GPU is, if it can be had."""

import sys

import pytest

from tools import torch_build


@pytest.mark.parametrize("gpu", [True, False])
def test_the_build_for_cpus_is_taken_where_no_gpu_is_or_who_asks(monkeypatch, gpu):
    asked = []
    monkeypatch.setattr(torch_build, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(torch_build, "succeeds", lambda *words, **_: asked.append(words) or 1)
    monkeypatch.setattr(sys, "platform", "linux")
    found, said = torch_build.choose("", "index")
    assert found == ("" if gpu else "index") and ("TORCH_BUILD=cuda" in said) is not gpu
    assert torch_build.choose("cuda", "index") == ("", "")
    assert torch_build.choose("cpu", "index")[0] == "index"
    assert {words[-1] for words in asked} == {"index/torch/"}
    monkeypatch.setattr(sys, "platform", "darwin")
    assert torch_build.choose("", "index") == ("", "")


@pytest.mark.slow  # it asks in an interpreter of its own
def test_an_index_that_does_not_answer_is_left_out_and_named():
    nobody = "http://127.0.0.1:9"  # the port for what is thrown away: nobody listens there
    found, said = torch_build.choose("cpu", nobody)
    assert found == "" and nobody in said and "does not answer" in said
