"""The set-up: which PyTorch is asked for, what is said meanwhile and after a failure."""

import re
import subprocess
import sys

import pytest

from tools import install


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("offers", [True, False])
def test_the_build_for_cpus_is_taken_where_no_gpu_is_or_who_asks(
    monkeypatch, gpu, answers, offers
):
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(install, "succeeds", lambda *words: answers)
    monkeypatch.setattr(
        install, "pip_offers", lambda version: offers and version == "2.0+cpu"
    )
    monkeypatch.setattr(sys, "platform", "linux")
    own = ["torch==2.0+cpu", "torchvision"] if offers else []
    cpu = ["--extra-index-url", "index", "torch", "torchvision"] if answers else own
    assert install.choose("", "index", "2.0")[0] == ([] if gpu else cpu)
    assert install.choose("cpu", "index", "2.0")[0] == cpu
    assert ("gigabytes" in install.choose("cpu", "index", "2.0")[1]) == (cpu == [])
    assert install.choose("cuda", "index", "2.0") == ([], "")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert install.choose("", "index", "2.0") == ([], "")


def test_pip_is_asked_for_the_very_version(monkeypatch):
    said = "torch (2.1.0)\nAvailable versions: 2.1.0, 2.0.1+cpu, 2.0.1\n"
    answer = subprocess.CompletedProcess([], 0, stdout=said)
    monkeypatch.setattr(subprocess, "run", lambda *words, **how: answer)
    assert install.pip_offers("2.0.1+cpu") and not install.pip_offers("2.0.1+cp")
    assert not install.pip_offers("2.1.0+cpu")


def test_a_slow_installer_gives_signs_of_life(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(install, "LOG", tmp_path / "pip.log")
    monkeypatch.setattr(install, "PATIENCE", 0.2)
    slow = "import time; print('Downloading torch', flush=True); time.sleep(1)"
    assert install.run([sys.executable, "-c", slow]) == 0
    assert re.search(r"^ +\d+ s: Downloading torch$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("uv", [None, "/bin/false"])
def test_where_no_way_works_the_last_error_is_said(monkeypatch, tmp_path, uv):
    monkeypatch.setattr(install, "LOG", tmp_path / "pip.log")
    monkeypatch.setattr(install.shutil, "which", lambda name: uv)
    monkeypatch.setenv("USE_UV", "1")
    with pytest.raises(SystemExit, match="ERROR: .*no-such-package-x.* All of it: .*pip.log"):
        install.install("--no-index", "no-such-package-x")
