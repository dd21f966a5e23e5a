"""The scripts of docs/prove.md, with a stand-in that has the interfaces of Transformers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_tutorial.instruments.prove import proof

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


@pytest.fixture
def proved(tmp_path):
    """Run the command on the text of a script: its exit code, and what it says."""
    (tmp_path / "transformers.py").write_text(STAND_IN)

    def run(text, ranks):
        (tmp_path / "train.py").write_text(text)
        command = [
            sys.executable,
            proof.__file__,
            "--dtype",
            "float64",
            str(ranks),
            "train.py",
        ]
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return ended.returncode, ended.stdout + ended.stderr

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


def test_a_script_of_the_page_fits_on_a_screen():
    for path in SCRIPTS.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 40, path
