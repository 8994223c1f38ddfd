"""Fixtures of the Flower tests: keys."""

from pathlib import Path

import pytest

from fedloom.flower.trust.certificates import make_certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, [f"site-{number}" for number in range(5)])
    return folder
