"""Fixtures of all tests: real data sets are used where they are at hand, and skipped by name where not."""

import os
from pathlib import Path

import pytest

FOLDERS = {"cifar10": "cifar-10-batches-bin"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = os.environ.get("FEDLOOM_DATA")
    for item in items:
        for mark in item.iter_markers("data"):
            name = mark.args[0]
            if root is None or not (Path(root) / FOLDERS.get(name, name)).is_dir():
                item.add_marker(pytest.mark.skip(reason=f"the data set {name} is not in the folder FEDLOOM_DATA"))
