"""Measure FedCross's Figure 9: whether PM, DA and PM-DA speed it up.

    python -m benchmarks fedcross-acceleration --out results/fedcross-acceleration.json

The paper accelerates the first tenth of its rounds: 100 of 1000, or 50 and 50 for PM-DA. Here it is 12 of 120, in the
setting of the demo's FedCross scene (hard-digits, an MLP, 4 of 40 clients a round), and with 10 clients a round as in
the paper. `shared` is PM with propellers that share the weight 1 - alpha. For each seed the target is 80 % of the final
accuracy of plain FedCross, the mean of its last ten evaluations. Nothing is tuned.
"""

import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import fedloom
from benchmarks._common import add_out, command_of, describe_machine, make_parser, write_result

SETTINGS: dict[str, Any] = {
    "data": "hard-digits", "partition": "dirichlet-equal:0.05", "clients": 40, "model": "mlp", "epochs": 5, "lr": 0.01,
    "momentum": 0.5, "rounds": 120, "eval_every": 2, "device": "cpu", "engine": "sequential",
}  # fmt: skip
PLAIN = "plain"
ROWS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "PM": {"propeller_rounds": 12},
    "DA": {"dynamic_rounds": 12},
    "PM-DA": {"propeller_rounds": 6, "dynamic_rounds": 6},
    "PM, shared": {"propeller_rounds": 12, "propeller_weights": "shared"},
}
"""Options of FedCross."""
SHARE = 0.8
SHOWN = (6, 12, 24, 60)
"""Rounds whose accuracy the result shows."""


def rounds_to(history: Sequence[tuple[int, float]], target: float) -> int | None:
    """Return the first evaluated round with this accuracy, or None."""
    return next((round for round, accuracy in history if accuracy >= target), None)


def summarize(
    curves: dict[str, dict[int, list[tuple[int, float]]]], finals: dict[str, dict[int, float]]
) -> dict[str, Any]:
    """Return the figures of each row: by seed, and their means."""
    targets = {seed: SHARE * final for seed, final in finals[PLAIN].items()}
    plain = {seed: rounds_to(curve, targets[seed]) for seed, curve in curves[PLAIN].items()}
    found = {}
    for row, by_seed in curves.items():
        rounds = {seed: rounds_to(curve, targets[seed]) for seed, curve in by_seed.items()}
        pairs = [(rounds[seed], plain[seed]) for seed in rounds]
        found[row] = {
            "rounds to target": list(rounds.values()),
            "earlier than plain": sum(mine is not None and (its is None or mine < its) for mine, its in pairs),
            "final accuracy, %": [round(100 * final, 1) for final in finals[row].values()],
            "mean final accuracy, %": round(100 * mean(finals[row].values()), 1),
            "mean accuracy in round, %": {
                str(number): round(100 * mean(dict(curve)[number] for curve in by_seed.values()), 1)
                for number in SHOWN
                if all(number in dict(curve) for curve in by_seed.values())
            },
        }
    return {"targets, %": [round(100 * target, 1) for target in targets.values()], **found}


def measure(clients_per_round: int, seeds: int, rounds: int) -> dict[str, Any]:
    """Run all rows with all seeds, and return what `summarize` does."""
    curves: dict[str, dict[int, list[tuple[int, float]]]] = {row: {} for row in ROWS}
    finals: dict[str, dict[int, float]] = {row: {} for row in ROWS}
    settings = SETTINGS | {"clients_per_round": clients_per_round, "rounds": rounds}
    for seed, (row, options) in product(range(seeds), ROWS.items()):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "run")
            run = fedloom.run("fedcross", options={"fedcross": options}, seed=seed, report=False, out=out, **settings)
            assert run.accuracy is not None
            finals[row][seed] = run.accuracy
            evaluated = [record for record in run.history if "accuracy" in record]
            curves[row][seed] = [(record["round"], record["accuracy"]) for record in evaluated]
        print(f"{clients_per_round} clients, seed {seed}, {row}: {100 * finals[row][seed]:.1f} %", flush=True)
    return summarize(curves, finals)


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("fedcross-acceleration", __doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--rounds", type=int, default=SETTINGS["rounds"], help="number of rounds (default: 120)")
    add_out(parser)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began = time.monotonic()
    found = {f"{count} clients a round": measure(count, given.seeds, given.rounds) for count in (4, 10)}
    result = {
        "command": command_of("fedcross-acceleration", arguments),
        **describe_machine(),
        "seconds": round(time.monotonic() - began, 1),
        **found,
    }
    write_result(result, given.out)
