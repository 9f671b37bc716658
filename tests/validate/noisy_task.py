"""tiny_task with dropout: a worker that does not inherit its slot's random numbers is found out."""

from tiny_task import Net, Tiny
from torch import nn


class Noisy(Tiny):
    def model(self) -> nn.Module:
        net = Net()
        net.layers[1] = nn.Sequential(net.layers[1], nn.Dropout(0.2))
        return net
