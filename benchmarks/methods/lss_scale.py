"""Compare scales of LSS's coefficients, and treatments of batch norm statistics.

A small CNN is pretrained on 6,000 images of MNIST and gets a new last layer. 5 clients hold 6,000 images of
Fashion-MNIST (dirichlet:1.0) and train for three rounds with Adam at 5e-4. FEDLOOM_DATA must name the folder of both
data sets.

The benchmark runs each reading of the paper's coefficients. In the first round it compares the norm of the
regularizers' gradient (with its coefficients) with the norm of the loss gradient. Then it runs FedAvg and LSS with
batch norm, with both treatments of the statistics. Accuracy is on 2,000 test images. Nothing is tuned.
"""

import copy
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fedloom
from benchmarks._common import add_out, command_of, describe_machine, make_parser, write_result
from fedloom.data import FederatedDataset, InputTransform, Samples, load_dataset
from fedloom.data.partitions import partition_indices
from fedloom.methods.lss import LSSClient
from fedloom.training.trainer import LocalTrainer

READINGS: dict[str, tuple[str, dict[str, Any], int]] = {
    "fedavg, 2 epochs": ("fedavg", {}, 2),
    "fedavg, 8 epochs": ("fedavg", {}, 8),
    "3, l2, absolute (the text)": ("lss", {"distance": "l2", "scale": "absolute"}, 2),
    "3, l2, relative": ("lss", {"distance": "l2"}, 2),
    "3, squared, relative (the default)": ("lss", {}, 2),
    "1e-3, squared, absolute (near the code)": ("lss", {"scale": "absolute", "affinity": 1e-3, "diversity": 1e-3}, 2),
    "0": ("lss", {"affinity": 0.0, "diversity": 0.0}, 2),
    "default, received model not in the pool": ("lss", {"include_init": False}, 2),
}
"""Method, options, and epochs of each model; LSS trains four models."""
NORMED = ["fedavg, 2 epochs", "fedavg, 8 epochs", "3, squared, relative (the default)"]


class Part(FederatedDataset):
    """6,000 images of Fashion-MNIST over five clients."""

    classes, shape = 10, (1, 28, 28)

    def __init__(self, seed: int) -> None:
        data, draw = load_dataset("fashion-mnist"), np.random.default_rng(seed)
        chosen = draw.permutation(60_000)[:6_000]
        x, y = data.transform(data.train.x[chosen]), data.train.y[chosen]
        self._clients = [Samples(x[part], y[part]) for part in partition_indices("dirichlet:1.0", y.numpy(), 5, draw)]
        self.test = Samples(data.transform(data.test.x[:2_000]), data.test.y[:2_000])
        self.transform = InputTransform.identity()

    def __len__(self) -> int:
        return len(self._clients)

    def client_samples(self, client_id: int) -> Samples:
        return self._clients[client_id]


def pretrain_network(batch_norm: bool) -> nn.Module:
    """Train two epochs on MNIST, then reset the last layer."""
    torch.manual_seed(0)

    def block(channels_in: int, channels: int) -> list[nn.Module]:
        norm = nn.BatchNorm2d(channels) if batch_norm else nn.Identity()
        return [nn.Conv2d(channels_in, channels, 5, padding=2), norm, nn.ReLU(), nn.MaxPool2d(2)]

    body = [*block(1, 16), *block(16, 32), nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU()]
    last = nn.Linear(64, 10)
    network = nn.Sequential(*body, last)
    data, optimizer = load_dataset("mnist"), torch.optim.Adam(network.parameters(), 1e-3)
    x, y = data.transform(data.train.x[:6_000]), data.train.y[:6_000]
    for _ in range(2):
        for batch in torch.randperm(6_000).split(64):
            optimizer.zero_grad()
            F.cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()
    last.reset_parameters()
    return network


class GradientNorms:
    """The norms of both gradients in the first round, by member."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[float, float]]] = {}

    def adjust_gradient(self, client: LSSClient, trainer: LocalTrainer) -> None:
        before = trainer.gradient.clone()
        ADJUST_GRADIENT(client, trainer)
        if not trainer.round:
            added = float((trainer.gradient - before).norm())
            self.seen.setdefault(len(trainer.scratch["rows"]), []).append((float(before.norm()), added))

    def medians(self) -> dict[str, list[float]]:
        columns = {member: [*zip(*pairs, strict=True)] for member, pairs in sorted(self.seen.items())}
        return {
            name: [round(statistics.median(column[at]), 4) for column in columns.values()]
            for at, name in enumerate(("gradient of the loss", "gradient of the regularizers"))
        }


ADJUST_GRADIENT = LSSClient.adjust_gradient


def run_reading(name: str, network: nn.Module, seeds: int, treatment: str) -> dict[str, Any]:
    method, options, epochs = READINGS[name]
    accuracies, norms = [], GradientNorms()
    LSSClient.adjust_gradient = lambda client, trainer: norms.adjust_gradient(client, trainer)  # type: ignore[method-assign]
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            run = fedloom.run(
                method, Part(seed), copy.deepcopy(network), options={method: options} if options else {}, seed=seed,
                rounds=3, clients_per_round=5, epochs=epochs, batch_size=64, optimizer="adam", lr=5e-4,
                statistics=treatment,
                engine="sequential", report=False, out=Path(folder) / "run",
            )  # fmt: skip
            accuracies.append([100 * record["accuracy"] for record in run.history[1:]])
    means = [round(float(value), 1) for value in np.mean(accuracies, axis=0)]
    return {"accuracy by round": means, **(norms.medians() if norms.seen else {})}


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("lss-scale", __doc__)
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds")
    parser.add_argument("--only", metavar="TEXT", help="only readings with this text in their name")
    add_out(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"command": command_of("lss-scale", arguments), "machine": describe_machine()}
    for batch_norm, treatment in ((False, "running"), (True, "running"), (True, "estimated")):
        network = pretrain_network(batch_norm)
        title = f"batch norm, statistics {treatment}" if batch_norm else "no batch norm"
        part = result.setdefault(title, {})
        part["norm"] = round(float(nn.utils.parameters_to_vector(network.parameters()).detach().norm()), 2)
        for name in NORMED if batch_norm else READINGS:
            if not options.only or options.only in name:
                part[name] = run_reading(name, network, options.seeds, treatment)
                print(title, name, part[name], flush=True)
    write_result(result, options.out)
