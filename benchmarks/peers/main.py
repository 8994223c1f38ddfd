"""Measure rounds of fedloom against other simulators, on the CPU.

Setting: 100 clients with 300 pictures each, 10 in each round, McMahan's CNN, one local epoch, batches of 50, SGD, no
evaluation. The pictures are Fashion-MNIST, or scikit-learn's digits enlarged to 28 x 28 if FEDLOOM_DATA has none.

The first call installs the peers into `.venv-peers`, with the versions of `benchmarks/peers/constraints.txt`.

The contestants take turns, each in a process of its own: `loop`, `pfl` (one process), `pfl-torchrun` (a process per
core), `flower` (a Ray actor per core), `fedloom` (as users start it) and `fedloom-sequential`. The loop and the peers
get normalized floats and the same network with ReLU before the pooling; fedloom gets bytes and has its own `cnn`.
A round is timed from its predecessor's end to its own; one round warms up. The time from the start of the process to
the end of this first round is reported apart. Ratios compare contestants within one turn.

The contestants must do the same work: the same number of steps, mean accuracies within a band, and, in a job in which
nothing is drawn (full batches, all clients in each round), the same model up to rounding.

The figures of a GPU in the file were entered by hand; a new call keeps them. `--write` only writes the tables into
README and docs.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks._common import add_out, command_of, describe_machine, make_parser, write_result
from benchmarks.peers.contestant import CONTESTANTS
from benchmarks.peers.environment import ROOT, command_of_contestant, prepare_environment
from benchmarks.peers.job import INITIAL, LAUNCHED, MODEL, RESULT, Settings, write_job
from benchmarks.peers.pictures import load_pictures
from benchmarks.peers.summary import (
    ACCURACY_BAND,
    MODEL_TOLERANCE,
    find_differences,
    read_results,
    summarize_turns,
)
from benchmarks.peers.tables import write_pages

LONGEST = 900
"""Seconds after which a contestant has failed."""


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("peers", __doc__)
    parser.add_argument("--turns", type=int, default=4, help="turns of all contestants")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to time in each turn")
    parser.add_argument("--samples", type=int, default=300, help="pictures of each client")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the tables of this file into README and docs")
    add_out(parser)
    options = parser.parse_args(arguments)
    if min(options.turns, options.rounds, options.samples) < 1:
        parser.error("--turns, --rounds and --samples are at least 1.")
    if options.write:
        write_pages(read_results(options.write))
        return
    python = prepare_environment()
    if (load := os.getloadavg()[0]) > 1:
        sys.stderr.write(f"The load average is {load:.1f}: other processes distort the times.\n")
    name, arrays, mean, std = load_pictures(100 * options.samples, seed=0)
    settings = Settings(name, mean, std, options.rounds, options.samples)
    results: dict[str, Any] = {
        "command": command_of("peers", arguments),
        "machine": describe_machine(),
        "settings": vars(settings),
    }
    if options.out:
        results |= {key: value for key, value in read_results(options.out).items() if key == "gpu"}
    distances = measure_distances(settings, arrays, python)
    turns: list[dict[str, Any]] = []
    for turn in range(options.turns):
        load = round(os.getloadavg()[0], 2)
        turns.append({"load before": load, "contestants": run_turn(replace(settings, seed=turn), arrays, python)})
        summary = summarize_turns(turns)
        differences = find_differences(summary, distances, settings.steps_per_round)
        results["same work"] = {
            "steps a round": settings.steps_per_round,
            "accuracy band in points": ACCURACY_BAND,
            "model tolerance": MODEL_TOLERANCE,
            "distance to the loop's model": distances,
            "differences": differences,
        }
        write_result({**results, "summary": summary, "turns": turns}, options.out)
    for contestant, found in summary.items():
        print(f"{contestant:<20}", {key: value for key, value in found.items() if key != "versions"})
    if differences:
        raise SystemExit("The contestants did not do the same work: " + " ".join(differences))


def run_turn(settings: Settings, arrays: dict[str, Any], python: Path) -> dict[str, Any]:
    """Let each contestant do the job once, and return the seconds, steps and accuracy of each."""
    found = {}
    for name in CONTESTANTS:
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            job = write_job(Path(folder), settings, arrays)
            result = run_contestant(name, Path(folder), python)
            if "failure" not in result:
                result["accuracy"] = job.accuracy(torch.load(job.folder / MODEL))
        print(f"turn {settings.seed + 1}  {name:<20}", result, flush=True)
        found[name] = result
    return found


def measure_distances(settings: Settings, arrays: dict[str, Any], python: Path) -> dict[str, float | str]:
    """Return the distance of each contestant's model to the loop's in a job in which nothing is drawn.

    The distance is a share of what training changed. Of a contestant that fails, the reason is returned.
    """
    size = settings.samples_per_client
    settings = replace(settings, clients=10, clients_per_round=10, batch_size=size, epochs=3, rounds=1, smooth=True)
    arrays = {**arrays, "x": arrays["x"][: 10 * size], "y": arrays["y"][: 10 * size]}
    found: dict[str, float | str] = {}
    for name in CONTESTANTS:
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            job = write_job(Path(folder), settings, arrays)
            result = run_contestant(name, Path(folder), python)
            if "failure" in result:
                found[name] = result["failure"]
                continue
            initial, model = (_flatten(torch.load(job.folder / file)) for file in (INITIAL, MODEL))
        if name == "loop":
            reference = model
        found[name] = float(f"{(model - reference).norm() / (reference - initial).norm():.1e}")
        print(f"distance to the loop's model  {name:<20} {found[name]}", flush=True)
    return found


def run_contestant(name: str, folder: Path, python: Path) -> dict[str, Any]:
    """Run a contestant in a process of its own; return its results, or the reason if a peer failed.

    Raises:
        SystemExit: The loop or fedloom failed.
    """
    command = [*command_of_contestant(name, python, len(os.sched_getaffinity(0))), str(folder)]
    environment = {
        **os.environ,
        LAUNCHED: str(time.time()),
        "PYTHONPATH": str(ROOT),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(folder),
    }
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False
        )
    except subprocess.TimeoutExpired:
        reason = f"did not finish in {LONGEST} seconds"
    else:
        if not done.returncode and (folder / RESULT).exists():
            return dict(read_results(folder / RESULT))
        sys.stderr.write(done.stderr)
        said = [line.strip() for line in done.stderr.splitlines() if re.search("[a-z]", line)]
        reason = (said or [f"exit code {done.returncode}"])[-1]
    if not CONTESTANTS[name].peer:
        raise SystemExit(f"{name} failed: {reason}")
    return {"failure": reason}


def _flatten(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[name].flatten().double() for name in sorted(weights)])
