"""Measure what a round over Flower costs besides training.

Its rounds have no training step.

The benchmark compares these deployments:

- `multiprocess`: the multiprocess engine in this process.
- `flower`: `--engine flower`, a SuperLink and SuperNodes on this machine with TLS and node keys.
- `unpatched`: the same app with Flower's own SuperNode, its waits, and a new process that imports torch for each
  message. The server looks for updates as often as in `flower`; Flower's own `send_and_receive` waits up to 3 s longer.
- `secure` (on request): `flower` with FedMR's secure exchange of layers.

Each node has one client, and every round samples all clients. The model is McMahan's CNN on images of 28 x 28
(1,663,370 parameters). The sites read their data in the first round, which is not counted.
"""

import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks._common import add_out, command_of, describe_machine, make_parser, write_result
from fedloom.config import Config, make_config, replace_config
from fedloom.flower.local_deployment import start_local_deployment
from fedloom.runs.execute import execute_run
from fedloom.runs.resolve import resolve_run
from fedloom.runs.result import RunResult

DEPLOYMENTS = ("multiprocess", "flower", "unpatched", "secure")


def write_images(folder: Path) -> Path:
    """Write a few gray images of noise in two classes."""
    rng = np.random.default_rng(0)
    for label in ("a", "b"):
        (folder / label).mkdir(parents=True)
        for number in range(30):
            Image.fromarray(rng.integers(0, 256, (28, 28), dtype=np.uint8)).save(folder / label / f"{number}.png")
    return folder


def run_once(deployment: str, config: Config, folder: Path) -> RunResult:
    """Make one run with a deployment."""
    if deployment == "multiprocess":
        return execute_run(resolve_run(replace_config(config, engine="multiprocess")), out=folder, report=False)
    with ExitStack() as stack:
        sites = stack.enter_context(
            start_local_deployment(resolve_run(config), folder, unpatched=deployment == "unpatched")
        )
        return execute_run(resolve_run(config), out=folder, report=False, remote_engine=sites)


def measure(deployment: str, nodes: int, rounds: int, data: Path) -> dict[str, Any]:
    """Return the seconds of a round, from the requests to the last aggregated update."""
    config = make_config(
        {
            "method": "fedmr" if deployment == "secure" else "fedavg",
            "options": {"fedmr": {"secure": True}} if deployment == "secure" else {},
            "data": f"folder:{data}",
            "model": "cnn",
            "partition": "iid",
            "clients": nodes,
            "clients_per_round": nodes,
            "rounds": rounds + 1,
            "epochs": 0,
            "eval_every": rounds + 1,
            "engine": "flower",
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run = run_once(deployment, config, Path(folder) / "run")
        seconds = [sum(r["seconds"][part] for part in ("train", "aggregate")) for r in run.history[2:]]
        assert run.summary["failed"] == 0, "a client failed"
    return {
        "deployment": deployment,
        "nodes": nodes,
        "rounds": rounds,
        "seconds": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        "digest": run.digest,
    }


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("flower", __doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 10], help="numbers of nodes")
    parser.add_argument("--rounds", type=int, default=8, help="rounds to time")
    parser.add_argument(
        "--deployments", nargs="+", default=list(DEPLOYMENTS[:3]), choices=DEPLOYMENTS, help="deployments to compare"
    )
    add_out(parser)
    options = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    about = {"command": command_of("flower", arguments), "machine": describe_machine(), "parameters": 1_663_370}
    with tempfile.TemporaryDirectory() as folder:
        data = write_images(Path(folder) / "images")
        for nodes in options.nodes:
            for deployment in options.deployments:
                load = os.getloadavg()[0]
                found.append({**measure(deployment, nodes, options.rounds, data), "load_before": round(load, 2)})
                seconds = found[-1]["seconds"]
                print(
                    f"{nodes:3} nodes  {deployment:<12} {seconds['median']:7.3f} s per round "
                    f"({seconds['min']:.3f} to {seconds['max']:.3f}), load before {load:.1f}",
                    flush=True,
                )
                write_result({**about, "rounds": found}, options.out)
            averaged = {one["digest"] for one in found if one["nodes"] == nodes and one["deployment"] != "secure"}
            assert len(averaged) <= 1, "the deployments give different models"
