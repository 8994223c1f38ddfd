"""Tests of the public names: docstrings, arguments, and docs/python.md."""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PACKAGES = ("fedloom", "fedloom.data", "fedloom.models", "fedloom.methods", "fedloom.testing")
PAGE = Path(__file__).parents[1] / "docs" / "python.md"
NAMES = [(package, name) for package in PACKAGES for name in importlib.import_module(package).__all__]
DOCUMENTED = [(package, name) for package, name in NAMES if name not in ("__version__", "CHECKS")]
ids = [".".join(pair) for pair in DOCUMENTED]


def summary(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def public_methods(thing: Any) -> list[Any]:
    """Return the callables that a public name stands for: the function, or the public methods of the class."""
    if inspect.isfunction(thing):
        return [thing]
    members = (inspect.unwrap(getattr(m, "__func__", m)) for n, m in vars(thing).items() if not n.startswith("_"))
    return [member for member in members if inspect.isfunction(member)]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_names_of_a_package_are_sorted_and_exist(package: str) -> None:
    module: ModuleType = importlib.import_module(package)
    assert list(module.__all__) == sorted(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize(("package", "name"), DOCUMENTED, ids=ids)
def test_a_public_name_has_a_docstring_with_a_summary(package: str, name: str) -> None:
    thing = getattr(importlib.import_module(package), name)
    assert re.fullmatch(r"[A-Z].{10,}\.", summary(thing)), summary(thing)
    for each in public_methods(thing):
        assert summary(each), f"{each.__qualname__} has no docstring"


FUNCTIONS = [pair for pair in DOCUMENTED if inspect.isfunction(getattr(importlib.import_module(pair[0]), pair[1]))]


@pytest.mark.parametrize(("package", "name"), FUNCTIONS, ids=[".".join(pair) for pair in FUNCTIONS])
def test_a_public_function_documents_its_arguments_and_its_result(package: str, name: str) -> None:
    function = getattr(importlib.import_module(package), name)
    text, signature = inspect.getdoc(function) or "", inspect.signature(function)
    for parameter in signature.parameters:
        assert re.search(rf"^    \**{parameter}\b.*:", text, re.MULTILINE), f"Args has no {parameter}"
    if signature.return_annotation not in (None, "None", signature.empty):
        assert "Returns:" in text or summary(function).startswith("Return ")


def test_the_page_lists_exactly_the_public_names_with_their_summaries() -> None:
    """`docs/python.md` has one table per package: | `name` | first line of the docstring |."""
    text = PAGE.read_text()
    for package in PACKAGES:
        module = importlib.import_module(package)
        section = text.partition(f"\n## {package}\n")[2].partition("\n## ")[0]
        listed = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE))
        expected = {name: summary(getattr(module, name)) for pack, name in DOCUMENTED if pack == package}
        assert expected.keys() == {name for name in listed if name not in ("__version__", "CHECKS")}
        assert {name: listed[name] for name in expected} == expected
