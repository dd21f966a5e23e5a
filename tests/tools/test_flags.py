"""Flags that a newer program no longer takes are named, on trees of a few lines."""

import pytest

from tools import flags

TITAN = """
class TrainingConfig:
    local_batch_size: int = 8
    max_context_length: int = 2048

class ParallelismConfig:
    tensor_parallel_degree: int = 1
    enable_sequence_parallel: bool = True

class ActivationCheckpoint:
    class Config:
        mode: str = "selective"
"""
MEGATRON = """
parser.add_argument("--micro-batch-size", type=int)
parser.add_argument('--no-gradient-accumulation-fusion', action="store_false")

class TransformerConfig:
    hidden_size: int = 0
    sequence_parallel: bool = False
"""


@pytest.fixture
def checkout(tmp_path):
    def write(text, path="config/configs.py"):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path

    return write


def test_a_field_that_is_no_longer_in_its_section_is_gone(checkout):
    gone = flags.gone_from_torchtitan(checkout(TITAN))
    assert "--training.seq_len" in gone and "--training.global_batch_size" in gone
    assert gone["--training.seq_len"] == ["local_batch_size", "max_context_length"]
    for kept in (
        "--training.local_batch_size",
        "--parallelism.tensor_parallel_degree",
        "--parallelism.no-enable-sequence-parallel",
        "--activation_checkpoint.mode",
    ):
        assert kept in flags.flags("torchtitan") and kept not in gone


def test_the_same_name_in_another_section_does_not_count(checkout):
    moved = TITAN.replace("TrainingConfig", "DataConfig")
    assert "--training.local_batch_size" in flags.gone_from_torchtitan(checkout(moved))


def test_a_flag_of_megatron_is_spelled_or_a_field(checkout):
    gone = flags.gone_from_megatron(checkout(MEGATRON))
    for kept in (
        "--micro-batch-size",
        "--no-gradient-accumulation-fusion",
        "--hidden-size",
        "--sequence-parallel",
    ):
        assert kept in flags.flags("megatron") and kept not in gone
    assert "--use-megatron-fsdp" in gone and "--num-layers" in gone


def test_a_file_that_does_not_parse_is_passed_over(checkout):
    checkout("def broken(:", "old.py")
    assert "--training.seq_len" in flags.gone_from_torchtitan(checkout(TITAN))


@pytest.mark.parametrize("program, text", [("torchtitan", TITAN), ("megatron", MEGATRON)])
def test_the_command_names_what_is_gone_and_ends_with_1(checkout, capsys, program, text):
    assert flags.main([program, str(checkout(text))]) == 1
    out = capsys.readouterr().out.splitlines()
    count = len(flags.flags(program))
    assert out[-1] == f"{len(out) - 1} of {count} flags of {program} are gone."
    assert all(line.startswith("gone: --") for line in out[:-1])


def test_a_tree_of_something_else_is_remarked(tmp_path, capsys):
    assert flags.main(["torchtitan", str(tmp_path)]) == 2
    assert "is it torchtitan?" in capsys.readouterr().out


def test_a_tree_with_all_of_them_is_fine(checkout, capsys):
    text = "\n".join(f'parser.add_argument("{flag}")' for flag in flags.flags("megatron"))
    assert flags.main(["megatron", str(checkout(text))]) == 0
    assert capsys.readouterr().out.startswith("0 of ")
