"""The set-up's choice of PyTorch: the build for CPUs where no GPU is, if it can be had."""

import os
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tools import torch_build

ROOT = Path(__file__).parents[2]
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


@pytest.fixture(params=[True, False], ids=["gpu", "no gpu"])
def gpu(request, monkeypatch):
    monkeypatch.setattr(torch_build, "has_nvidia_gpu", lambda: request.param)
    monkeypatch.setattr(sys, "platform", "linux")
    return request.param


def test_without_a_gpu_the_build_for_cpus_is_taken_and_said(index, gpu):
    found, said = torch_build.choose("", index)
    assert found == ("" if gpu else index)
    assert ("build for CPUs" in said and "TORCH_BUILD=cuda" in said) is not gpu


def test_on_macos_there_is_nothing_to_choose(index, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert torch_build.choose("", index) == ("", "")


def test_who_asks_gets_the_build_with_any_machine(index, gpu):
    assert torch_build.choose("cuda", index) == ("", "")
    assert torch_build.choose("cpu", index)[0] == index


def test_an_index_that_does_not_answer_is_left_out_and_named(gpu):
    found, said = torch_build.choose("cpu", NOBODY)
    assert found == "" and NOBODY in said and "does not answer" in said


def test_an_index_without_a_page_for_torch_is_left_out(index):
    assert torch_build.answers(index) and not torch_build.answers(f"{index}/other")


@pytest.mark.parametrize("works", [True, False])
def test_nvidia_smi_is_believed_if_it_finds_a_gpu(tmp_path, monkeypatch, works):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nexit {0 if works else 9}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    files = [p for p in Path("/dev").iterdir() if p.name in ("nvidia0", "nvidia1")]
    assert torch_build.has_nvidia_gpu() is (works or bool(files))


@pytest.mark.fresh
def test_make_gets_the_index_alone_and_the_user_the_sentence(index):
    run = subprocess.run(
        [sys.executable, "tools/torch_build.py", "cpu"],
        env={**os.environ, "TORCH_CPU_INDEX": index},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout) == (0, f"{index}\n")
    assert run.stderr == "PyTorch's build for CPUs is installed.\n"
