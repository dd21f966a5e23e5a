"""Train on the digits with DDP.

torchrun --nproc-per-node 2 --local-addr 127.0.0.1 -m mgpu_tutorial.ddp_in_practice.train_ddp
"""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import nll_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet


def main(folder: str = ".", epochs: int = 2, batch: int = 120) -> None:
    """Train the small network, and store its parameters in `folder`/model.pt."""
    torch.manual_seed(0)
    if "LOCAL_RANK" not in os.environ:
        raise RuntimeError("LOCAL_RANK is not set: start this script with torchrun")
    local_rank = int(os.environ["LOCAL_RANK"])
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if batch % world_size:
        raise ValueError(f"a batch of {batch} does not divide by {world_size} ranks")

    data = digits()
    dataset = TensorDataset(data.images, data.labels)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch // world_size, sampler=sampler)

    model = DistributedDataParallel(SmallConvNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nll_loss(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()

    if rank == 0:
        torch.save(model.module.state_dict(), f"{folder}/model.pt")
    print(f"rank {rank}: PID {os.getpid()}, {device}: {len(loader)} batches an epoch")
    dist.barrier()  # no rank leaves while another is still at work
    del model  # its Reducer ends before the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
