"""python -m mgpu_tutorial and torchrun run the same workers as the notebooks."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mgpu_tutorial
from mgpu_tutorial import CHAPTERS
from mgpu_tutorial import __main__ as command_line
from mgpu_tutorial.__main__ import arguments_of, find, listing, main
from mgpu_tutorial.data_partitioning import rank_indices
from mgpu_tutorial.lab.run import progress
from mgpu_tutorial.lab.run.errors import Interrupted

BIN = Path(sys.executable).parent
PACKAGE = Path(mgpu_tutorial.__file__).parent


def test_a_worker_runs_from_the_command_line(capsys):
    assert main(["point_to_point.messages.blocking"]) == 0
    assert capsys.readouterr().out.startswith("rank 0 │ before: 1\nrank 0 │ after:")


@pytest.mark.slow
def test_a_worker_runs_under_torchrun(tmp_path):
    command = [BIN / "torchrun", "--nproc-per-node", "2", "--standalone"]
    command += ["--local-addr", "127.0.0.1"]  # the machine's name may lead nowhere
    command += ["--log-dir", tmp_path]  # else torchrun leaves a folder behind
    command += ["-m", "mgpu_tutorial", "point_to_point.messages.blocking"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    said = ["after:  1", "after:  1", "before: 0", "before: 1"]
    assert sorted(line.split("│ ")[-1] for line in done.stdout.splitlines()) == said


def test_arguments_are_name_and_value(capsys):
    words = "data_partitioning.rank_indices --samples 4 --seed=1 --epoch 0 --drop-last False"
    assert main([*words.split(), "--ranks", "3"]) == 0
    parts = [rank_indices(rank, 3, 4, 1, 0, False) for rank in range(3)]
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"rank {rank} │ returned {part}" for rank, part in enumerate(parts)]


@pytest.mark.parametrize(
    "words, says, code",
    [
        ("nowhere.worker", "no 'nowhere.worker', but processes_and_ranks, point_to", 2),
        ("point_to_point.nothing", "'point_to_point.nothing', but point_to_point.", 2),
        ("point_to_point.messages.blocking 5", "unrecognized arguments: 5", 2),
        ("point_to_point.messages.blocking --delay", "unrecognized arguments: --delay", 2),
        ("point_to_point.messages.blocking --ranks 0", "world_size must be a whole", 2),
        ("point_to_point.messages.late_receiver", "missing 1 required positional", 1),
        ("mixed_precision.precision.train_scaled", "needs a function as end_of_step", 2),
        ("ddp_in_practice.practice.step_in_parts --method x --micro 2", "as method,", 2),
        ("point_to_point.messages.into_buffer --sent x", "needs a Tensor as sent", 2),
        ("point_to_point.messages.into_buffer", "needs a Tensor as sent", 2),
        ("comparison.training.draw_share --step 0", "needs a Pictures as data, which", 2),
        ("the_machine.laptop.products --sizes 64", "unrecognized arguments: --sizes 64", 2),
        ("collectives.calls.reduce_with --name sum", "has no attribute 'sum'", 1),
        ("distributed_sgd.sgd.train --epochs x", "--epochs: invalid int value: 'x'", 2),
        ("language_model.train --plan dp=x", "dp=x", 2),
        ("language_model.train --parts x", "unrecognized arguments: --parts x", 2),
        (
            "data_partitioning.rank_indices --drop-last maybe",
            "True or False is expected, got 'maybe'",
            2,
        ),
        ("--ranks 3", "the following arguments are required: worker", 2),
        ("torchrun point_to_point.messages.blocking --device=a", "--device is for a la", 2),
    ],
)
def test_a_mistake_gets_one_line(words, says, code, capsys, monkeypatch):
    if words.startswith("torchrun "):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    try:
        assert main(words.removeprefix("torchrun ").split()) == code
    except SystemExit as refused:
        assert refused.code == code
    *usage, line = capsys.readouterr().err.splitlines()
    assert says in line and all("Traceback" not in line for line in usage)


def test_what_the_ranks_had_printed_before_one_failed_is_shown(capsys):
    assert main(["point_to_point.messages.blocking", "--ranks", "1", "--timeout", "1.5"]) == 1
    assert capsys.readouterr().out.startswith("rank 0 │ before: 1\n")


@pytest.mark.parametrize("word, last", [("no", 2), ("False", 2), ("yes", 1), ("1", 1)])
def test_a_truth_is_read_as_one(word, last, capsys):
    words = "data_partitioning.rank_indices --samples 5 --seed 1 --epoch 0 --drop-last"
    assert main([*words.split(), word, "--ranks", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    parts = [ast.literal_eval(line.split("returned ")[1]) for line in lines]
    assert [len(part) for part in parts] == [last] * 3


def test_a_worker_that_takes_minutes_has_them(monkeypatch):
    given = []
    monkeypatch.setattr(command_line, "launch", lambda *_, **how: given.append(how))
    words = ["language_model.own_text.train_on", "--text", "story.txt"]
    assert main(words) == main([*words, "--minutes", "10"]) == 0
    assert main([*words, "--timeout", "5"]) == 0
    assert [how["timeout"] for how in given] == [280, 700, 5]


def test_help_behind_a_worker_is_about_the_worker(capsys):
    with pytest.raises(SystemExit):
        main(["language_model.own_text.train_on", "--help"])
    said = capsys.readouterr().out
    assert "some minutes" in said and "--text TEXT" in said and "('dp=2')" in said


def test_what_rank_0_says_is_printed_while_it_works(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_printing", [])
    (tmp_path / progress.files.STATUS).write_text("step 12 of 400")
    bar = progress.ProgressBar([tmp_path], 30)
    bar.show(20)  # a notebook, or a program that asked for nothing
    progress.to_terminal()
    for seconds in (5, 20, 21, 31):
        bar.show(seconds)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["    20 s  step 12 of 400", "    31 s  step 12 of 400"]


def test_an_interrupt_is_said_in_a_sentence(monkeypatch, capsys):
    def stopped(*_, **__):
        raise Interrupted("the launch was interrupted")

    monkeypatch.setattr(command_line, "launch", stopped)
    assert main(["point_to_point.messages.blocking"]) == 130
    assert capsys.readouterr().err == "mgpu_tutorial: the launch was interrupted\n"


def test_what_draws_and_judges_is_not_offered_nor_what_no_word_can_name():
    names = [line.split()[0] for line in listing().splitlines() if line.startswith("    ")]
    assert not any(".figures." in name or ".builds." in name for name in names)
    offered = [each.name for each in arguments_of(find("language_model.train"))]
    assert "plan" in offered and "every" in offered
    assert not {"parts", "after_step"} & set(offered)


def test_mine_is_looked_for_in_the_folders_of_notebooks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["mine"]) == 0
    assert capsys.readouterr().out.startswith("No mine.py here yet")
    for folder in ("notebooks", "student"):  # where both have one, it is the student's
        Path(tmp_path, folder).mkdir()
        Path(tmp_path, folder, "mine.py").write_text(
            f"# point_to_point: {folder}\n{folder} = 1\n"
        )
        monkeypatch.chdir(tmp_path)
        assert main(["mine"]) == 0
        assert capsys.readouterr().out.count(f"collectives  {folder}\n") == 1


def test_the_list_has_every_worker_that_stands_in_a_file_and_each_can_be_asked_for_help():
    written = set()
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        parts = module.split(".")
        if parts[0] in CHAPTERS and parts[-1] not in ("figures", "builds"):
            workers = re.finditer(
                r"\ndef ([a-z]\w*)\(\s*rank: int,\s+world", file.read_text()
            )
            written |= {f"{module.removesuffix('.__init__')}.{found[1]}" for found in workers}
    listed = [line.split() for line in listing().splitlines() if line.startswith("    ")]
    assert written == {name for name, *docstring in listed if docstring}
    for name in written:
        with pytest.raises(SystemExit, match="^0$"):
            main([name, "--help"])
