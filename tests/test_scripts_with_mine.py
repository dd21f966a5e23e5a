"""The scripts of docs/mine.md train as one process does, without the course."""

import os
import re
import subprocess
import sys
import types

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from mgpu_tutorial.lab.teach import mine
from mgpu_tutorial.processes_and_ranks.meeting import free_port
from tests.test_builds import ROOT, keep_solutions

SECTION = re.compile(r"\n## [^\n]*\n(.*?)```python\n(.*?)```", re.DOTALL)
PAGE = (ROOT / "docs/mine.md").read_text(encoding="utf-8")
SCRIPTS = SECTION.findall(PAGE)
CALL = re.compile(r'"""torchrun --nproc-per-node (\d) (\w+\.py)"""')
REFUSE = """
import sys

ABSENT = "mgpu_tutorial", "torchvision", "cloudpickle", "IPython"

class Refuse:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse)
"""
# What torchrun does for the ranks of one machine, but torch is imported once for all of them.
FORKS = """
import os, runpy, sys
import torch._dynamo, torch.distributed  # the optimizer of each rank would import the first

size, port, script = sys.argv[1:]
os.environ.update(WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
ranks = []
for rank in map(str, range(int(size))):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        runpy.run_path(script, run_name="__main__")
        sys.exit()
sys.exit(any(os.waitpid(rank, 0)[1] for rank in ranks))
"""


def one_process(model, inputs, labels, clip):
    """What the scripts print, by plain PyTorch: norms where they clip, else losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(16):
            loss = cross_entropy(model(inputs[batch]), labels[batch].flatten())
            loss.backward()
            yield clip_grad_norm_(model.parameters(), 0.5).item() if clip else loss.item()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("text", "script"), SCRIPTS, ids=[CALL.match(script)[2] for _, script in SCRIPTS]
)
def test_a_script_of_the_page_trains_as_one_process_does(
    cell, tmp_path, monkeypatch, text, script
):
    monkeypatch.setattr(mine, "FILE", tmp_path / "mine.py")
    keep_solutions(cell, *re.findall(r"notebooks/\d\d_(\w+)\.ipynb", text))
    ranks, name = CALL.match(script).groups()
    assert f"`torchrun --nproc-per-node {ranks} {name}`" in text
    (tmp_path / name).write_text(script)
    (tmp_path / "sitecustomize.py").write_text(REFUSE)
    by_torchrun = f"-m torch.distributed.run --local-addr 127.0.0.1 --nproc-per-node {ranks}"
    by_forks = ["-c", FORKS, ranks, str(free_port())]
    job = subprocess.run(
        [sys.executable, *(by_torchrun.split() if name == "ddp.py" else by_forks), name],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert job.returncode == 0, job.stderr
    monkeypatch.setitem(sys.modules, "mine", mine.run(mine.FILE.read_text()))
    made = types.ModuleType("script")
    exec(script, vars(made))
    printed = re.findall(r"(?:loss|norm) (\d\.\d+)", job.stdout)
    expected = [*one_process(*made.make(), clip="clip_grad_norm_(" in script)]
    assert [float(number) for number in printed] == pytest.approx(expected, abs=1e-10)
    for quoted in re.findall(r"^> .*(?:\n> .*)*", text, re.MULTILINE):
        refused = " ".join(quoted.replace("\n>", "").removeprefix("> ").split())
        assert job.stdout.count(refused) == int(ranks), job.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_proof_beside_it_finds_a_clip_in_the_wrong_place(cell, tmp_path, monkeypatch):
    monkeypatch.setattr(mine, "FILE", tmp_path / "mine.py")
    text, script = SCRIPTS[0]
    keep_solutions(cell, *re.findall(r"notebooks/\d\d_(\w+)\.ipynb", text))
    finish, clip = re.findall(r"( +ddp\.finish_.*\n)( +norm = clip_.*\n)", script)[0]
    (tmp_path / "ddp.py").write_text(script.replace(finish + clip, clip + finish))
    (tmp_path / "sitecustomize.py").write_text(REFUSE)
    proof = subprocess.run(
        [sys.executable, "proof.py", "2", "ddp.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    said = re.search(r"```\n(not as one process.*?)```", PAGE, re.DOTALL)[1]
    assert (proof.returncode, proof.stdout.endswith(said)) == (1, True), proof


def test_the_page_has_three_scripts():
    assert [CALL.match(script)[2] for _, script in SCRIPTS] == [
        "ddp.py",
        "dp_tp.py",
        "stage3.py",
    ]
