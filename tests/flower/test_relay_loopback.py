"""FedMR's secure exchange between real processes, and a look into the server's memory."""

import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fedloom.api import execute
from fedloom.config import make_config
from fedloom.exchange import Update
from fedloom.experiment import build
from fedloom.request import replace_config

pytest.importorskip("flwr")
from fedloom.flower.bridge import BridgeLink
from fedloom.flower.loopback import _Loopback
from fedloom.flower.tensors import pick

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


def pieces(row: torch.Tensor, columns: list[list[slice]], sent: torch.Tensor) -> list[bytes]:
    """Sixteen bytes from several places of each layer, with enough in them not to be met by chance.

    What training left as the server sent it is no secret: weights of a unit that never answers, say.
    """
    found = []
    for parts in columns:
        content = pick(row, parts)
        found += [content[at : at + 16] for at in range(0, len(content) - 16, max(16, len(content) // 4 // 4 * 4))]
    known = sent.numpy().tobytes()
    return [piece for piece in found if len(set(piece)) > 10 and piece not in known]


def trained_on_host(config: Any) -> tuple[dict[int, torch.Tensor], list[list[slice]], torch.Tensor]:
    """What each client trains in the first round, how it is cut into layers, and what was sent to all."""
    with build(replace_config(config, engine="plain")).engine_closed() as experiment:
        server: Any = experiment.rounds.parts.server
        jobs = list(server.dispatch(0, server.select(0)))
        rows = {}
        for answer in experiment.engine.train(0, jobs):
            assert isinstance(answer, Update)
            rows[answer.client] = answer.row.clone()
        return rows, server.layers, experiment.rounds.context.initial.clone()


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="looks into the memory of processes as Linux shows it")
def test_five_sites_exchange_and_what_passes_the_server_shows_no_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"method": "fedmr", "clients": 5, "per_round": 5, "rounds": 1, "seed": 3, "epochs": 1, "nodes": 5}
    options = {"fedmr": {"secure": True, "mixed": True}}
    config = make_config({**settings, "partition": "dirichlet:0.5", "options": options, "engine": "flower"})
    rows, layers, sent = trained_on_host(config)
    searched = {client: pieces(row, layers, sent) for client, row in rows.items()}
    assert all(len(found) > 5 for found in searched.values())
    out, received = tmp_path / "run", list[bytes]()
    at_server: dict[int, bytes] = {}
    at_sites: list[bytes] = []
    receive, leave = BridgeLink.receive, _Loopback.__exit__

    def listen(link: BridgeLink, tickets: Any) -> Any:
        answers = receive(link, tickets)
        for answer in answers:
            if answer.parcel is not None:
                received.append(repr(dict(answer.parcel.header)).encode())
                received.extend(bytes(block.data) for block in answer.parcel.blocks.values())
        return answers

    def look_first(started: _Loopback, *error: object) -> None:
        for name, process in started._processes.items():
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for member in family:
                if not name.startswith("site-"):
                    at_server[member.pid] = memory_of(member.pid)
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or ())
            if "fedloom.flower.site_process" in words and str(out / "flower" / "site-0") in words:
                at_sites.append(memory_of(process.pid))
        leave(started, *error)

    monkeypatch.setattr(BridgeLink, "receive", listen)
    monkeypatch.setattr(_Loopback, "__exit__", look_first)
    finished = execute(config, out=out)
    assert finished.summary["lost"] == 0

    # The same bits as without any network.
    host = execute(replace_config(config, engine="plain"), out=tmp_path / "host")
    assert finished.summary["digest"] == host.summary["digest"]

    # What came to the server, what the SuperLink has in memory and what is in the logs: no piece of any layer. (At last
    # the server opens the recombined models, whose layers it then has without being told whose they are.)
    logs = b"".join(path.read_bytes() for path in (out / "flower").glob("*.log"))
    places = {"received": b"".join(received), "logs": logs, **{f"process {k}": v for k, v in at_server.items()}}
    assert len(places["received"]) > 2 * 5 * rows[0].nbytes
    assert len(at_server) >= 2, "the SuperLink and what it started"
    for where, content in places.items():
        for client, found in searched.items():
            assert not [piece for piece in found if piece in content], f"a layer of client {client} in {where}"
    # The search finds what is there: the first site's process has what its client trained.
    assert any(all(piece in content for piece in searched[0][::4]) for content in at_sites)

    record = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    costs = record["diagnostics"]
    assert costs["engine.exchange_attempts"] == 1
    assert costs["engine.exchange_bytes_up"] > 2 * 5 * rows[0].nbytes
    # No model that the server keeps is what one client trained.
    models = b"".join(path.read_bytes() for path in out.rglob("*.safetensors"))
    assert not [client for client, row in rows.items() if row.numpy().tobytes() in models]
