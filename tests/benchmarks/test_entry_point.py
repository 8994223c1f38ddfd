"""Tests of `python -m benchmarks`, and of the benchmark names in the docs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, list_benchmarks, main, summary_of

ROOT = Path(__file__).parents[2]


def test_the_list_is_complete_and_does_not_load_torch() -> None:
    code = "import sys; from benchmarks.__main__ import main; main(['--list']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(BENCHMARKS)
    assert done.stdout.strip() == list_benchmarks()
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
    assert all(summary_of(module).endswith(".") for module in BENCHMARKS.values())


def test_every_module_with_an_entry_is_listed() -> None:
    folder = ROOT / "benchmarks"
    modules = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if "\ndef main(" in path.read_text(encoding="utf-8")
    }
    assert modules - {"__main__"} == set(BENCHMARKS.values())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_explains_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert f"python -m benchmarks {name} " in shown
    assert summary_of(BENCHMARKS[name]) in shown


def test_an_unknown_name_is_refused_with_the_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["speed"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "'speed'" in message
    assert all(name in message for name in BENCHMARKS)


def test_the_docs_name_benchmarks_that_exist() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    texts = {page.name: page.read_text(encoding="utf-8") for page in pages}
    named = {(page, name) for page, text in texts.items() for name in re.findall(r"-m benchmarks ([\w-]+)", text)}
    assert {page for page, _ in named} >= {"Makefile", "league.md", "engines.md", "results.md"}
    assert {name for _, name in named} <= {*BENCHMARKS, "NAME", "--list"}
    assert not [page for page, text in texts.items() if re.search(r"python benchmarks/", text)]
