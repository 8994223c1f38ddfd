"""The job of every contestant: data, network, settings, local training.

Needs torch and numpy only, because the peers run in an environment without fedloom.
"""

import json
import os
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
INITIAL, MODEL, RESULT = "initial.pt", "model.pt", "result.json"
"""The files of the initial weights, of the trained weights, and of the other results of a contestant."""
LAUNCHED = "FEDLOOM_PEERS_LAUNCHED"
"""The environment variable with the time at which the process of a contestant was started."""


@dataclass(frozen=True)
class Settings:
    """The settings of the job."""

    data: str
    mean: float
    std: float
    rounds: int
    """number of timed rounds; one round before them warms up"""
    samples_per_client: int
    clients: int = 100
    clients_per_round: int = 10
    batch_size: int = 50
    epochs: int = 1
    lr: float = 0.05
    seed: int = 0
    smooth: bool = False
    """whether the network has tanh and mean pooling, so that rounding errors stay small"""

    @property
    def steps_per_round(self) -> int:
        return self.clients_per_round * self.epochs * -(-self.samples_per_client // self.batch_size)


class Job:
    """Settings, pictures and initial weights, read from a folder. Client `i` holds the `i`-th block of the pictures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = Settings(**json.loads((folder / "settings.json").read_text(encoding="utf-8")))
        with np.load(folder / "data.npz") as arrays:
            self.x, self.y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
            self.test_x, self.test_y = torch.from_numpy(arrays["test_x"]), torch.from_numpy(arrays["test_y"])

    def normalize(self, pictures: Tensor) -> Tensor:
        """Return pictures of bytes as network input."""
        return ((pictures.float() / 255 - self.settings.mean) / self.settings.std).unsqueeze(1)

    def client_data(self) -> list[tuple[Tensor, Tensor]]:
        """Return the normalized pictures and the labels of each client."""
        size = self.settings.samples_per_client
        return list(zip(self.normalize(self.x).split(size), self.y.split(size), strict=True))

    def network(self) -> nn.Module:
        """Return the network with the initial weights."""
        module = build_network(self.settings.smooth)
        module.load_state_dict(torch.load(self.folder / INITIAL))
        return module

    def accuracy(self, weights: dict[str, Tensor]) -> float:
        """Return the accuracy of a model on the test pictures, in per cent."""
        module = build_network()
        module.load_state_dict(weights)
        with torch.no_grad():
            found = module(self.normalize(self.test_x)).argmax(1)
        return round(100 * float((found == self.test_y).float().mean()), 2)


class RoundClock:
    """Measure from the start of the process to the end of the first round, and each round after it."""

    def __init__(self) -> None:
        self.last = float(os.environ[LAUNCHED])
        self.seconds: list[float] = []

    def end_round(self) -> None:
        now = time.time()
        self.seconds.append(round(now - self.last, 4))
        self.last = now


def build_network(smooth: bool = False) -> nn.Module:
    """Return McMahan's CNN for pictures of 28 x 28, with the names of fedloom's `cnn`."""
    activation, pool = (nn.Tanh, nn.AvgPool2d) if smooth else (nn.ReLU, nn.MaxPool2d)
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(1, 32, 5, padding=2)),
        ("conv1_relu", activation()),
        ("conv1_pool", pool(2)),
        ("conv2", nn.Conv2d(32, 64, 5, padding=2)),
        ("conv2_relu", activation()),
        ("conv2_pool", pool(2)),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(7 * 7 * 64, 512)),
        ("fc1_relu", activation()),
        ("head", nn.Linear(512, CLASSES)),
    ]
    return nn.Sequential(OrderedDict(layers))


def train_client(module: nn.Module, x: Tensor, y: Tensor, settings: Settings) -> int:
    """Train with SGD on shuffled batches, and return the number of steps. The samples are gathered once per epoch."""
    optimizer, steps = torch.optim.SGD(module.parameters(), settings.lr), 0
    for _ in range(settings.epochs):
        order = torch.randperm(len(x))
        for xs, ys in zip(x[order].split(settings.batch_size), y[order].split(settings.batch_size), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(module(xs), ys).backward()
            optimizer.step()
            steps += 1
    return steps


def write_job(folder: Path, settings: Settings, arrays: dict[str, np.ndarray]) -> Job:
    """Write the job into a folder. The arrays are x, y, test_x and test_y; pictures are bytes."""
    folder.joinpath("settings.json").write_text(json.dumps(asdict(settings)), encoding="utf-8")
    np.savez(folder / "data.npz", **arrays)
    torch.manual_seed(settings.seed)
    torch.save(build_network().state_dict(), folder / INITIAL)
    return Job(folder)
