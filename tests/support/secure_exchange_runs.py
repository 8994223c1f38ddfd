"""Runs of FedMR with the secure exchange over a transport in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.config import Config, replace_config
from fedloom.flower.message import SiteMessage
from fedloom.flower.site.handlers import SiteHandler, SiteHandlerResult
from fedloom.flower.tensors import encode_tensor_columns
from fedloom.runs.callback import Callback
from fedloom.runs.execute import execute_run
from fedloom.runs.resolve import resolve_run
from tests.support.fake_transport import FakeLink, make_run, make_sites, reach

SECURE = {"fedmr": {"secure": True}}


def nodes(certificates: Path, count: int, **more: Any) -> list[dict[str, Any]]:
    usual = {"roster": str(certificates / "roster.pub"), "exchange-draws": "seeded", **more}
    return [{"client": k, "key": str(certificates / "nodes" / f"site-{k}"), **usual} for k in range(count)]


def run_of(**settings: Any) -> Config:
    usual = {"method": "fedmr", "options": SECURE, "rounds": 3, "seed": 1, "deadline": 5.0}
    return make_run(**{**usual, **settings})


def federate(
    config: Config,
    certificates: Path,
    tmp_path: Path,
    change: Callable[[FakeLink], None] = lambda link: None,
    **more: Any,
) -> tuple[Any, FakeLink]:
    sites = make_sites(config, tmp_path, nodes(certificates, config.clients or 0, **more))
    link = FakeLink(sites)
    change(link)
    out = tmp_path / "run"
    return execute_run(resolve_run(config), out=out, remote_engine=reach(link, config, out)), link


def on_host(config: Config, tmp_path: Path) -> Any:
    return execute_run(resolve_run(replace_config(config, engine="sequential", deadline=600.0)), out=tmp_path / "host")


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, torch.Tensor]]:
    """What every client trained: (round, client, row)."""
    trained: list[tuple[int, int, torch.Tensor]] = []
    train = SiteHandler.train

    def listen(site: SiteHandler, question: SiteMessage) -> SiteHandlerResult:
        done = train(site, question)
        trained.append((question.header["round"], question.header["client_id"], done.memory.row.clone()))
        return done

    monkeypatch.setattr(SiteHandler, "train", listen)
    return trained


def pieces(row: torch.Tensor, columns: list[list[slice]]) -> list[bytes]:
    """Sixteen bytes from each part of each layer that is long enough to be told from others."""
    found = []
    for parts in columns:
        content = encode_tensor_columns(row, parts)
        found += [content[at : at + 16] for at in range(0, len(content) - 16, max(16, len(content) // 8 // 4 * 4))]
    return [piece for piece in found if len(set(piece)) > 8]


class Two(Callback):
    """Stops after two rounds."""

    rounds = 0

    def on_round_end(self, record: Any) -> None:
        self.rounds = record["round"]

    def should_stop(self) -> bool:
        return self.rounds >= 2
