"""Training of one client with full batches, as a plain loop."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.rng import RngStreams


def train(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, rounds: int, epochs: int) -> None:
    """These rounds of these epochs, each a step on all samples in the order that a run draws (seed 0, client 0)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for number in range(rounds):
        draws = RngStreams(0).numpy("batches", number, 0)
        for _ in range(epochs):
            order = torch.from_numpy(draws.permutation(len(x)))
            optimizer.zero_grad()
            F.cross_entropy(module(x[order]), y[order]).backward()
            optimizer.step()
    torch.set_num_threads(threads)
