"""Runs with the Flower engine over a transport in memory.

A run with the sequential engine may lose the same updates.
"""

from pathlib import Path
from typing import Any

from fedloom.config import Config, replace_config
from fedloom.runs.execute import execute_run
from fedloom.runs.resolve import resolve_run
from fedloom.runs.result import RunResult
from tests.support.fake_transport import FakeLink, make_sites, reach


def play(config: Config, folder: Path, link: FakeLink | None = None) -> tuple[RunResult, FakeLink]:
    link = link or FakeLink(make_sites(config, folder))
    out = folder / "flower"
    return execute_run(resolve_run(config), out=out, report=False, remote_engine=reach(link, config, out)), link


def plainly(config: Config, folder: Path, **more: Any) -> RunResult:
    return execute_run(
        resolve_run(replace_config(config, engine="sequential")), out=folder / "sequential", report=False, **more
    )
