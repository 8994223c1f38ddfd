"""A run with the Flower engine, over a network in memory, and with the plain one, which may lose the same answers."""

from pathlib import Path
from typing import Any

from fake import FakeLink, make_sites, reach

from fedloom.api import execute
from fedloom.config import Config
from fedloom.finished import Run
from fedloom.request import replace_config


def play(config: Config, folder: Path, link: FakeLink | None = None) -> tuple[Run, FakeLink]:
    link = link or FakeLink(make_sites(config, folder))
    out = folder / "flower"
    return execute(config, out=out, report=False, sites=reach(link, config, out)), link


def plainly(config: Config, folder: Path, **more: Any) -> Run:
    return execute(replace_config(config, engine="plain"), out=folder / "plain", report=False, **more)
