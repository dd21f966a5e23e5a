"""python -m mgpu_tutorial and torchrun run the same workers as the notebooks."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mgpu_tutorial
from mgpu_tutorial import CHAPTERS
from mgpu_tutorial.__main__ import listing, main, workers_of

BIN = Path(sys.executable).parent
PACKAGE = Path(mgpu_tutorial.__file__).parent


@pytest.mark.slow
def test_a_worker_runs_from_the_command_line():
    command = [sys.executable, "-m", "mgpu_tutorial", "point_to_point.blocking"]
    done = subprocess.run(
        [*command, "--ranks", "2"], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0 and done.stdout.splitlines() == [
        "rank 0 │ before: 1",
        "rank 0 │ after:  1",
        "rank 1 │ before: 0",
        "rank 1 │ after:  1",
    ]


@pytest.mark.slow
def test_the_same_worker_runs_under_torchrun(tmp_path):
    command = [BIN / "torchrun", "--nproc-per-node", "2", "--standalone"]
    command += ["--local-addr", "127.0.0.1"]  # the machine's name may lead nowhere
    command += ["--log-dir", tmp_path]  # else torchrun leaves a folder behind
    done = subprocess.run(
        [*command, "-m", "mgpu_tutorial", "point_to_point.blocking"],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [
        "after:  1",
        "after:  1",
        "before: 0",
        "before: 1",
    ]


@pytest.mark.parametrize("words", [["name=MAX"], ["--name", "MAX"], ["--name=MAX"]])
def test_arguments_are_name_and_value(words, capsys):
    assert main(["collectives.calls.reduce_with", *words, "--ranks", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"rank {r} │ returned 3.0" for r in range(3)]


@pytest.mark.parametrize(
    "words, says, code",
    [
        (["nowhere.worker"], "no chapter 'nowhere'; there are: processes_and_ranks,", 2),
        (["point_to_point.nothing"], "no worker 'nothing' in point_to_point; there are:", 2),
        (["point_to_point.blocking", "5"], "'5' is not name=value or --name value", 2),
        (["point_to_point.blocking", "--delay"], "'--delay' is not name=value or", 2),
        (["point_to_point.blocking", "--ranks", "0"], "world_size must be from 1", 2),
        (["point_to_point.late_receiver"], "missing a required argument: 'delay'", 1),
        (
            ["distributed_sgd.train", "--epochs", "x"],
            "--epochs takes a number of type int",
            2,
        ),
        (["distributed_sgd.train", "lr=0.1e"], "--lr takes a number of type float", 2),
        (["distributed_sgd.train", "--epochs", "1.5"], "--epochs takes a number of type", 2),
        (["point_to_point.blocking", "--world_size", "3"], "world_size is no argument", 2),
        (["point_to_point.blocking", "--worker", "3"], "worker is no argument", 2),
    ],
)
def test_a_mistake_gets_one_line(words, says, code, capsys):
    assert main(words) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("words", [["--bogus"], ["--ranks", "3"], ["--timeout=5"]])
def test_options_without_a_worker_are_refused(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "name a worker before its options" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--ranks=5", "--device=cpu", "--timeout=9"])
def test_what_torchrun_decides_is_refused_under_it(option, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(SystemExit):
        main(["point_to_point.blocking", option])
    said = f"{option.split('=')[0]} is for a launch without torchrun"
    assert said in capsys.readouterr().err


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == mgpu_tutorial.__version__


def test_the_list_has_every_worker_with_its_docstring():
    lines = listing().splitlines()
    assert lines[0].startswith("processes_and_ranks: Processes and ranks")
    for chapter in CHAPTERS:
        for name, worker in workers_of(chapter).items():
            first = worker.__doc__.splitlines()[0]
            assert f"    {name}  {first}" in lines


def test_the_list_has_what_stands_in_a_folder():
    """Read from the files: every public function whose first arguments are a rank's."""
    written = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        module = module.removesuffix(".__init__")
        if module.split(".")[0] in CHAPTERS:
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                taken = [a.arg for a in node.args.args] if hasattr(node, "args") else []
                if taken[:2] == ["rank", "world_size"] and not node.name.startswith("_"):
                    written.add(f"{module}.{node.name}")
    assert written == {name for chapter in CHAPTERS for name in workers_of(chapter)}
    assert len(written) > 80
