"""Measure the resident memory of FedCDA with its cache in a file.

The target is at most 3 models for each client of a round, and 1 GiB. The benchmark measures two cases, each in its own
process, because the peak memory of a process never falls:

- 1000 clients with 1 million parameters; all have cached models;
- the 10 clients of one round with as many parameters as a ResNet-18.

In the last rounds the same 10 clients take part until each has K = 3 models to choose from. The server then needs the
most models at once. The peak includes PyTorch and the rest of the process.
"""

import json
import resource
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks._common import add_out, command_of, describe_machine, make_parser, write_result
from benchmarks.methods.servers import make_context, make_network
from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods.fedcda import FedCDAOptions, FedCDAServer

PER_ROUND, CACHED = 10, 3


def cohorts(clients: int) -> Iterator[range]:
    """Yield the clients of each round: all clients once, then the last ones again."""
    for start in range(0, clients, PER_ROUND):
        last = range(start, start + PER_ROUND)
        yield last
    for _ in range(CACHED):
        yield last


def measure(clients: int, size: int) -> dict[str, float]:
    """Return the peak memory of a server that only aggregates."""
    torch.set_num_threads(1)
    layout = Layout.of(make_network(size))
    with tempfile.TemporaryDirectory() as folder:
        options = FedCDAOptions(warmup=0, K=CACHED, selection="optimal")
        server = FedCDAServer(make_context(layout, clients, PER_ROUND, Path(folder)), options)
        row = layout.empty()
        for number, members in enumerate(cohorts(clients)):
            updates = (ClientUpdate(ClientTask(c, server.global_model()), row.normal_(), 1, 0.5, 1) for c in members)
            server.aggregate(number, updates)
        server.store.close()
        assert server.store.path is not None, "the server has a cache directory"
        written = server.store.path.stat().st_size
    return {
        "parameters": layout.size,
        "candidates of a participant": len(server.cache[members[0]]),
        "MiB in file": round(written / 2**20, 1),
        "MiB resident": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "MiB of 3 rows a participant and 1 GiB": round(3 * PER_ROUND * layout.nbytes / 2**20 + 1024, 1),
    }


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("fedcda-disk-cache", __doc__)
    add_out(parser)
    options = parser.parse_args(arguments)
    result: dict[str, object] = {
        "command": command_of("fedcda-disk-cache", arguments),
        "machine": describe_machine(),
        "participants": PER_ROUND,
    }
    for clients, size in ((1000, 1_000_000), (PER_ROUND, 11_173_962)):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            result[f"{clients} clients"] = pool.submit(measure, clients, size).result()
    print(json.dumps(result, indent=1))
    write_result(result, options.out)
