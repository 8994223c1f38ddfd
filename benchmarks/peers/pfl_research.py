"""pfl-research's simulated backend, in one process or under torchrun."""

import os
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.peers.job import Job, RoundClock


class _Network(nn.Module):
    """The network with the two functions that pfl-research asks for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.steps = network, 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        return F.cross_entropy(self.network(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Return a constant: pfl-research always evaluates in its first round, and this benchmark never does."""
        return {"nothing": Weighted(0, len(y))}


class _EndRound(TrainingProcessCallback):
    def __init__(self, clock: RoundClock) -> None:
        self.clock = clock

    def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
        self.clock.end_round()
        return False, Metrics()


class _CohortSampler:
    """Draw clients without replacement within a round."""

    def __init__(self, clients: int, cohort: int, seed: int) -> None:
        self.rng, self.clients, self.cohort, self.left = np.random.default_rng(seed), clients, cohort, list[int]()

    def __call__(self) -> int:
        self.left = self.left or self.rng.choice(self.clients, self.cohort, replace=False).tolist()
        return self.left.pop()


def train(job: Job, clock: RoundClock) -> tuple[dict[str, Tensor], int] | None:
    """Train, and return the weights and the number of steps of all processes; None in all but the first process."""
    settings = job.settings
    np.random.seed(settings.seed)  # noqa: NPY002 - pfl-research draws from the global generator
    torch.manual_seed(settings.seed)
    users = [Dataset(data, user_id=str(client)) for client, data in enumerate(job.client_data())]
    sampler = _CohortSampler(settings.clients, settings.clients_per_round, settings.seed)
    dataset = FederatedDataset(users.__getitem__, sampler)
    module = _Network(job.network())
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=settings.rounds + 1,
            evaluation_frequency=10**9,
            train_cohort_size=settings.clients_per_round,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(dataset, dataset, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=settings.epochs,
            local_learning_rate=settings.lr,
            local_batch_size=settings.batch_size,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[_EndRound(clock)],
    )
    steps = torch.tensor(module.steps)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.all_reduce(steps)
    return (module.network.state_dict(), int(steps)) if os.environ.get("RANK", "0") == "0" else None
