"""torchrun --nproc-per-node 4 dp_tp.py"""

import torch
import torch.distributed as dist
from proof import watched
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel as Cols
from torch.distributed.tensor.parallel import RowwiseParallel as Rows
from torch.distributed.tensor.parallel import parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
PLAN = {f"self_attn.{n}_proj": Cols() for n in "qkv"} | {"self_attn.o_proj": Rows()}
PLAN |= {"mlp.gate_proj": Cols(), "mlp.up_proj": Cols(), "mlp.down_proj": Rows()}


def main():
    dist.init_process_group("gloo")
    tp = 2 if dist.get_world_size() > 1 else 1  # one process has a mesh of 1 x 1
    dp = dist.get_world_size() // tp
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = watched(LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)))
    for layer in model.model.layers:
        fully_shard(parallelize_module(layer, mesh["tp"], PLAN), mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in torch.randint(96, (16, 12)).split(8):
        own = batch[mesh.get_local_rank("dp") :: dp]  # the ranks of tp see the same
        model(input_ids=own, labels=own).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
