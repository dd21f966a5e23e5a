"""Train on the digits alone: python -m mgpu_tutorial.ddp_in_practice.train_single"""

import torch
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader, TensorDataset

from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet


def main(folder: str = ".", epochs: int = 2, batch: int = 120) -> None:
    """Train the small network, and store its parameters in `folder`/model.pt."""
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")

    data = digits()
    dataset = TensorDataset(data.images, data.labels)
    loader = DataLoader(dataset, batch, shuffle=True)

    model = SmallConvNet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nll_loss(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()

    torch.save(model.state_dict(), f"{folder}/model.pt")
    print(f"{device}: {len(loader)} batches an epoch")


if __name__ == "__main__":
    main()
