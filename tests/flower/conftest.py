from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    from fedloom.flower.certificates import make, node_names

    make(folder, node_names(5))
    return folder
