"""Tests of the documentation: code runs, commands parse, links and tables match."""

import importlib
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest

import fedloom
from benchmarks.__main__ import BENCHMARKS
from fedloom.cli.catalog import read_catalog_entries
from fedloom.cli.main import main
from fedloom.config import EXECUTION_SETTINGS, Config
from fedloom.data import registry as named_data
from fedloom.data.partitions import partition_indices
from fedloom.data.partitions.base import PartitionPool
from fedloom.methods import import_method_file, registry
from fedloom.models import registry as networks
from fedloom.runs.resolve import RunRequest, resolve_method
from fedloom.testing import check_method

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
FRONT = [path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") if path.exists()]


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    kind: str
    """What stands behind the fence: `python`, `console`, `python no-run: a reason`."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```([^\n]+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield Block(page, text.count("\n", 0, found.start()) + 1, found[1].strip(), found[2])


def commands(block: Block) -> list[str]:
    """The lines of a block that are typed: all of ```sh, those after `$ ` of ```console."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.kind == "sh":
        return [line for line in lines if line.strip()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


BLOCKS = [block for page in [*PAGES, *FRONT] for block in blocks(page)]
TYPED = [(block, line) for block in BLOCKS if block.kind in ("sh", "console") for line in commands(block)]
SNIPPETS = [block for block in BLOCKS if block.kind == "python" and block.page in PAGES]
FRAGMENTS = [block for block in BLOCKS if block.kind.startswith("python no-run") and block.page in PAGES]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the examples in it, and a catalogue that forgets what was registered there."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    registry.methods()
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("fedloom_imported_"):
            del sys.modules[name]


def test_there_is_something_to_test() -> None:
    assert {page.stem for page in PAGES} >= {"start", "runs", "data", "methods", "engines", "write-a-method"}
    assert len(SNIPPETS) > 5
    assert len(TYPED) > 20


@pytest.mark.parametrize("block", SNIPPETS, ids=str)
def test_python_runs(block: Block, place: Path) -> None:
    """From a file, because docstrings of options are read from source; functions called test_* are called."""
    file = place / "snippet.py"
    file.write_text(block.text, encoding="utf-8")
    for name, value in runpy.run_path(str(file), run_name="__main__").items():
        if name.startswith("test_"):
            value()


@pytest.mark.parametrize("block", FRAGMENTS, ids=str)
def test_fragments_parse_and_are_what_they_say(block: Block) -> None:
    reason = block.kind.removeprefix("python no-run").lstrip(":").strip()
    assert reason, "a fragment says why it is not run"
    compile(block.text, str(block), "exec")
    if source := re.search(r"part of (\S+)", reason):
        assert block.text in (ROOT / source[1]).read_text(encoding="utf-8"), f"{source[1]} reads differently"


class Understood(Exception):
    """The command line made sense up to where the work would begin."""


def assert_known(data: str) -> None:
    """A data set that there is, perhaps with options or a path."""
    names = {entry["name"] for entry in read_catalog_entries("datasets")}
    assert data.partition(":")[0] in names or f"{data.partition(':')[0]}:PATH" in names


def understand(run: Config | RunRequest, *_: Any, **__: Any) -> NoReturn:
    """In place of a run: everything in its config names something that there is."""
    config = run if isinstance(run, Config) else run.config
    resolve_method(config)
    assert_known(config.data)
    assert config.model.partition(":")[0] in networks.NETWORKS
    whose = np.arange(60_000) // 200
    pool = PartitionPool(np.arange(60_000) % 10, owners=whose, domains=whose // 60)
    if config.partition_file is None:
        partition_indices(config.partition, pool, config.clients, np.random.default_rng(0))
    raise Understood


def understand_folder(*_: Any, callbacks: Any = None, **changes: Any) -> NoReturn:
    assert set(changes) <= EXECUTION_SETTINGS | {"rounds"}
    raise Understood


@pytest.mark.parametrize(("block", "line"), TYPED, ids=lambda value: str(value))
def test_commands_are_understood(block: Block, line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line, comments=True)
    while words and re.match(r"\w+=", words[0]):
        del words[0]
    if words[:1] == ["make"] and (ROOT / "Makefile").exists():
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    if words[:3] == ["python", "-m", "benchmarks"]:
        assert words[3] in BENCHMARKS
    elif words[:1] == ["python"]:
        assert (ROOT / words[1]).exists()
    if not words or words[0].rpartition("/")[2] != "fedloom":
        return
    importlib.import_module("fedloom.runs.compare")  # it takes `execute` from the other: first the true one
    monkeypatch.setattr("fedloom.runs.resolve.resolve_run", understand)
    monkeypatch.setattr("fedloom.runs.execute.execute_run", understand)
    monkeypatch.setattr("fedloom.runs.compare.execute_run", understand)
    monkeypatch.setattr("fedloom.runs.execute.resume", understand_folder)
    monkeypatch.setattr("fedloom.runs.execute.verify", understand_folder)
    monkeypatch.setattr("fedloom.cli.main._runs_in", understand_folder)
    for option, value in pairwise(words):
        if option == "--init":
            (place / value).parent.mkdir(exist_ok=True)
            (place / value).touch()
    with pytest.raises((Understood, SystemExit)) as ended:
        main(words[1:])
    assert isinstance(ended.value, Understood) or not ended.value.code, line


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that docs/own-data.md names, small."""
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    rows = [f"{20 + k % 50},{('cook', 'nurse')[k % 2]},{('low', 'high')[k % 50 > 25]},site{k % 4}" for k in range(400)]
    Path("mine.csv").write_text("\n".join(["age,job,income,site", *rows]))
    pictures = rng.integers(0, 256, (300, 8, 8)).astype(np.uint8)
    np.savez("mine.npz", x=pictures, y=np.arange(300) % 3, owner=np.arange(300) % 5)
    for k in range(400):
        folder = Path("photos", ("cat", "dog")[k % 2])
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(pictures[k % 300]).save(folder / f"{k}.png")


@pytest.mark.parametrize(
    ("block", "line"),
    [(block, line) for block, line in TYPED if block.page.name == "own-data.md"],
    ids=lambda value: str(value),
)
def test_the_commands_for_your_own_data_run(
    block: Block, line: str, own_files: None, capfd: pytest.CaptureFixture[str]
) -> None:
    small = ("--rounds", "1", "--epochs", "1", "--engine", "sequential", "--quiet", "--json")
    with pytest.raises(SystemExit) as ended:
        main([*shlex.split(line)[1:], *small])
    printed = capfd.readouterr()
    assert not ended.value.code, printed.err
    summary = json.loads(printed.out)
    for run in summary.get("runs", [summary]):
        assert run["rounds"] == 1
        assert np.isfinite(run["loss"])


OWN = {"own_client.py": "my-noise", "own_server.py": "my-memory", "own_extras.py": "my-direction"}
"""The three methods at the end of docs/write-a-method.md."""


@pytest.mark.parametrize(("file", "name"), OWN.items())
def test_a_method_of_your_own_keeps_the_contract_and_is_compared(
    file: str, name: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = [block.text for block in BLOCKS if f"part of examples/{file}" in block.kind]
    assert len(shown) == 1
    (place / file).write_text(shown[0], encoding="utf-8")  # what stands on the page is complete
    import_method_file(str(place / file))
    check_method(name)
    tiny = ("--rounds", "2", "--clients", "4", "--model", "logreg", "--epochs", "1", "--engine", "sequential")
    with pytest.raises(SystemExit) as ended:
        main(["compare", "fedavg", name, "--import", file, "--seeds", "1", *tiny, "--json", "-q", "--out", "both"])
    assert not ended.value.code
    digests = {run["digest"] for run in json.loads(capfd.readouterr().out)["runs"]}
    assert len(digests) == 2


def test_a_first_method_needs_six_names_at_most() -> None:
    for file in ("own_client.py", "own_server.py"):
        (names,) = re.findall(r"^from fedloom import (.*)$", (ROOT / "examples" / file).read_text(), flags=re.MULTILINE)
        assert len(names.split(", ")) <= 6


def test_fedprox_and_fedadam_are_shown_as_they_are() -> None:
    pages = {
        "fedprox.py": [ROOT / "README.md", ROOT / "docs" / "write-a-method.md"],
        "fedopt.py": [ROOT / "docs" / "write-a-method.md"],
    }
    first = {"fedprox.py": "class FedProxOptions", "fedopt.py": "class FedAdamOptions"}
    for file, places in pages.items():
        source = (ROOT / "src" / "fedloom" / "methods" / file).read_text(encoding="utf-8")
        for page in places:
            (shown,) = (
                b.text for b in BLOCKS if b.page == page and b.kind.endswith(f"part of src/fedloom/methods/{file}")
            )
            assert shown in source
            assert shown.startswith(first[file])


def test_the_example_of_data_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    compared = importlib.import_module("own_data").main(rounds=2)
    assert [run.summary["rounds"] for run in compared.runs] == [2, 2]
    assert (compared.path / "report.html").is_file()
    del sys.modules["own_data"]


def _slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


BRITISH = re.compile(
    r"\w*(?:(?:general|initial|maxim|minim|normal|optim|personal|random|recogn|regular|serial|standard|summar|synthes)"
    r"is(?:e|ed|er|ers|es|ing|able|ations?)\b|labell(?:ed|ing)|colour|neighbour|behaviour|\bcentre|\bgrey\b|licence|"
    r"catalogue|\bdistils\b|hyper-param)\w*",
    re.IGNORECASE,
)
KERNEL = "_normalise"
"""A Triton kernel. Measurements name it."""
TEXTS = [*PAGES, *FRONT, ROOT / "CHANGELOG.md", *sorted((ROOT / "src").rglob("*.py"))]


def test_the_spelling_is_american() -> None:
    found = {str(path): set(BRITISH.findall(path.read_text(encoding="utf-8"))) - {KERNEL} for path in TEXTS}
    assert {path: words for path, words in found.items() if words} == {}


@pytest.mark.parametrize(
    "text", ["normalised", "two colours", "unlabelled", "a grey image", "it distils", "optimisers"]
)
def test_british_words_are_found(text: str) -> None:
    assert BRITISH.search(text)


@pytest.mark.parametrize(
    "text", ["too optimistic", "synthesis", "promises", "precise", "labels", "gray", "standard is"]
)
def test_other_words_are_not(text: str) -> None:
    assert not BRITISH.search(text)


LINKS = [
    (page, target)
    for page in [*PAGES, *FRONT]
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    if not re.match(r"[a-z]+:", target)
]


@pytest.mark.parametrize(("page", "target"), LINKS, ids=lambda value: value if isinstance(value, str) else value.name)
def test_links_lead_somewhere(page: Path, target: str) -> None:
    name, _, anchor = target.partition("#")
    file = page if not name else page.parent / name
    assert file.exists(), target
    if anchor:
        headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert anchor in {_slug(heading) for heading in headings}


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_every_key_of_a_record_and_a_summary_is_explained(tmp_path: Path) -> None:
    run = fedloom.run(
        rounds=1, clients=4, epochs=1, model="logreg", engine="sequential", out=tmp_path / "run", failure_rate=0.5
    )
    keys = {key for record in run.history for key in (*record, *record["seconds"])} | run.summary.keys()
    said = set(re.findall(r"`(\w+)`", _page("runs.md")))
    assert keys <= said, keys - said
    files = {os.fspath(path.relative_to(run.path)) for path in run.path.iterdir()}
    assert all(f"`{name}" in _page("runs.md") for name in files)


def test_the_parts_of_every_method_are_in_the_table_of_parts() -> None:
    rows = re.findall(r"^\| ([a-z, ]+) \| (`[^|]+`) \|", _page("combining.md"), flags=re.MULTILINE)
    said = {(brings, name) for brings, names in rows for name in re.findall(r"`([\w-]+)`", names)}
    plain = {("server, client", "fedavg")}  # what is there without any of them
    own = {
        m["name"]: ", ".join(m["provides"]) for m in read_catalog_entries("methods") if m["name"] in registry.BUILT_IN
    }
    assert said | plain == {(brings, name) for name, brings in own.items()}


def test_everything_that_can_be_chosen_is_listed() -> None:
    methods, data = _page("methods.md"), _page("data.md")
    for method in read_catalog_entries("methods"):
        if method["name"] in registry.BUILT_IN:
            costs = ("models a round", "year", "client state", "server state", "extra compute", "server data")
            row = [f"`{method['name']}`", ", ".join(method["provides"]), *(str(method[cost] or "") for cost in costs)]
            assert f"\n| {' | '.join(row)} |\n" in methods
            cost = (
                f"*{method['reference']}. Sends {method['models a round']}; a client keeps {method['client state']}, "
                f"the server {method['server state']};\nextra compute: {method['extra compute']}; "
                f"data on the server: {method['server data']}.*\n"
            )
            assert f"\n## {method['name']}\n\n{cost}\n" in methods
            own = ROOT / "docs" / f"{method['name']}.md"
            pages = methods + (own.read_text() if own.exists() else "")
            for option in method["options"]:
                assert f"| `{method['name']}.{option['name']}` | `{option['default']}` |" in pages
    for entry in read_catalog_entries("datasets"):
        shape = " x ".join(map(str, entry["shape"])) or "any"
        counts = ["varies" if entry[part] is None else f"{entry[part]:,}" for part in ("training", "test")]
        assert re.search(rf"\| `{entry['name']}` .*\| {shape} \| {counts[0]} \| {counts[1]} \|", data), entry["name"]
    for entry in read_catalog_entries("models"):
        counts = [f"{value:,}" for key, value in entry.items() if key.startswith("parameters, ") and value is not None]
        assert counts
        assert re.search(rf"^\| `{entry['name']}` .* {re.escape('| ' + ' | '.join(counts))} \|$", data, re.MULTILINE)
        page = _page("pretrained.md") if entry["name"].startswith("vit") else data
        for option in entry["options"]:
            assert re.search(rf"^\| [^|]*`{option['name']}`[^|]*\|", page, flags=re.MULTILINE), option["name"]
    for entry in read_catalog_entries("partitions"):
        assert f"\n| `{entry['name'].partition('[')[0]}` |" in data
    assert named_data.cache_folder().name in data


def test_the_first_run_ends_as_the_page_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the same words; the numbers are of one machine."""
    page = (ROOT / "docs" / "start.md").read_text()
    shown = page.split("$ fedloom run fedavg\n", 1)[1].split("```", 1)[0]
    with pytest.raises(SystemExit):
        main(["run", "fedavg", "--quiet", "--out", str(tmp_path / "r")])
    printed = capsys.readouterr().out

    def words(text: str) -> list[list[str]]:
        return [re.findall(r"[a-z]{2,}", line) for line in text.splitlines() if line.split()[0] not in LOCAL]

    assert words(shown) == words(printed)


LOCAL = ("run", "report", "digest")
"""Lines of a result that say where it lies."""


def test_the_readme_shows_what_the_demo_printed() -> None:
    """But for the times in the last column."""

    def without_times(text: str) -> list[str]:
        return [re.sub(r"  +\S+ s$| +$", "", line) for line in text.splitlines()]

    page = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"```\n(1\. FedCross and FedMR.*?)```", page, flags=re.DOTALL)
    assert shown is not None
    saved = json.loads((ROOT / "results" / "demo.json").read_text())["output"]
    assert "\n".join(without_times(shown[1])) in "\n".join(without_times("\n".join(saved)))
