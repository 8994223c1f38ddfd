"""Keys that several test files want."""

from pathlib import Path

import pytest

from fedloom.flower.certificates import make, node_names


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make(folder, node_names(5))
    return folder
