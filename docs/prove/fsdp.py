"""torchrun --nproc-per-node 2 fsdp.py"""

import torch
import torch.distributed as dist
from proof import watched
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = watched(LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in torch.randint(96, (16, 12)).split(8):
        own = batch[rank::world_size]
        model(input_ids=own, labels=own).loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.5).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"norm {norm.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
