"""Stored digests of the quick golden runs, by kind of machine.

`make test` compares with them, because it has no old commit.
"""

import hashlib
import json
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.golden.runner import Result

FILE = Path(__file__).with_name("values.json")


def versions() -> dict[str, str]:
    """All that bits may depend on beside fedloom."""
    found = {name: version(name) for name in ("torch", "numpy", "scipy", "scikit-learn")}
    return found | {"python": platform.python_version(), "processor": _processor()}


@cache
def machine() -> str:
    """The kind of machine that values belong to: torch's version, the processor, and a trial of its arithmetic."""
    return f"torch {version('torch')}, {_processor()}, arithmetic {_arithmetic()}"


def _processor() -> str:
    import torch

    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _arithmetic() -> str:
    """A digest of three steps that know nothing of fedloom: processors with one set of instructions may round apart."""
    import numpy as np
    import torch
    from torch import nn

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        draw = np.random.Generator(np.random.Philox(1))
        network = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5, padding=2), nn.Flatten(), nn.Linear(256, 120), nn.Tanh(), nn.Linear(120, 10),
        )  # fmt: skip
        with torch.no_grad():
            for weights in network.parameters():
                weights.copy_(torch.from_numpy(draw.standard_normal(weights.shape).astype(np.float32) / 10))
        descent = torch.optim.SGD(network.parameters(), 0.1)
        for _ in range(3):
            x = torch.from_numpy(draw.standard_normal((32, 1, 8, 8)).astype(np.float32))
            descent.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(network(x), torch.arange(32) % 10))
            descent.step()
    finally:
        torch.set_num_threads(threads)
    row = torch.cat([weights.detach().flatten() for weights in network.parameters()]).numpy()
    square = draw.standard_normal((97, 97))
    return hashlib.sha256(row.tobytes() + (square @ square.T).tobytes()).hexdigest()[:8]


def condense(result: Result) -> dict[str, Any]:
    """The digests of a result: of each run its model and metrics, and the draws of all."""
    models = {place: run["digest"] for place, run in result["runs"].items()}
    metrics = {place: _sha(run["metrics"]) for place, run in result["runs"].items()}
    return {"exit": result["exit"], "model": models, "metrics": metrics, "draws": _sha(result["draws"])}


def stored() -> dict[str, dict[str, Any]] | None:
    """What is expected on this machine, by case; None where nobody has tried it."""
    return read().get(machine())


def read() -> dict[str, dict[str, Any]]:
    """All that is stored, by kind of machine and case."""
    return dict(json.loads(FILE.read_text())) if FILE.exists() else {}


def store(results: dict[str, Result]) -> str:
    """Expect these results on this machine from now on; returns the name of the file."""
    known = read()
    known[machine()] = {name: condense(result) for name, result in results.items()}
    FILE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    return FILE.name


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
