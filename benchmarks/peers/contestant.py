"""Run the job with one contestant, in a process of its own."""

import importlib
import json
import os
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.peers.job import MODEL, RESULT, Job, RoundClock


@dataclass(frozen=True)
class Contestant:
    """One way to do the job."""

    label: str
    module: str
    packages: tuple[str, ...]
    """packages whose versions are reported"""
    about: str
    peer: bool = False
    """whether it runs in the environment of the peers"""
    torchrun: bool = False
    """whether torchrun starts it, with one process per core"""
    engine: str = ""
    """fedloom's engine"""


_ALL_CORES = "one process, PyTorch's threads on all cores"
_PER_CORE = "one process per core, one thread each"

CONTESTANTS = {
    "loop": Contestant("plain PyTorch loop", "loop", (), _ALL_CORES),
    "pfl": Contestant("pfl-research", "pfl_research", ("pfl",), _ALL_CORES, peer=True),
    "pfl-torchrun": Contestant("pfl-research, torchrun", "pfl_research", ("pfl",), _PER_CORE, peer=True, torchrun=True),
    "flower": Contestant(
        "Flower's simulation", "flower_simulation", ("flwr", "ray"), "one Ray actor per core, one CPU each", peer=True
    ),
    "fedloom": Contestant("fedloom", "fedloom_run", ("fedloom",), f"the default: {_PER_CORE}", engine="auto"),
    "fedloom-sequential": Contestant(
        "fedloom, `--engine sequential`", "fedloom_run", ("fedloom",), "one process, one thread", engine="sequential"
    ),
}


def run_contestant(name: str, folder: Path) -> None:
    """Run a contestant; write its seconds, steps, versions and model into the folder."""
    contestant, job, clock = CONTESTANTS[name], Job(folder), RoundClock()
    module = importlib.import_module(f"benchmarks.peers.{contestant.module}")
    trained = module.train(job, clock, *([contestant.engine] if contestant.engine else []))
    if trained is None:  # not the first of several processes
        return
    weights, steps = trained
    torch.save({key: tensor.contiguous() for key, tensor in weights.items()}, folder / MODEL)
    versions = {package: version(package) for package in ("torch", *contestant.packages)}
    result = {"first round": clock.seconds[0], "rounds": clock.seconds[1:], "steps": steps, "versions": versions}
    (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    run_contestant(sys.argv[1], Path(sys.argv[2]))
    if CONTESTANTS[sys.argv[1]].torchrun:
        os._exit(0)  # threads of torch.distributed abort one in ten ordinary exits, after all work is done
