"""Tests of the public names: docstrings, arguments, and docs/python.md."""

import doctest
import importlib
import inspect
import re
import textwrap
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
    functions = [member for member in members if inspect.isfunction(member)]
    return [each for each in functions if each.__qualname__.startswith(f"{thing.__name__}.")]  # no defaults of fields


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


def documented_callables() -> list[Any]:
    """Return public functions, and public methods of public classes, each once."""
    things = [getattr(importlib.import_module(package), name) for package, name in DOCUMENTED]
    return list({each.__qualname__: each for thing in things for each in public_methods(thing)}.values())


@pytest.mark.parametrize("function", documented_callables(), ids=lambda function: function.__qualname__)
def test_a_public_function_documents_its_arguments_and_its_result(function: Any) -> None:
    text, signature = inspect.getdoc(function) or "", inspect.signature(function)
    parameters = [name for name in signature.parameters if name not in ("self", "cls")]
    for parameter in parameters:
        assert re.search(rf"^    \**{parameter}\b.*:", text, re.MULTILINE), f"Args has no {parameter}"
    if parameters and signature.return_annotation not in (None, "None", signature.empty):
        assert "Returns:" in text or "Yields:" in text or summary(function).startswith("Return ")


EXAMPLES = {
    f"{package}.{name}": textwrap.dedent(found[1])
    for package, name in DOCUMENTED
    if (text := inspect.getdoc(getattr(importlib.import_module(package), name)))
    and (found := re.search(r"^Example:\n((?:(?: {4}.*)?\n?)+)", text, re.MULTILINE))
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_public_name_works(name: str) -> None:
    """An example with `>>>` is run. Others are fragments, perhaps of a function, and must be Python."""
    if ">>>" not in EXAMPLES[name]:
        compile("def example():\n" + textwrap.indent(EXAMPLES[name], "    "), name, "exec")
        return
    module, _, attribute = name.rpartition(".")
    names = vars(inspect.getmodule(getattr(importlib.import_module(module), attribute)))
    outcome = doctest.DocTestRunner().run(doctest.DocTestParser().get_doctest(EXAMPLES[name], names, name, None, 0))
    assert outcome.attempted
    assert not outcome.failed


def test_what_users_extend_or_create_has_an_example() -> None:
    names = ("Server", "Client", "Extras", "Refiner", "Options", "Samples", "FederatedDataset", "register", "run")
    assert EXAMPLES.keys() >= {f"fedloom.{name}" for name in names}


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
