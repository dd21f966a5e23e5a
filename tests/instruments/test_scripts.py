"""The scripts of docs/prove.md, with a stand-in that has the interfaces of Transformers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_tutorial.instruments.prove import proof
from mgpu_tutorial.processes_and_ranks.meeting import free_port

SCRIPTS = Path(__file__).parents[2] / "docs" / "prove"
STAND_IN = """
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu


class LlamaConfig(SimpleNamespace):
    pass


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.per_head = c.hidden_size // c.num_attention_heads
        kv = self.per_head * c.num_key_value_heads
        self.q_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)

    def forward(self, x):
        each = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (t.unflatten(-1, (-1, self.per_head)).transpose(1, 2) for t in each)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.norms = nn.ModuleList(nn.RMSNorm(c.hidden_size, eps=1e-6) for _ in range(2))

    def forward(self, x):
        x = x + self.self_attn(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class LlamaForCausalLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, input_ids, labels):
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        logits = self.lm_head(x)
        return SimpleNamespace(loss=cross_entropy(logits[:, :-1].mT, labels[:, 1:]))
"""


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
dist.destroy_process_group()
"""


@pytest.fixture
def started(tmp_path):
    """A command in the folder of the scripts, which sees torch, and not the course."""
    (tmp_path / "transformers.py").write_text(STAND_IN)

    def start(*words):
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


@pytest.fixture
def proved(started, tmp_path):
    """Run the command on the text of a script: its exit code, and what it says."""

    def run(text, ranks, *words, how=("--dtype", "float64")):
        (tmp_path / "train.py").write_text(text)
        command = started(proof.__file__, *how, str(ranks), "train.py", *words)
        said, _ = command.communicate(timeout=300)
        return command.returncode, said

    return run


@pytest.mark.slow
@pytest.mark.parametrize("script, ranks", [("fsdp", 2), ("dp_tp", 4)])
def test_a_script_of_the_page_computes_what_one_process_computes(proved, script, ranks):
    code, said = proved((SCRIPTS / f"{script}.py").read_text(), ranks)
    assert code == 0 and "gradients within 1e-12, parameters within 1e-12" in said, said


@pytest.mark.slow
def test_a_script_that_shards_without_averaging_is_named(proved):
    text = (SCRIPTS / "ddp.py").read_text()
    wrapped = "DDP(watched(LlamaForCausalLM(CONFIG)))"
    assert wrapped in text
    code, said = proved(text.replace(wrapped, wrapped[4:-1]), 2)
    assert code == 1 and "lm_head.weight" in said and "never averaged" in said, said


@pytest.mark.slow
def test_two_torchruns_prove_together(started, tmp_path):
    """Two machines on one: a sum in place of a mean, which clipping hides."""
    text = TRAIN.replace("loss.backward()", "(loss * len(x)).backward()")
    (tmp_path / "train.py").write_text(text)
    how = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    how += [
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
        "--local-addr=127.0.0.1",
    ]
    prove = [proof.__file__, "--alone=16", "2", "train.py", "8"]
    nodes = [started(*how, f"--node-rank={node}", *prove) for node in range(2)]
    first, second = (node.communicate(timeout=300)[0] for node in nodes)
    assert "6 of 6 gradients of step 1, before clipping" in first, first
    assert "3.bias and 5 more: 0.5 times as long" in first, first
    assert "gradients" not in second, second
    assert [node.returncode for node in nodes] == [1, 1]


def test_a_script_of_the_page_fits_on_a_screen():
    for path in SCRIPTS.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 40, path
