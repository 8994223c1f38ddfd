"""Tests of imports that the contracts in pyproject.toml cannot express.

`make check` reads the contracts.
"""

import ast
import re
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
    "fedloom.flower.site.client_app",
    "fedloom.flower.site.socket",
    "fedloom.utils.data_names",
    "fedloom.utils.formatting",
    "fedloom.utils.system",
)
"""Modules of processes that start often, or of a command that should answer at once. PyTorch takes seconds to load.

tests/flower/test_records.py tests `fedloom.flower.records` too, which needs Flower."""


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_do_not_load_torch(module: str) -> None:
    code = f"import sys; import {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_root_of_the_package_holds_five_files() -> None:
    found = {path.name for path in (ROOT / "src" / "fedloom").glob("*.py")}
    assert found == {"__init__.py", "__main__.py", "_version.py", "config.py", "errors.py"}


def test_every_package_has_content() -> None:
    packages = {path.parent for path in (ROOT / "src" / "fedloom").rglob("__init__.py")}
    assert not [str(package) for package in packages if len(list(package.glob("*.py"))) == 1]


SOURCES = [path for root in ("src", "tests", "benchmarks", "examples") for path in sorted((ROOT / root).rglob("*.py"))]


def first_line(source: str) -> str:
    """Return the first line of a module's docstring. An empty module has none and needs none."""
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def test_the_first_line_of_every_module_says_what_it_holds() -> None:
    lines = {path: first_line(text) for path in SOURCES if (text := path.read_text())}
    assert not [f"{path}: {line}" for path, line in lines.items() if not re.fullmatch(r".{10,79}[.:]", line)]


def imported_tests(source: str) -> set[str]:
    """Return the test modules that a module imports, from any package."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {part for name in node.names for part in name.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            names |= {*(node.module or "").split("."), *(name.name for name in node.names)}
    return {name for name in names if name.startswith("test_")}


def test_no_module_imports_a_test_module() -> None:
    imports = {path: imported_tests(path.read_text()) for path in SOURCES}
    assert not {path: names for path, names in imports.items() if names}


@pytest.mark.parametrize(
    "code",
    ["import tests.test_a", "from tests.test_a import x", "from . import test_a", "from tests import test_a as b"],
)
def test_every_way_to_import_a_test_module_is_found(code: str) -> None:
    assert imported_tests(code) == {"test_a"}


def test_the_contract_about_papers_names_methods_that_exist() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    papers = next(each for each in contracts if each["name"] == "the frame of the methods knows no paper")
    names = {module.removeprefix("fedloom.methods.") for module in papers["forbidden_modules"]}
    assert names <= set(registry.BUILT_IN)
    assert names >= {"fedavg", "fedcross", "fedmr", "fedcda", "lss", "dynafed"}
    assert not [each for each in contracts if "ignore_imports" in each]


LONGEST_FUNCTION, LONGEST_CLASS = 60, 250
LONGER = {
    # These wait for a GPU.
    "fedloom.engines.cuda.engine:CudaEngine.train",
    "fedloom.engines.cuda.slot:CudaSlot",
    "fedloom.training.trainer:LocalTrainer",
}
"""Longer functions and classes. One that is short enough has no place here."""


def longer_definitions(tree: ast.AST, outer: str = "") -> set[str]:
    """Return the functions and classes above the limits, by qualified name, without decorators."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        name = outer
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{outer}.{node.name}" if outer else node.name
            most = LONGEST_CLASS if isinstance(node, ast.ClassDef) else LONGEST_FUNCTION
            if (node.end_lineno or 0) - node.lineno + 1 > most:
                found.add(name)
        found |= longer_definitions(node, name)
    return found


def test_functions_and_classes_are_short() -> None:
    found = set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        found |= {f"{module}:{name}" for name in longer_definitions(ast.parse(path.read_text()))}
    assert found == LONGER, "split it; or, if it is short enough now, take it from the list"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f():\n" + "    1\n" * 59, set()),
        ("def f():\n" + "    1\n" * 60, {"f"}),
        ("class A:\n" + "    x = 1\n" * 249, set()),
        ("class A:\n" + "    x = 1\n" * 250, {"A"}),
        ("class A:\n    async def f(self):\n" + "        1\n" * 60, {"A.f"}),
        ("if True:\n    @d\n    def f():\n        def g():\n" + "            1\n" * 60, {"f", "f.g"}),
    ],
)
def test_long_definitions_are_found_wherever_they_stand(code: str, found: set[str]) -> None:
    assert longer_definitions(ast.parse(code)) == found
