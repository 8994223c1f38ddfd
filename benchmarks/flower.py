"""What a round over Flower costs beside the training itself: rounds without a step of training, in several ways.

    python benchmarks/flower.py [--nodes 2 10] [--rounds 8] [--out results/flower.json]

- `host`: the host engine, in this process.
- `flower`: `--engine flower`: a SuperLink and SuperNodes on this machine, TLS and node keys.
- `as shipped`: the same app with Flower's own SuperNode: its waits, and a new process that imports torch for every
  message. The server looks for answers as often as in `flower`; Flower's own `send_and_receive` would wait 3 s more.
- `secure` (only when asked for): `flower` with FedMR's secure exchange of layers.

McMahan's CNN on images of 28 x 28 (1,663,370 parameters); one client a node, all asked in every round; nobody trains,
nothing is evaluated before the end. The first round is left out, in which sites read their data.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedloom.config import Config, make_config, replace_config
from fedloom.flower.local_deployment import start_local_deployment
from fedloom.runs.execute import execute_run
from fedloom.runs.resolve import UserObjects
from fedloom.runs.result import RunResult

WAYS = ("host", "flower", "as shipped", "secure")


def images(folder: Path) -> Path:
    """A few grey images of noise in two classes."""
    rng = np.random.default_rng(0)
    for label in ("a", "b"):
        (folder / label).mkdir(parents=True)
        for number in range(30):
            Image.fromarray(rng.integers(0, 256, (28, 28), dtype=np.uint8)).save(folder / label / f"{number}.png")
    return folder


def play(way: str, config: Config, folder: Path) -> RunResult:
    """One run in one of the ways."""
    if way == "host":
        return execute_run(replace_config(config, engine="host"), out=folder, report=False)
    with ExitStack() as stack:
        sites = stack.enter_context(
            start_local_deployment(config, UserObjects(), folder, as_shipped=way == "as shipped")
        )
        return execute_run(config, out=folder, report=False, sites=sites)


def measure(way: str, nodes: int, rounds: int, data: Path) -> dict[str, Any]:
    """Seconds of one round, from asking to the last answer taken in."""
    config = make_config(
        {
            "method": "fedmr" if way == "secure" else "fedavg",
            "options": {"fedmr": {"secure": True}} if way == "secure" else {},
            "data": f"folder:{data}",
            "model": "cnn",
            "partition": "iid",
            "clients": nodes,
            "per_round": nodes,
            "rounds": rounds + 1,
            "epochs": 0,
            "eval_every": rounds + 1,
            "engine": "flower",
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run = play(way, config, Path(folder) / "run")
        seconds = [sum(r["seconds"][part] for part in ("train", "collect")) for r in run.history[2:]]
        assert run.summary["lost"] == 0, "an answer was lost"
    return {
        "way": way,
        "nodes": nodes,
        "rounds": rounds,
        "seconds": {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)},
        "digest": run.digest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 10])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=list(WAYS[:3]), choices=WAYS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = images(Path(folder) / "images")
        for nodes in arguments.nodes:
            for way in arguments.ways:
                load = os.getloadavg()[0]
                found.append({**measure(way, nodes, arguments.rounds, data), "load_before": round(load, 2)})
                seconds = found[-1]["seconds"]
                print(
                    f"{nodes:3} nodes  {way:<11} {seconds['median']:7.3f} s a round "
                    f"({seconds['least']:.3f} to {seconds['most']:.3f}), load before {load:.1f}",
                    flush=True,
                )
                if arguments.out:  # a run that is broken off leaves what it has
                    arguments.out.write_text(json.dumps(result(found), indent=1) + "\n")
            averaged = {one["digest"] for one in found if one["nodes"] == nodes and one["way"] != "secure"}
            assert len(averaged) <= 1, "the ways differ"


def result(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What was measured, and where."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "parameters": 1_663_370,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": found,
    }


if __name__ == "__main__":
    main()
