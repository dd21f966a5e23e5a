"""`python -m mgpu_tutorial prove`: its outcome on plain scripts, and what ends it early."""

import sys

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from mgpu_tutorial import __main__ as command
from mgpu_tutorial.instruments.prove import proof

TRAIN = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(int(sys.argv[1])):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def prove(monkeypatch, tmp_path, capsys):
    """Prove the text of a script on one rank, which runs in this process."""

    def run(args):
        try:
            assert proof.main(args.training_script_args) == 0
        except (Exception, SystemExit) as error:
            raise ChildFailedError.__new__(ChildFailedError) from error

    def proving(text, *words):
        (tmp_path / "train.py").write_text(text)
        code = command.main(["prove", "1", str(tmp_path / "train.py"), *words])
        return (code, *capsys.readouterr())

    monkeypatch.setattr(proof.torchrun, "run", run)
    monkeypatch.setattr(sys, "argv", ["prove"])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(dist, "destroy_process_group", dist.destroy_process_group)
    monkeypatch.setenv("RANK", "0")
    return proving


def test_a_script_is_run_for_two_steps_with_its_own_words(prove):
    code, out, err = prove(TRAIN + "print('ended')", "9")
    right = "gradients within 1e-12, parameters within 1e-12"
    assert (code, out) == (0, f"2 tensors as one process on 1 rank: {right}\n")
    assert err.count("train.py on 1 rank") == 3


def test_a_script_without_a_step_proves_nothing(prove):
    code, out, err = prove("print('hello')")
    assert code == 2 and out == "hello\n" and "no step" in err


def test_a_script_that_fails_proves_nothing(prove):
    for text in "1 / 0", "import sys; sys.exit(3)":
        code, out, err = prove(text)
        assert code == 2 and "failed on 1 rank" in err


def test_fewer_steps_than_asked_for_do_not_pass(prove):
    code, out, err = prove(TRAIN, "1")
    assert code == 2 and "2 tensors as one process" in out and "1 step, and 2" in err


def test_without_a_script_there_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["prove", "2", "no_such_script.py"])
    assert end.value.code == 2 and "no_such_script.py" in capsys.readouterr().err


def test_the_help_names_the_outcomes(capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["prove", "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and all(word in out for word in ("--steps", "--dtype", "2 if"))
