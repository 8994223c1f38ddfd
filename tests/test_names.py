"""Names lead back to their file, names that are gone stay away, and what one module uses alone is private."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
RETIRED = Path(__file__).with_name("retired_names.txt")
EXCEPTIONS = Path(__file__).with_name("public_names.toml")
PAPER = re.compile(r"fedloom\.methods\.[a-z]\w*")
"""Modules that hold one paper each. Their parts, options and formulas are public and found by the paper's name."""
FRAME = {f"fedloom.methods.{name}" for name in ("base", "composition", "registry", "servers", "variants")}
PUBLIC_BASES = {"fedloom.data.sources": "DatasetSource", "fedloom.models": "nn.Module"}
"""Packages whose classes of a kind are public, although a table is all that names them."""


@cache
def trees() -> dict[str, ast.Module]:
    """The parsed modules of the package, by dotted name."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        module = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        found[module] = ast.parse(path.read_text())
    return found


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Every name that Python code defines or uses."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name, asname=other):
                yield from name.split(".")
                if other:
                    yield other


def definitions(module: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes that a module defines."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {n.name: n for n in trees()[module].body if isinstance(n, kinds) and not n.name.startswith("_")}


@cache
def used_elsewhere() -> set[tuple[str, str]]:
    """Public names that another module imports, reaches through its module, or names in a string."""
    modules = trees()
    public = {(module, name) for module in modules for name in definitions(module)}
    by_text: dict[str, set[tuple[str, str]]] = {}
    for key in public:
        for text in (key[1], ".".join(key), ":".join(key)):
            by_text.setdefault(text, set()).add(key)
    found: set[tuple[str, str]] = set()
    for module, tree in modules.items():
        aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in node.names:
                    if f"{node.module}.{name.name}" in modules:
                        aliases[name.asname or name.name] = f"{node.module}.{name.name}"
                    elif node.module != module:
                        found.add((node.module, name.name))
            elif isinstance(node, ast.Import):
                aliases |= {name.asname or name.name: name.name for name in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {key for key in by_text.get(node.value, set()) if key[0] != module}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                found.add((aliases[node.value.id], node.attr))
    return found & public


def is_public_by_kind(module: str, node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Parts of a paper, networks, data sources and commands are public without another user in the package."""
    if PAPER.fullmatch(module) and module not in FRAME:
        return True
    if any(module.startswith(package) for package in ("fedloom.cli", "fedloom.__main__")):
        return True
    if isinstance(node, ast.FunctionDef):
        return False
    return any(module.startswith(package) and inherits(module, node, base) for package, base in PUBLIC_BASES.items())


def inherits(module: str, node: ast.ClassDef, base: str) -> bool:
    """Whether a class has a base of that name, through classes of its own module too."""
    local = {n.name: n for n in trees()[module].body if isinstance(n, ast.ClassDef)}
    bases = [ast.unparse(each) for each in node.bases]
    return base in bases or any(inherits(module, local[each], base) for each in bases if each in local)


def exceptions() -> dict[str, dict[str, str]]:
    """The two lists of exceptions: `module:name`, and the reason."""
    return tomllib.loads(EXCEPTIONS.read_text())


def test_what_no_other_module_uses_is_private() -> None:
    alone = {
        f"{module}:{name}"
        for module in trees()
        for name, node in definitions(module).items()
        if (module, name) not in used_elsewhere() and not is_public_by_kind(module, node)
    }
    assert alone == exceptions()["unused"].keys(), "make it private, or say in public_names.toml why it is not"


def test_functions_that_other_modules_use_have_more_than_one_word() -> None:
    single = {
        f"{module}:{name}"
        for module in trees()
        for name, node in definitions(module).items()
        if isinstance(node, ast.FunctionDef) and "_" not in name and (module, name) in used_elsewhere()
        if not module.startswith("fedloom.cli.")  # a command is called what is typed
    }
    assert single == exceptions()["single_word"].keys(), "say in the name what it does it to"


def test_every_exception_has_a_reason() -> None:
    assert all(len(reason) > 10 for reasons in exceptions().values() for reason in reasons.values())


def retired() -> set[str]:
    return {line for line in RETIRED.read_text().splitlines() if line and not line.startswith("#")}


def test_no_retired_name_is_in_the_package() -> None:
    found = {name: module for module, tree in trees().items() for name in identifiers(tree)}
    assert not {name: found[name] for name in retired() & found.keys()}


BLOCK = re.compile(r"^```(\w*).*?\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def names_in_page(text: str) -> set[str]:
    """Return the identifiers in the Python, the inline code and the commands of a page; output of commands is prose."""
    python = [block for language, block in BLOCK.findall(text) if language == "python"]
    commands = [line for language, block in BLOCK.findall(text) if language != "python" for line in block.splitlines()]
    inline = [code for code in INLINE.findall(BLOCK.sub("", text)) if not re.search(r"\w/\w|\.py$", code)]
    found = {name for block in python for name in identifiers(ast.parse(block))}
    for code in inline:
        try:
            found |= set(identifiers(ast.parse(code)))
        except SyntaxError:  # a command, a path, or text with placeholders
            found |= set(re.findall(r"--([a-z][\w-]*)", code))
    for command in commands:
        if command.startswith("$ "):
            found |= set(re.findall(r"--([a-z][\w-]*)", command))
    return {name.replace("-", "_") for name in found}


@cache
def words_in_strings() -> set[str]:
    """Return the words that the package uses as strings: values of options, keys of files, columns of tables."""
    constants = (n.value for tree in trees().values() for n in ast.walk(tree) if isinstance(n, ast.Constant))
    return {
        word for text in constants if isinstance(text, str) and " " not in text for word in re.findall(r"\w+", text)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_retired_name_is_in_code_of_a_page(page: Path) -> None:
    assert not names_in_page(page.read_text()) & (retired() - words_in_strings())


def test_retired_names_are_found_in_python_inline_code_and_commands() -> None:
    page = "Call `old(gone1=2)`.\n```python\ngone2.x\n```\n```console\n$ fedloom run --gone-3 5\n gone4\n```\n"
    assert {"gone1", "gone2", "gone_3"} <= names_in_page(page)
    assert "gone4" not in names_in_page(page)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def gone(): pass", {"gone"}),
        ("x.gone = f(gone2=1)", {"x", "gone", "f", "gone2"}),
        ("from a.gone import b as c", {"b", "c"}),
    ],
)
def test_identifiers_are_found_wherever_they_stand(code: str, expected: set[str]) -> None:
    assert set(identifiers(ast.parse(code))) == expected
