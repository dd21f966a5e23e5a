"""The set-up's choice of PyTorch: the build for CPUs where no GPU is, if it can be had."""

import os
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tools import torch_build

pytestmark = pytest.mark.slow  # it asks in an interpreter of its own

NOBODY = "http://127.0.0.1:9"  # the port for what is thrown away: nobody listens there


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index on this machine that has a page for torch."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "index.html").write_text("torch-2.13.0+cpu")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("gpu", [True, False])
def test_the_build_for_cpus_is_taken_where_no_gpu_is_or_who_asks(index, monkeypatch, gpu):
    monkeypatch.setattr(torch_build, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(sys, "platform", "linux")
    found, said = torch_build.choose("", index)
    assert found == ("" if gpu else index) and ("TORCH_BUILD=cuda" in said) is not gpu
    assert torch_build.choose("cuda", index) == ("", "")
    assert torch_build.choose("cpu", index)[0] == index
    monkeypatch.setattr(sys, "platform", "darwin")
    assert torch_build.choose("", index) == ("", "")


def test_an_index_that_does_not_answer_or_has_no_torch_is_left_out_and_named(index):
    for absent in (NOBODY, f"{index}/other"):
        found, said = torch_build.choose("cpu", absent)
        assert found == "" and absent in said and "does not answer" in said


@pytest.mark.parametrize("works", [True, False])
def test_nvidia_smi_is_believed_if_it_finds_a_gpu(tmp_path, monkeypatch, works):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nexit {0 if works else 9}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    device = any(Path("/dev").glob("nvidia[0-9]*"))
    assert torch_build.has_nvidia_gpu() is (works or device)
