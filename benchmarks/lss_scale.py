"""In which scale the coefficients of Local Superior Soups make sense, and what batch norm's statistics do.

    FEDLOOM_DATA=DIR python benchmarks/lss_scale.py [--seeds 2] [--only NAME] [--out results/lss-scale.json]

A small CNN is pretrained on 6,000 images of MNIST and gets a new last layer; 5 clients hold 6,000 of Fashion-MNIST
(dirichlet:1.0) and train for three rounds with Adam at 5e-4. Each reading of the coefficients is run, and the length of
the regularisers' gradient is compared with that of the loss (after its weight), in the first round. Then FedAvg and LSS
with batch norm, by both treatments of its statistics. Accuracy is on 2,000 test images. Nothing is tuned.
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fedloom
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
"""Method, options, epochs of each model: LSS trains four of them."""
NORMED = ["fedavg, 2 epochs", "fedavg, 8 epochs", "3, squared, relative (the default)"]


class Part(FederatedDataset):
    """Some of Fashion-MNIST over five clients."""

    classes, shape = 10, (1, 28, 28)

    def __init__(self, seed: int) -> None:
        data, draw = load_dataset("fashion-mnist"), np.random.default_rng(seed)
        chosen = draw.permutation(60_000)[:6_000]
        x, y = data.prepare(data.train.x[chosen]), data.train.y[chosen]
        self._clients = [Samples(x[part], y[part]) for part in partition_indices("dirichlet:1.0", y.numpy(), 5, draw)]
        self.test = Samples(data.prepare(data.test.x[:2_000]), data.test.y[:2_000])
        self.prepare = InputTransform.identity()

    def __len__(self) -> int:
        return len(self._clients)

    def client(self, k: int) -> Samples:
        return self._clients[k]


def pretrained(batch_norm: bool) -> nn.Module:
    """Two epochs of MNIST, and a new last layer."""
    torch.manual_seed(0)

    def block(channels_in: int, channels: int) -> list[nn.Module]:
        norm = nn.BatchNorm2d(channels) if batch_norm else nn.Identity()
        return [nn.Conv2d(channels_in, channels, 5, padding=2), norm, nn.ReLU(), nn.MaxPool2d(2)]

    body = [*block(1, 16), *block(16, 32), nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU()]
    last = nn.Linear(64, 10)
    network = nn.Sequential(*body, last)
    data, optimizer = load_dataset("mnist"), torch.optim.Adam(network.parameters(), 1e-3)
    x, y = data.prepare(data.train.x[:6_000]), data.train.y[:6_000]
    for _ in range(2):
        for batch in torch.randperm(6_000).split(64):
            optimizer.zero_grad()
            F.cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()
    last.reset_parameters()
    return network


class Lengths:
    """The lengths of the two gradients in the first round, by member."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[float, float]]] = {}

    def correct(self, local: LSSClient, bench: LocalTrainer) -> None:
        before = bench.gradient.clone()
        PLAIN(local, bench)
        if not bench.round:
            added = float((bench.gradient - before).norm())
            self.seen.setdefault(len(bench.scratch["rows"]), []).append((float(before.norm()), added))

    def medians(self) -> dict[str, list[float]]:
        columns = {member: [*zip(*pairs, strict=True)] for member, pairs in sorted(self.seen.items())}
        return {
            name: [round(statistics.median(column[at]), 4) for column in columns.values()]
            for at, name in enumerate(("gradient of the loss", "gradient of the regularisers"))
        }


PLAIN = LSSClient.correct


def learn(name: str, network: nn.Module, seeds: int, treatment: str) -> dict[str, Any]:
    method, options, epochs = READINGS[name]
    accuracies, lengths = [], Lengths()
    LSSClient.correct = lambda local, bench: lengths.correct(local, bench)  # type: ignore[method-assign]
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            run = fedloom.run(
                method, Part(seed), copy.deepcopy(network), options={method: options} if options else {}, seed=seed,
                rounds=3, per_round=5, epochs=epochs, batch_size=64, optimizer="adam", lr=5e-4, statistics=treatment,
                engine="plain", report=False, out=Path(folder) / "run",
            )  # fmt: skip
            accuracies.append([100 * record["accuracy"] for record in run.history[1:]])
    means = [round(float(value), 1) for value in np.mean(accuracies, axis=0)]
    return {"accuracy by round": means, **(lengths.medians() if lengths.seen else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description="In which scale the coefficients of LSS make sense.")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", help="readings whose name holds this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"command": " ".join(["python", *sys.argv])}
    for batch_norm, treatment in ((False, "running"), (True, "running"), (True, "estimated")):
        network = pretrained(batch_norm)
        title = f"batch norm, statistics {treatment}" if batch_norm else "no batch norm"
        part = result.setdefault(title, {})
        part["norm"] = round(float(nn.utils.parameters_to_vector(network.parameters()).detach().norm()), 2)
        for name in NORMED if batch_norm else READINGS:
            if not options.only or options.only in name:
                part[name] = learn(name, network, options.seeds, treatment)
                print(title, name, part[name], flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
