"""The section on many machines is run as it is written, its nodes on this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_tutorial.distributed_sgd import sgd
from mgpu_tutorial.lab import launch
from mgpu_tutorial.processes_and_ranks.meeting import free_port

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[1] / "docs" / "machines.md"
SECTION = PAGE.read_text(encoding="utf-8").split("## On many machines")[1].split("\n## ")[0]
NODE_0, NODE_1, SLURM = re.findall(r"```(?:bash)?\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture
def machine(tmp_path):
    """The environment of a user who has activated .venv, with a folder for what is left."""
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent)])
    return os.environ | {
        "PATH": path + os.pathsep + os.environ["PATH"],
        "TMPDIR": str(tmp_path),
        "MGPU_DEVICE": "cpu",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }


@pytest.fixture(scope="module")
def expected():
    report = launch(sgd.train, 2, epochs=3, lr=0.1, timeout=120)
    return [text.splitlines() for text in report.stdout]


def start(script, environment, folder):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(["bash", "-c", script], env=environment, cwd=folder, **pipes)


def test_two_nodes_print_the_losses_of_two_ranks(machine, tmp_path, expected):
    assert "29500" in NODE_0 and NODE_0.replace("node-rank 0", "node-rank 1") == NODE_1
    port = str(free_port())
    scripts = [script.replace("29500", port) for script in (NODE_0, NODE_1)]
    nodes = [start(script, machine, tmp_path) for script in scripts]
    try:
        said = [node.communicate(timeout=100) for node in nodes]
    finally:  # a node that fails does not end the other one
        [node.kill() for node in nodes]
    for rank, (out, err) in enumerate(said):
        assert nodes[rank].returncode == 0, err
        assert out.splitlines()[:3] == expected[rank]


SRUN = """#!/bin/bash
[ "$SRUN_CPUS_PER_TASK" = "$SLURM_CPUS_PER_TASK" ] || exit 9  # else a single core: 22.05
for node in 0 1; do SLURM_NODEID=$node "$@" & done
wait
"""
SCONTROL = (
    '#!/bin/bash\n[ "$*" = "show hostnames here,there" ] && printf "localhost\\nthere\\n"\n'
)


def test_the_slurm_script_runs_two_nodes_and_saves(machine, tmp_path, expected):
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text, encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "here,there",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_NNODES": "2",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    out, err = start(SLURM, machine | slurm, tmp_path).communicate(timeout=120)
    lines = [line for line in out.splitlines() if line.startswith("rank")]
    assert sorted(lines) == sorted(expected[0] + expected[1]), err
    assert (tmp_path / "run.pt").exists()


def test_each_variable_of_the_slurm_script_is_explained():
    table = SECTION.split("| variable |")[1]
    used = set(re.findall(r"SLURM_\w+|SRUN_\w+|MASTER_\w+|OMP_\w+|RANKS", SLURM))
    assert used == {name for name in used if f"`{name}`" in table}
