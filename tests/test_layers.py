"""What may import what. The layers themselves are contracts in pyproject.toml, which `make check` reads."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedloom.methods import registry

ROOT = Path(__file__).parents[1]
LIGHT = (
    "fedloom",
    "fedloom.cli.catalog",
    "fedloom.cli.main",
    "fedloom.config",
    "fedloom.flower.flwr_patches",
    "fedloom.flower.message",
    "fedloom.flower.records",
    "fedloom.flower.site.client_app",
    "fedloom.flower.site.socket",
    "fedloom.utils.data_names",
    "fedloom.utils.formatting",
    "fedloom.utils.system",
)
"""Modules of processes that start often, or of a command that should answer at once. PyTorch takes seconds to load."""


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_do_not_load_torch(module: str) -> None:
    if module == "fedloom.flower.records":
        pytest.importorskip("flwr")
    code = f"import sys; import {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_root_of_the_package_holds_five_files() -> None:
    found = {path.name for path in (ROOT / "src" / "fedloom").glob("*.py")}
    assert found == {"__init__.py", "__main__.py", "_version.py", "config.py", "errors.py"}


def test_every_package_has_content() -> None:
    packages = {path.parent for path in (ROOT / "src" / "fedloom").rglob("__init__.py")}
    assert not [str(package) for package in packages if len(list(package.glob("*.py"))) == 1]


def test_the_contract_about_papers_names_methods_that_exist() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    papers = next(each for each in contracts if each["name"] == "the frame of the methods knows no paper")
    names = {module.removeprefix("fedloom.methods.") for module in papers["forbidden_modules"]}
    assert names <= set(registry.BUILT_IN)
    assert names >= {"fedavg", "fedcross", "fedmr", "fedcda", "lss", "dynafed"}
    assert not [each for each in contracts if "ignore_imports" in each]
