"""A training script of one's own is compared with another run of it, at its first step."""

import subprocess
import sys

import pytest
import torch

from mgpu_tutorial.wrong_gradient import script

# A plain script for torchrun: DDP, DistributedSampler, clipping, AdamW.
TRAIN = """
import sys, torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
model = nn.parallel.DistributedDataParallel(model)
data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
batches = DataLoader(data, int(sys.argv[1]), sampler=DistributedSampler(data, seed=1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for x, y in batches:
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
"""
LINE = "    loss.backward()\n"
SUM = "    (loss * len(x)).backward()\n"  # the sum over samples
WRAP = "model = nn.parallel.DistributedDataParallel(model)\n"


def run(folder, ranks, text, batch):
    """What the command says on so many ranks, and how it ends."""
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]
    command += [
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
    ]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "--log-dir", str(folder / "log")]
    command += ["-m", "mgpu_tutorial.wrong_gradient.script", "one.pt", "train.py", str(batch)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    return done.stdout + done.stderr, done.returncode


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_right_script_passes_and_wrong_ones_are_named(tmp_path):
    said, code = run(tmp_path, 1, TRAIN, 16)
    assert code == 0 and "written to one.pt" in said
    said, code = run(tmp_path, 2, TRAIN, 8)
    assert code == 0 and "copies: 0 differ" in said
    assert "no gradient is off by more than rounding" in said
    said, code = run(tmp_path, 2, TRAIN.replace(LINE, SUM), 8)
    assert code and "6 of 6 are off. The first backward: 3.bias is 8.00 times as long" in said
    said, code = run(tmp_path, 2, TRAIN.replace(WRAP, ""), 8)
    assert code and "copies: 6 differ" in said


IMPORTS = [
    "from torch.nn.utils import clip_grad_norm_ as clip",
    "from torch.nn.utils.clip_grad import clip_grad_norm_ as clip",
    "from torch.nn.utils import clip_grads_with_norm_\n"
    "def clip(p, most): clip_grads_with_norm_(p, most, torch.tensor(9.0))",
    "from torch.nn.utils import clip_grad_value_ as clip",
]
ALONE = """
import torch
from torch import nn
{}
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(2, 3)).sum().mul({}).backward()
clip(list(model.parameters()), 0.01)
optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("line", IMPORTS)
def test_gradients_are_those_before_any_clip(tmp_path, line):
    """Clipped ones have one length, whatever factor is wrong."""
    (tmp_path / "train.py").write_text(ALONE.format(line, 1))
    command = [sys.executable, "-m", "mgpu_tutorial.wrong_gradient.script", "one.pt"]
    first = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert first.returncode == 0, first.stderr
    (tmp_path / "train.py").write_text(ALONE.format(line, 4))
    four = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert four.returncode == 1 and "4.00 times as long" in four.stdout, four.stderr


GRADIENTS = {"a": torch.ones(3), "b": torch.arange(3.0)}


@pytest.mark.parametrize(
    "change, begin, says",
    [
        ({}, {}, "no gradient is off"),
        (
            {"b": 4 * torch.arange(3.0)},
            {},
            "1 of 2 are off. The first backward: b is 4.00 times",
        ),
        ({"a": torch.zeros(3), "b": torch.ones(3)}, {}, "b is off by 63%; were the samples"),
        ({"a": torch.full((3,), torch.nan)}, {}, "a is off by nan%"),
        ({"c": torch.ones(1)}, {}, "c is in one of the two runs only"),
        ({}, {"b": torch.ones(3)}, "b begins with other values"),
    ],
)
def test_two_runs_are_compared(change, begin, says):
    found, before = GRADIENTS | change, GRADIENTS | begin
    said, wrong = script._compared(found, before, GRADIENTS, GRADIENTS)
    assert says in said and wrong == bool(change or begin)


@pytest.mark.parametrize("words", [[], ["one.pt"], ["one.pt", "no_such_script.py"]])
def test_without_a_script_it_says_how(words):
    with pytest.raises(SystemExit, match="expected a file to compare with, and a script"):
        script.main(words)


@pytest.mark.slow
def test_a_script_without_a_step_and_one_with_shards_are_refused(tmp_path):
    said, code = run(tmp_path, 1, "print('nothing')", 8)
    assert code and "ended before a step of a torch optimizer: nothing is checked" in said
    mesh = "dist.device_mesh.init_device_mesh('cpu', (dist.get_world_size(),))"
    wrap = "nn.parallel.DistributedDataParallel(model)"
    sharded = f"torch.distributed.fsdp.fully_shard(model, mesh={mesh})"
    text = TRAIN.replace(wrap, sharded).replace(
        "import torch.d", "import torch.distributed.fsdp\nimport torch.d", 1
    )
    said, code = run(tmp_path, 2, text, 8)
    assert code and "is sharded (a DTensor)" in said
