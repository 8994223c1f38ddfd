"""A plain sequential PyTorch loop, which may use all cores."""

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.job import Job, RoundClock, train_client


def train(job: Job, clock: RoundClock) -> tuple[dict[str, Tensor], int]:
    """Train, and return the weights and the number of steps."""
    settings, steps = job.settings, 0
    rng = np.random.default_rng(settings.seed)
    torch.manual_seed(settings.seed)
    data, module = job.client_data(), job.network()
    model = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for _ in range(settings.rounds + 1):
        mean = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        for client in rng.choice(settings.clients, settings.clients_per_round, replace=False):
            module.load_state_dict(model)
            steps += train_client(module, *data[client], settings)
            for name, tensor in module.state_dict().items():
                mean[name] += tensor / settings.clients_per_round
        model = mean
        clock.end_round()
    return model, steps
