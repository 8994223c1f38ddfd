"""Compare FedCDA's selection with other selections from the same cache.

The benchmark reads the last checkpoint of each run of `fedcda` and trains nothing. A selection takes one model of every
client. It compares the selection of the run, the newest models, the oldest models, the selection with the lowest J (Eq.
5) that a local search finds for all clients together, and ten random selections. For each it reports

- the accuracy of the mean of the selected models;
- both terms of the objective J;
- the distance of this mean from the mean of the newest models, in units of the distance of a client's model from the
  global model.
"""

import json
import statistics
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks._common import add_out, make_parser, write_result
from fedloom.core.averaging import WeightedMean
from fedloom.core.similarity import inner_products
from fedloom.errors import InputError
from fedloom.methods.fedcda import FedCDAServer
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.directory import RunDirectory
from fedloom.runs.resolve import resolve_run

Picks = NDArray[np.intp]
RANDOM = 10
"""Number of random selections."""
STARTS = 20
"""Number of random starts of the local search."""


class Cache:
    """The models of all clients with a full cache, and their inner products around the global model."""

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
        """Return the selection of the run."""
        return np.array(
            [list(own).index(self.server.chosen[c]) for c, own in zip(self.clients, self.numbers, strict=True)]
        )

    def best(self) -> Picks:
        """Return the selection for all clients with the lowest J that the local search finds."""
        draw, count = np.random.default_rng(0), len(self.clients)
        starts = [self.chosen(), *(draw.integers(self.depth, size=count) for _ in range(STARTS))]
        return min((self.improved(start) for start in starts), key=self.objective)

    def improved(self, picks: Picks) -> Picks:
        """Change one client's model after the other while J falls."""
        while True:
            before = picks
            for client in range(len(self.clients)):
                tried = np.tile(picks, (self.depth, 1))
                tried[:, client] = np.arange(self.depth)
                picks = min([picks, *tried], key=self.objective)
            if np.array_equal(picks, before):
                return picks

    def objective(self, picks: Picks) -> float:
        """Return J (Eq. 5) of a selection."""
        count, products = len(self.clients), self.gram[np.ix_(self.places(picks), self.places(picks))]
        divergence = products.trace() / count - products.sum() / count**2
        loss = np.take_along_axis(self.losses, picks[:, None], 1).mean()
        return float(loss + self.server.options.L / 2 * divergence)

    def places(self, picks: Picks) -> Picks:
        return np.arange(len(self.clients)) * self.depth + picks

    def accuracy(self, row: Tensor) -> float:
        """Return the accuracy of a model on the test set."""
        score = self.experiment.engine.evaluate(row)
        if score is None or score.accuracy is None:
            raise InputError(f"The test set of {self.experiment.config.data} has no classes, so there is no accuracy.")
        return score.accuracy

    def figures(self, picks: Picks) -> dict[str, float]:
        """Return the figures of a selection."""
        chosen, count = self.places(picks), len(self.clients)
        products = self.gram[np.ix_(chosen, chosen)]
        signs = np.zeros(len(self.gram))
        np.add.at(signs, chosen, 1 / count)
        np.add.at(signs, self.places(np.full(count, self.depth - 1)), -1 / count)
        mean = WeightedMean(self.experiment.layout)
        for client, pick in enumerate(picks):
            mean.add(self.server.store.read(int(self.numbers[client, pick])))
        row = self.server.bank.rows[0].clone()
        mean.write_to(row)
        return {
            "accuracy": round(self.accuracy(row), 4),
            "older models": float(np.mean(picks < self.depth - 1)),
            "mean loss": round(float(np.take_along_axis(self.losses, picks[:, None], 1).mean()), 4),
            "half the divergence": round(float(products.trace() / count - products.sum() / count**2) / 2, 4),
            "distance of the mean from that of the newest": round(
                float(np.sqrt(max(0.0, signs @ self.gram @ signs))) / self.distance, 4
            ),
        }


def compare_selections(path: Path) -> dict[str, Any]:
    """Compare selections from the cache that a run ended with."""
    folder = RunDirectory.open(path)
    with build_run(resolve_run(folder.config)).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        latest = folder.checkpoints.load_latest(experiment.engine.client_states)
        if not isinstance(server, FedCDAServer) or latest is None:
            raise InputError(f"{path} is not a run of fedcda with a checkpoint.")
        played, state = latest
        experiment.load_state_dict(state["parts"])
        if not server.cache or not all(isfinite(loss) for models in server.cache.values() for _, loss in models):
            raise InputError(f"{path} has no cached models with finite losses, so there is nothing to select.")
        cache = Cache(experiment, server)
        count, draw = len(cache.clients), np.random.default_rng(0)
        choices = {
            "chosen by the run": cache.chosen(),
            "newest": np.full(count, cache.depth - 1),
            "oldest": np.zeros(count, dtype=np.intp),
            "least J": cache.best(),
        }
        random = [cache.figures(draw.integers(cache.depth, size=count)) for _ in range(RANDOM)]
        alone = [cache.accuracy(server.store.read(int(own[-1]))) for own in cache.numbers]
        return {
            "selection": server.options.selection,
            "rounds": played,
            "clients": count,
            "models of each": cache.depth,
            "distance of a model from the global one": round(cache.distance, 4),
            "accuracy of a client's newest model alone, mean": round(statistics.mean(alone), 4),
            "choices": {
                **{name: cache.figures(picks) for name, picks in choices.items()},
                f"random, mean of {RANDOM}": {
                    key: round(statistics.mean(each[key] for each in random), 4) for key in random[0]
                },
                f"random, from and to of {RANDOM}": [f(each["accuracy"] for each in random) for f in (min, max)],
            },
        }


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("fedcda-cache", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory of fedcda")
    add_out(parser)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    try:
        for path in options.runs:
            found[f"{path.parent.name}/{path.name}"] = compare_selections(path)
            print(json.dumps(found[f"{path.parent.name}/{path.name}"], indent=1), flush=True)
    except InputError as error:
        parser.error(str(error))
    write_result(found, options.out)
