"""What FedCDA has to choose from: other choices from one and the same cache, with the accuracy of their means.

    python benchmarks/fedcda_cache.py RUN [RUN ...] [--out results/fedcda-cache.json]

Reads the last checkpoint of each run of `fedcda`, trains nothing. One model of every client is taken: the one that the
run has chosen, the newest, the oldest, the choice with the least J (Eq. 5) for all clients together that a local search
finds, and a random one ten times. For each choice it gives the accuracy of the mean, the two terms of the objective J,
and how far that mean lies from the mean of the newest models, in units of how far a client's model lies from the global
one.
"""

import argparse
import json
import statistics
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.similarity import inner_products
from fedloom.errors import InputError
from fedloom.methods.fedcda import FedCDAServer
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.directory import RunDirectory

Picks = NDArray[np.intp]
RANDOM = 10
"""Random choices."""
STARTS = 20
"""Random starts of the local search."""


class Cache:
    """The models of all clients that have as many as anybody, and their inner products about the global model."""

    def __init__(self, experiment: BuiltRun, server: FedCDAServer) -> None:
        self.experiment, self.server = experiment, server
        self.depth = max(len(models) for models in server.cache.values())
        self.clients = [client for client, models in sorted(server.cache.items()) if len(models) == self.depth]
        models = [server.cache[client] for client in self.clients]
        self.numbers = np.array([[number for number, _ in each] for each in models])
        self.losses = np.array([[loss for _, loss in each] for each in models])
        rows = torch.stack([server.store.read(int(number)) for number in self.numbers.flat])
        trainable = slice(0, experiment.layout.trainable)
        gram = inner_products(rows, server.bank.rows[0], trainable)
        self.gram = gram[:-1, :-1].cpu().numpy()
        self.distance = float(np.sqrt(self.gram.diagonal().mean()))

    def chosen(self) -> Picks:
        """What stands for each client now."""
        return np.array(
            [list(own).index(self.server.chosen[c]) for c, own in zip(self.clients, self.numbers, strict=True)]
        )

    def best(self) -> Picks:
        """The choice for all clients at once with the least J, from many starts of a local search."""
        draw, count = np.random.default_rng(0), len(self.clients)
        starts = [self.chosen(), *(draw.integers(self.depth, size=count) for _ in range(STARTS))]
        return min((self.improved(start) for start in starts), key=self.objective)

    def improved(self, picks: Picks) -> Picks:
        """Change one client's model after the other, while J gets less."""
        while True:
            before = picks
            for client in range(len(self.clients)):
                tried = np.tile(picks, (self.depth, 1))
                tried[:, client] = np.arange(self.depth)
                picks = min([picks, *tried], key=self.objective)
            if np.array_equal(picks, before):
                return picks

    def objective(self, picks: Picks) -> float:
        """J, Eq. 5."""
        count, products = len(self.clients), self.gram[np.ix_(self.places(picks), self.places(picks))]
        divergence = products.trace() / count - products.sum() / count**2
        loss = np.take_along_axis(self.losses, picks[:, None], 1).mean()
        return float(loss + self.server.options.L / 2 * divergence)

    def places(self, picks: Picks) -> Picks:
        return np.arange(len(self.clients)) * self.depth + picks

    def accuracy(self, row: Tensor) -> float:
        """How a model does on the test set."""
        score = self.experiment.engine.score(row)
        if score is None or score.accuracy is None:
            raise InputError(f"{self.experiment.config.data} has no classes to test on, so there is no accuracy.")
        return score.accuracy

    def told(self, picks: Picks) -> dict[str, float]:
        """What there is to say of a choice."""
        chosen, count = self.places(picks), len(self.clients)
        products = self.gram[np.ix_(chosen, chosen)]
        signs = np.zeros(len(self.gram))
        np.add.at(signs, chosen, 1 / count)
        np.add.at(signs, self.places(np.full(count, self.depth - 1)), -1 / count)
        mean = WeightedMean(self.experiment.layout)
        for client, pick in enumerate(picks):
            mean.add(self.server.store.read(int(self.numbers[client, pick])))
        row = self.server.bank.rows[0].clone()
        mean.into(row)
        return {
            "accuracy": round(self.accuracy(row), 4),
            "older models": float(np.mean(picks < self.depth - 1)),
            "mean loss": round(float(np.take_along_axis(self.losses, picks[:, None], 1).mean()), 4),
            "half the divergence": round(float(products.trace() / count - products.sum() / count**2) / 2, 4),
            "distance of the mean from that of the newest": round(
                float(np.sqrt(max(0.0, signs @ self.gram @ signs))) / self.distance, 4
            ),
        }


def look(path: Path) -> dict[str, Any]:
    """The choices from the cache that a run ended with."""
    folder = RunDirectory.open(path)
    with build_run(folder.config).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        latest = folder.checkpoints.load_latest(experiment.engine.homes)
        if not isinstance(server, FedCDAServer) or latest is None:
            raise InputError(f"{path} is no run of fedcda with a checkpoint.")
        played, state = latest
        experiment.load(state["parts"])
        if not server.cache or not all(isfinite(loss) for models in server.cache.values() for _, loss in models):
            raise InputError(f"{path} has no cached models, or some without a finite loss: nothing to choose from.")
        cache = Cache(experiment, server)
        count, draw = len(cache.clients), np.random.default_rng(0)
        choices = {
            "chosen by the run": cache.chosen(),
            "newest": np.full(count, cache.depth - 1),
            "oldest": np.zeros(count, dtype=np.intp),
            "least J": cache.best(),
        }
        random = [cache.told(draw.integers(cache.depth, size=count)) for _ in range(RANDOM)]
        alone = [cache.accuracy(server.store.read(int(own[-1]))) for own in cache.numbers]
        return {
            "selection": server.options.selection,
            "rounds": played,
            "clients": count,
            "models of each": cache.depth,
            "distance of a model from the global one": round(cache.distance, 4),
            "accuracy of a client's newest model alone, mean": round(statistics.mean(alone), 4),
            "choices": {
                **{name: cache.told(picks) for name, picks in choices.items()},
                f"random, mean of {RANDOM}": {
                    key: round(statistics.mean(each[key] for each in random), 4) for key in random[0]
                },
                f"random, from and to of {RANDOM}": [f(each["accuracy"] for each in random) for f in (min, max)],
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Other choices from the cache that runs of FedCDA ended with.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument("--out", type=Path, help="the JSON file to write; by default it is printed only")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    try:
        for path in options.runs:
            found[f"{path.parent.name}/{path.name}"] = look(path)
            print(json.dumps(found[f"{path.parent.name}/{path.name}"], indent=1), flush=True)
    except InputError as error:
        parser.error(str(error))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
