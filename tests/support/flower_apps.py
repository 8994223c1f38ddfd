"""Flower apps as tests write and read them."""

import tomllib
from pathlib import Path
from typing import Any

from tests.support.fake_transport import flat


def written(folder: Path) -> dict[str, Any]:
    """The run config as Flower hands it to the app."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    return flat(project["tool"]["flwr"]["app"]["config"])


OWN = """
import numpy as np
from fedloom.flower.site_data import SiteData, SiteDataSpec

TASK = SiteDataSpec(classes=3, shape=(4,), name="flowers", test=(np.eye(4, dtype=np.float32)[:3], np.arange(3)))


def load(node, client):
    rng = np.random.default_rng(int(node["data"]))
    y = rng.integers(0, 3, 30)
    x = np.eye(4, dtype=np.float32)[y] + rng.normal(0, 0.1, (30, 4)).astype(np.float32)
    return SiteData((x, y), (x[:5], y[:5]))
"""
