"""The zoo: each script of docs/zoo runs, and each page shows its numbers and what sees it."""

import os
import re
import runpy
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
ZOO = ROOT / "docs" / "zoo"
NAMES = sorted(path.stem for path in ZOO.glob("*.py"))
TEXTS = {path.stem: path.read_text("utf-8") for path in ZOO.glob("*.md")}
WAYS = {"one process": ("right", 0, 1), "wrong": ("wrong",), "right": ("right",)}
TESTS = "the loss", "one process", "copies", "twice the ranks"
RANDOM = "dropout_masks"  # its numbers are other ones on other ranks
ALIKE = "bfloat16_sum"  # one process of it is as wrong
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def all_jobs(rank, ranks, names):
    """By name and way: the loss that is logged, and what this rank has found."""
    torch.set_default_dtype(torch.float64)
    rows = {}
    for name in names:
        job = runpy.run_path(str(ZOO / f"{name}.py"), run_name="zoo")["job"]
        for way, (how, *alone) in WAYS.items():
            loss, found = job(how, *(alone or (rank, ranks)))
            logged = loss.clone()
            dist.all_reduce(logged)
            rows[name, way] = logged.item() / ranks, found
    return rows


@pytest.fixture
def run(ranks):
    """What each rank has of a job, on some ranks."""

    def rows(size, name, way):
        report = ranks(size, all_jobs, NAMES, timeout=110)
        return [own[name, way] for own in report.results]

    return rows


def far(found, right):
    return ((found - right).norm() / right.norm()).item()


def block_of(name):
    """What the page says that `python NAME.py` prints."""
    return re.search(rf"```\n\$ python {name}\.py\n(.*?)```", TEXTS[name], re.DOTALL)[1]


def verdicts_of(name):
    """By test: does it see the fault? So says the page."""
    rows = re.findall(
        r"^\| ([a-z ]+) \| (\*\*yes\*\*|no) \| .+ \|$", TEXTS[name], re.MULTILINE
    )
    return {test: said != "no" for test, said in rows}


def numbers_in(text):
    return [float(number) for number in NUMBER.findall(text)]


@pytest.mark.parametrize("name", NAMES)
def test_the_right_way_is_that_of_one_process(run, name):
    (loss, right), *_ = run(2, name, "one process")
    for own_loss, found in run(2, name, "right"):
        assert own_loss == pytest.approx(loss)
        if name != RANDOM and found is not None:  # a stage of a pipeline has its layers
            assert far(found, right) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_what_its_script_computes(run, name):
    lines = block_of(name).splitlines()
    assert [line[:12].strip() for line in lines] == list(WAYS)
    _, right = run(2, name, "one process")[0]
    for line, way in zip(lines, WAYS, strict=True):
        loss, found = run(2, name, way)[0]
        expected = [loss, found.norm().item(), 100 * far(found, right)]
        if name == RANDOM:
            expected = [loss, 16, found.std().item()]
        assert numbers_in(line[12:]) == pytest.approx(expected, rel=1e-3, abs=0.06), line


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_which_test_sees_its_fault(run, name):
    (loss, right), *_ = run(2, name, "one process")
    wrong, twice = run(2, name, "wrong"), run(4, name, "wrong")
    own_loss, found = wrong[0]
    norm = found.norm().item()
    seen = {
        "the loss": own_loss != pytest.approx(loss, rel=1e-9),
        "one process": far(found, right) > 1e-9,
        "copies": any(
            not torch.equal(other, found) for _, other in wrong if other is not None
        ),
        "twice the ranks": twice[0][1].norm().item() != pytest.approx(norm, rel=1e-9),
    }
    if name in {RANDOM, ALIKE}:  # what differs is chance, or rounding
        seen = dict.fromkeys(TESTS, False)
    assert verdicts_of(name) == seen


def test_the_index_has_each_fault_and_what_its_page_says():
    table = re.findall(r"^\| \[(.+)\]\((\w+)\.md\) \|(.+)\|$", TEXTS["README"], re.MULTILINE)
    assert sorted(name for _, name, _ in table) == NAMES
    seen = dict.fromkeys(TESTS, 0)
    for title, name, cells in table:
        assert TEXTS[name].startswith(f"# {title}\n")
        said = [cell.strip() == "yes" for cell in cells.split("|")[1:]]
        assert said == list(verdicts_of(name).values()), name
        for test, yes in zip(TESTS, said, strict=True):
            seen[test] += yes
    words = " ".join(TEXTS["README"].split())
    shows = re.search(
        r"The loss shows (\d+) of (\d+), .* one process shows (\d+), twice the ranks (\d+), "
        r"and the copies (\d+)\.",
        words,
    )
    loss, one, copies, twice = seen.values()
    assert list(map(int, shows.groups())) == [loss, len(NAMES), one, twice, copies]
    assert f"## {len(NAMES)} faults" in TEXTS["README"]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_all_its_parts(name):
    text = TEXTS[name]
    headings = ["What it costs", "Which test sees it", "Is it yours?"]
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == headings
    assert re.search(
        rf"^\*.+\*\n\n\[All faults\]\(README\.md\) · \[the script\]\({name}\.py\)",
        text,
        re.DOTALL | re.MULTILINE,
    )
    story = text.split("```")[0]
    assert re.search(r"\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)", story)
    wrong, right = re.findall(r"```python\n# (?:wrong|right)\n(.*?)```", text, re.DOTALL)
    assert wrong != right
    assert len(wrong.splitlines()) <= 4 and len(right.splitlines()) <= 4
    for block in (wrong, right):
        compile(block, name, "exec")
    assert tuple(verdicts_of(name)) == TESTS


@pytest.mark.parametrize("name", TEXTS)
def test_links_of_a_page_lead_to_files(name):
    for link in re.findall(r"\]\(([^)#\s]+)", TEXTS[name]):
        assert link.startswith("https://") or (ZOO / link).is_file(), link


def test_scripts_differ_in_their_job_alone():
    """What starts the ranks and prints is the same text, but for the line that prints."""
    frames = set()
    for name in NAMES:
        text = (ZOO / f"{name}.py").read_text("utf-8")
        assert len(text.splitlines()) <= 70, name
        assert f"{name}.md" in text.splitlines()[0]
        frame = text[text.index('if __name__ == "__main__":') :]
        frames.add(re.sub(r'print\(f"\{how:12\} [^\n]+"\)', "print()", frame))
    assert len(frames) == 1, frames


def environment_of(process):
    try:
        return process.environ().values()
    except psutil.Error:
        return ()


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["-m", "torch.distributed.run", "--nproc-per-node=2"]])
def test_a_script_starts_its_ranks_and_leaves_none(how):
    name, mark = "token_means", uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, *how, f"{name}.py"],
        cwd=ZOO,
        env={"PATH": os.environ["PATH"], "MARK": mark},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == block_of(name)
    assert not [
        process for process in psutil.process_iter() if mark in environment_of(process)
    ]


def wrong_job(rank, ranks, name):
    """As the script does it under proof.py."""
    torch.set_default_dtype(torch.float64)
    runpy.run_path(str(ZOO / f"{name}.py"), run_name="zoo")["job"]("wrong", rank, ranks)


PROVED = {
    name: found[1]
    for name, text in TEXTS.items()
    if (
        found := re.search(
            r"`, with \[proof\.py\]\(\.\./prove\.md\), says:\n\n```\n(.*?)```",
            text,
            re.DOTALL,
        )
    )
}


@pytest.mark.parametrize("name", PROVED)
def test_a_page_quotes_what_proof_says(proved, name):
    said = str(proved(2, wrong_job, name, dtype=None))
    assert said.strip() == PROVED[name].strip()
