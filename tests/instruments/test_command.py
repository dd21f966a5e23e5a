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

    def proving(text, *words, alone=()):
        (tmp_path / "train.py").write_text(text)
        code = command.main(["prove", *alone, "1", str(tmp_path / "train.py"), *words])
        return (code, *capsys.readouterr())

    monkeypatch.setattr(proof.torchrun, "run", run)
    monkeypatch.setattr(sys, "argv", ["prove"])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(dist, "destroy_process_group", dist.destroy_process_group)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
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


def test_one_rank_can_have_words_of_its_own(prove):
    code, out, err = prove(TRAIN, "9", alone=("--alone", "2"))
    assert code == 0 and err.count("train.py on 1 rank") == 3
    code, out, err = prove(TRAIN, "9", alone=("--alone", "1"))
    assert code == 2 and "1 step, and 2" in err


IMPORTS = [
    "from torch.nn.utils import clip_grad_norm_ as clip",
    "from torch.nn.utils.clip_grad import clip_grad_norm_ as clip",
    "from torch.nn.utils import clip_grads_with_norm_\n"
    "def clip(p, most): clip_grads_with_norm_(p, most, torch.tensor(9.0))",
    "from torch.nn.utils import clip_grad_value_ as clip",
]
CLIPPED = """
import sys, torch
{}
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    model(torch.ones(2, 3)).sum().mul(float(sys.argv[1])).backward()
    clip(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("line", IMPORTS)
def test_a_factor_is_seen_that_a_clip_divides_away(prove, line):
    code, out, err = prove(CLIPPED.format(line), "4", alone=("--alone", "1"))
    assert code == 1 and "4 times too long" in out and "step 1, before clipping" in out
    assert "suspect" not in out


def test_a_step_that_is_left_out_leaves_no_gradients_behind(prove):
    """As a loss scaler leaves one out, after its gradients were clipped."""
    text = CLIPPED.format(IMPORTS[0]).replace("range(2)", "range(3)")
    text = text.replace("sys.argv[1])", "sys.argv[1]) if _ == 0 else 1.0")
    text = text.replace("    optimizer.step()", "    if _:\n        optimizer.step()")
    code, out, err = prove(text, "4", alone=("--alone", "1"))
    assert code == 0, out


def test_a_launcher_with_other_ranks_is_refused(monkeypatch, capsys, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as end:
        command.main(["prove", "4", str(tmp_path / "train.py"), "2"])
    assert end.value.code == 2 and "4 ranks" in capsys.readouterr().err


def test_without_a_script_there_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["prove", "2", "no_such_script.py"])
    assert end.value.code == 2 and "no_such_script.py" in capsys.readouterr().err


def test_the_help_names_the_outcomes(capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["prove", "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and all(word in out for word in ("--steps", "--dtype", "2 if"))
