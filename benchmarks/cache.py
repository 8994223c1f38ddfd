"""Resident memory of FedCDA whose cache lies in a file: at most 3 rows a participant and 1 GiB, it should be.

    python benchmarks/cache.py [--out results/cache.json]

Two cases, each in a process of its own because the peak of a process never goes down: 1000 clients with 1 M parameters,
all cached, and the 10 of a round with the parameters of a ResNet-18. In the last rounds the same 10 clients take part
until each has K = 3 models to choose from: that is when most rows are needed at once. The peak is that of the whole
process, PyTorch and all.
"""

import argparse
import json
import resource
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from servers import context, network

from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods.fedcda import FedCDAOptions, FedCDAServer

PER_ROUND, CACHED = 10, 3


def cohorts(clients: int) -> Iterator[range]:
    """Everyone once, then the last ones again and again."""
    for start in range(0, clients, PER_ROUND):
        last = range(start, start + PER_ROUND)
        yield last
    for _ in range(CACHED):
        yield last


def measure(clients: int, size: int) -> dict[str, float]:
    """Peak of a server that only collects."""
    torch.set_num_threads(1)
    layout = Layout.of(network(size))
    with tempfile.TemporaryDirectory() as folder:
        options = FedCDAOptions(warmup=0, K=CACHED, selection="optimal")
        server = FedCDAServer(context(layout, clients, PER_ROUND, Path(folder)), options)
        row = layout.empty()
        for number, members in enumerate(cohorts(clients)):
            updates = (ClientUpdate(ClientTask(c, server.deploy()), row.normal_(), 1, 0.5, 1) for c in members)
            server.collect(number, updates)
        server.store.close()
        assert server.store.path is not None, "it was given a folder"
        written = server.store.path.stat().st_size
    return {
        "parameters": layout.size,
        "candidates of a participant": len(server.cache[members[0]]),
        "MiB in file": round(written / 2**20, 1),
        "MiB resident": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "MiB of 3 rows a participant and 1 GiB": round(3 * PER_ROUND * layout.nbytes / 2**20 + 1024, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Resident memory of FedCDA whose cache lies in a file.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, object] = {"command": " ".join(["python", *sys.argv]), "participants": PER_ROUND}
    for clients, size in ((1000, 1_000_000), (PER_ROUND, 11_173_962)):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            result[f"{clients} clients"] = pool.submit(measure, clients, size).result()
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
