"""Tests of the secure exchange between real processes, and of their memory.

Processes that only relay must not have layers in memory.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from fedloom.config import Config, make_config, replace_config
from fedloom.core.tasks import ClientUpdate
from fedloom.errors import RunStopped
from fedloom.runs.build import build_run
from fedloom.runs.execute import execute_run, resume
from fedloom.runs.resolve import resolve_run
from tests.support.secure_exchange_runs import Two

pytest.importorskip("flwr")
from fedloom.flower.tensors import encode_tensor_columns

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]


def memory_of(pid: int) -> bytes:
    """All that a process can write to, as it is now."""
    found = []
    ranges = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw", Path(f"/proc/{pid}/maps").read_text(), flags=re.MULTILINE)
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for start, end in ranges:
            try:
                memory.seek(int(start, 16))
                found.append(memory.read(int(end, 16) - int(start, 16)))
            except (OSError, ValueError, OverflowError):
                continue  # a mapping that cannot be read, such as a device's
    return b"".join(found)


def among(memory: bytes, searched: set[bytes]) -> set[bytes]:
    """Those of some pieces that are anywhere in a memory: all at once, for there is much of it."""
    starts, goes_on = np.zeros(1 << 16, dtype=bool), np.zeros(1 << 16, dtype=bool)
    for piece in searched:
        starts[int.from_bytes(piece[:2], "little")] = goes_on[int.from_bytes(piece[2:4], "little")] = True
    found = set()
    for shift in (0, 1):
        pairs = np.frombuffer(memory, dtype="<u2", offset=shift, count=(len(memory) - shift) // 2)
        places = np.flatnonzero(starts[pairs[:-1]])
        for place in places[goes_on[pairs[places + 1]]]:
            start = shift + 2 * int(place)
            found.add(memory[start : start + 16])
    return found & searched


def pieces(row: torch.Tensor, columns: list[list[slice]]) -> set[bytes]:
    """Sixteen bytes from several places of each layer, with enough in them not to be met by chance."""
    found = set()
    for parts in columns:
        content = encode_tensor_columns(row, parts)
        found |= {content[at : at + 16] for at in range(0, len(content) - 16, max(16, len(content) // 4 // 4 * 4))}
    return {piece for piece in found if len(set(piece)) > 10}


def trained_on_host(config: Config) -> list[tuple[int, int, set[bytes]]]:
    """By round and client: pieces of what it trains that nobody else has, nor had from the server in the first round.

    Numbers that training leaves as they were, such as those of a dead unit, are in many models, and in their mean.
    """
    found: list[tuple[int, int, set[bytes]]] = []
    with build_run(resolve_run(replace_config(config, engine="sequential"))).engine_closed() as experiment:
        server: Any = experiment.rounds.parts.server
        known = experiment.rounds.context.initial.numpy().tobytes()
        train = experiment.engine.train

        def listen(jobs: Any) -> Any:
            for answer in train(jobs):
                assert isinstance(answer, ClientUpdate)
                found.append((answer.task.round, answer.client_id, pieces(answer.row, server._layers)))
                yield answer

        experiment.engine.train = listen  # type: ignore[method-assign]
        for round in range(config.rounds):
            experiment.rounds.run_round(round)
    times = Counter(piece for _, _, some in found for piece in some)
    return [(round, client, {p for p in some if times[p] == 1 and p not in known}) for round, client, some in found]


def site_processes(run: Path) -> list[int]:
    """The processes in which this run's sites train."""
    words = {process.pid: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, said in words.items() if "fedloom.flower.site.process" in said and str(run / "flower") in said]


SERVER = """
import json, sys
from fedloom.runs.execute import execute_run
from fedloom.runs.callback import Callback
from fedloom.runs.resolve import resolve_run
from fedloom.config import make_config

class Waiting(Callback):
    def on_round_end(self, record):
        print(record["round"], flush=True)
        sys.stdin.readline()

done = execute_run(resolve_run(make_config(json.loads(sys.argv[1]))), out=sys.argv[2], callbacks=[Waiting()])
print(done.summary["digest"], done.summary["failed"], flush=True)
"""
SITES = ("supernode", "site_process", "clientapp", "site-")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="looks into the memory of processes as Linux shows it")
def test_what_relays_the_exchange_never_has_a_layer_in_its_memory(tmp_path: Path) -> None:
    """Five sites in a round, and a look into every process after it. Only that which plays the rounds opens models."""
    settings = {
        "method": "fedmr", "clients": 5, "clients_per_round": 5, "rounds": 1, "seed": 3, "epochs": 1, "nodes": 5,
        "partition": "dirichlet:0.5", "options": {"fedmr": {"secure": True, "mixed": True}}, "engine": "flower",
    }  # fmt: skip
    config = make_config(settings)
    searched = trained_on_host(config)
    assert len(searched) == 5
    assert all(len(found) > 5 for _, _, found in searched)
    secret = set.union(*(found for _, _, found in searched))
    out, processes, at_sites, at_server = tmp_path / "run", set[str](), list[bytes](), set[bytes]()
    command = [sys.executable, "-c", SERVER, json.dumps(settings), str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for line in server.stdout:
            if not line.strip().isdigit():
                digest, failed = line.split()
                break
            if line.strip() == "1":
                at_server = among(memory_of(server.pid), secret)
            for member in psutil.Process(server.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess, FileNotFoundError, PermissionError):
                    words = " ".join(member.cmdline())
                    if not any(name in words for name in SITES):
                        processes.add(words[:200])
                        assert not among(memory_of(member.pid), secret), f"a layer is in the memory of {words[:80]}"
            if line.strip() == "1":
                at_sites = [memory_of(pid) for pid in site_processes(out)]
            server.stdin.write("\n")
            server.stdin.flush()
    assert failed == "0"
    assert len(processes) >= 2, "the SuperLink and what it started"
    # The search finds what is there: the server opens models at the end, and a site has what its client trained.
    assert at_server
    assert len(at_sites) == 5
    held = [among(memory, secret) for memory in at_sites]
    for _, client, found in searched:
        assert any(found <= some for some in held), f"client {client}"

    # What they said holds no layer either, and the result has the bits of a run without any network.
    logs = [path for path in out.rglob("*.log") if not path.name.startswith("site-")]
    assert len(logs) >= 2
    assert not among(b"".join(path.read_bytes() for path in logs), secret)
    host = execute_run(resolve_run(replace_config(config, engine="sequential")), out=tmp_path / "host")
    assert digest == host.summary["digest"]
    costs = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["diagnostics"]
    assert costs["engine.exchange_attempts"] == 1
    size = build_run(resolve_run(replace_config(config, engine="sequential"))).layout.nbytes
    assert costs["engine.exchange_bytes_up"] > 2 * 5 * size, "a board and a model from each"


def test_a_run_that_was_stopped_goes_on_with_sites_that_are_started_anew(tmp_path: Path) -> None:
    settings = {
        "method": "fedmr", "clients": 3, "clients_per_round": 3, "rounds": 3, "seed": 1, "epochs": 1, "nodes": 3,
        "options": {"fedmr": {"secure": True}}, "engine": "flower",
    }  # fmt: skip
    config, out = make_config(settings), tmp_path / "run"
    with pytest.raises(RunStopped):
        execute_run(resolve_run(config), out=out, callbacks=[Two()])
    finished = resume(out)
    assert finished.summary["failed"] == 0
    host = execute_run(resolve_run(replace_config(config, engine="sequential")), out=tmp_path / "host")
    assert finished.summary["digest"] == host.summary["digest"]
