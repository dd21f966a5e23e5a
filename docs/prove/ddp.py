"""torchrun --nproc-per-node 2 ddp.py"""

import torch
import torch.distributed as dist
from proof import watched
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(watched(LlamaForCausalLM(CONFIG)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in torch.randint(96, (16, 12)).split(8):
        own = batch[rank::world_size]
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
