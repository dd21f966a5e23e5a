"""The scripts of docs/mine.md train as one process does, without the course."""

import os
import re
import subprocess
import sys
import types
from importlib.util import find_spec

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from mgpu_tutorial.lab.teach import mine
from mgpu_tutorial.processes_and_ranks.meeting import free_port
from tests.test_builds import ROOT, keep_solutions

SECTION = re.compile(r"\n## [^\n]*\n(.*?)```python\n(.*?)```", re.DOTALL)
PAGE = (ROOT / "docs/mine.md").read_text(encoding="utf-8")
SCRIPTS = SECTION.findall(PAGE)
CALL = re.compile(r'"""torchrun --nproc-per-node (\d) (\w+\.py)"""')
TEXTS = [text for text, _ in SCRIPTS]
NAMES = [CALL.match(script)[2] for _, script in SCRIPTS]
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


def one_process(name, model, tokens):
    """What the scripts print, by plain PyTorch: norms where they clip, else losses."""
    rate = 1e-2 if name == "stage3.py" else 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    for step, batch in enumerate(order.split(16), 1):
        loss = model(input_ids=tokens[batch], labels=tokens[batch]).loss
        loss.backward()
        clips = name != "dp_tp.py"
        yield clip_grad_norm_(model.parameters(), 0.5).item() if clips else loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if name == "stage3.py":
            optimizer.param_groups[0]["lr"] = rate / (1 + step)


def run_script(folder, name, ranks):
    """The script under torchrun, where the course is not installed; the job that ended."""
    by_torchrun = f"-m torch.distributed.run --local-addr 127.0.0.1 --nproc-per-node {ranks}"
    by_forks = ["-c", FORKS, ranks, str(free_port())]
    return subprocess.run(
        [sys.executable, *(by_torchrun.split() if name == "ddp.py" else by_forks), name],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def folder(cell, tmp_path, monkeypatch):
    """A folder with the reader's library, and what stands for Transformers if need be."""
    monkeypatch.setattr(mine, "FILE", tmp_path / "mine.py")
    keep_solutions(cell, *re.findall(r"notebooks/\d\d_(\w+)\.ipynb", "".join(TEXTS)))
    (tmp_path / "sitecustomize.py").write_text(REFUSE)
    if not find_spec("transformers"):
        stand_in = ROOT / "tests/transformers_stand_in.py"
        (tmp_path / "transformers.py").write_text(stand_in.read_text())
        monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("transformers", None)


def made_by(folder, script, monkeypatch):
    """Model and data of a script, in this process."""
    monkeypatch.setitem(sys.modules, "mine", mine.run(mine.FILE.read_text()))
    script_module = types.ModuleType("script")
    exec(script, vars(script_module))
    return script_module.make()


def numbers_in(printed):
    return [float(number) for number in re.findall(r"(?:loss|norm) (\d\.\d+)", printed)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("text", "script"), SCRIPTS, ids=NAMES)
def test_a_script_of_the_page_trains_as_one_process_does(folder, monkeypatch, text, script):
    ranks, name = CALL.match(script).groups()
    assert f"`torchrun --nproc-per-node {ranks} {name}`" in text
    (folder / name).write_text(script)
    job = run_script(folder, name, ranks)
    assert job.returncode == 0, job.stderr
    expected = [*one_process(name, *made_by(folder, script, monkeypatch))]
    assert numbers_in(job.stdout) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_run_of_the_page_goes_on_as_one_that_lived(folder, monkeypatch):
    script = SCRIPTS[NAMES.index("stage3.py")][1]
    dies = "import os; (step, rank) == (4, 1) and os.kill(os.getpid(), 9)"
    (folder / "stage3.py").write_text(
        script.replace("state = {", f"{dies}\n        state = {{")
    )
    first = run_script(folder, "stage3.py", "2")
    assert first.returncode != 0
    (folder / "stage3.py").write_text(script)
    second = run_script(folder, "stage3.py", "2")
    assert second.stdout.startswith("step 4:"), second.stderr
    model, tokens = made_by(folder, script, monkeypatch)
    expected = [*one_process("stage3.py", model, tokens)]
    assert numbers_in(second.stdout) == pytest.approx(expected[3:], abs=1e-6)
    trained = type(model).from_pretrained(folder / "trained", config=model.config)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(
            trained.state_dict()[name].double(), value, rtol=0, atol=1e-6
        )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_proof_beside_it_finds_ranks_that_read_the_same_samples(folder):
    (folder / "ddp.py").write_text(SCRIPTS[0][1].replace("batches(rank,", "batches(0,"))
    proof = subprocess.run(
        [sys.executable, "proof.py", "2", "ddp.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    said = re.search(r"```\n(not as one process.*?)```", PAGE, re.DOTALL)[1]
    assert (proof.returncode, said in proof.stdout) == (1, True), proof


def test_the_page_has_three_scripts():
    assert NAMES == ["ddp.py", "stage3.py", "dp_tp.py"]
