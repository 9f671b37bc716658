"""A training loop of one's own in local mode: an ordinary PyTorch program with four lines more.

The lines with an arrow are all that a preemptible partition asks for. What comes of them: samples
are handed out and counted, the loop goes on where the run is after every restart, a preemption
delivers the steps there are, and everybody's steps are averaged.
"""

import torch
from torch import nn
from torch.utils.data import Dataset

import elastic  # <--


class Waves(Dataset):
    """Sample i is the same on every machine: that is what counts samples once."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.rand(16, generator=torch.Generator().manual_seed(index)) * 6 - 3
        return x, torch.sin(x).sum()


def main() -> None:
    torch.manual_seed(0)  # the same first parameters on every worker
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with elastic.LocalSGD.from_env(model, optimizer) as sgd:  # <--
        for x, y in sgd.batches(Waves()):  # <--
            loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sgd.step(loss)  # <--


if __name__ == "__main__":
    main()
