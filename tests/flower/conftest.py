"""Fixtures of the Flower tests: keys."""

from pathlib import Path

import pytest

from fedloom.flower.trust.certificates import certificate_node_names, make_certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, certificate_node_names(5))
    return folder
