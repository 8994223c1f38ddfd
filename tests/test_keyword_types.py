"""Tests of the settings as keywords, also with mypy.

mypy reads this file with the package. An `ignore` that it does not need is an error.
"""

import ast
import inspect
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import fedloom
from fedloom import InputError
from fedloom.config import EXECUTION_SETTINGS, Config
from fedloom.runs.keyword_types import ExecutionSettings, ResumeSettings, RunSettings

GENERATOR = import_module("tests.support.keyword_types")  # mypy reads only the package and this file


@pytest.mark.parametrize(
    ("keywords", "settings", "others"),
    [
        (RunSettings, Config, {"method", "data", "model", "options", "variant"}),
        (ExecutionSettings, Config, Config.model_fields.keys() - EXECUTION_SETTINGS - {"device"}),
        (ResumeSettings, Config, Config.model_fields.keys() - EXECUTION_SETTINGS - {"device", "rounds"}),
    ],
)
def test_keywords_are_the_settings_with_their_types(keywords: Any, settings: Any, others: set[str]) -> None:
    expected = {name: field.annotation for name, field in settings.model_fields.items() if name not in others}
    assert get_type_hints(keywords) == expected
    assert not keywords.__required_keys__


def test_the_file_is_what_the_generator_writes() -> None:
    assert GENERATOR.FILE.read_text(encoding="utf-8") == GENERATOR.generate(), (
        "run `python -m tests.support.keyword_types`"
    )


def test_each_keyword_has_the_description_of_its_setting() -> None:
    body = ast.parse(textwrap.dedent(inspect.getsource(RunSettings))).body[0].body[1:]  # type: ignore[attr-defined]
    described = {
        field.target.id: inspect.cleandoc(docstring.value.value)
        for field, docstring in zip(body[::2], body[1::2], strict=True)
    }
    assert described == {name: Config.model_fields[name].description for name in RunSettings.__annotations__}


def test_mypy_rejects_a_wrong_keyword_and_a_wrong_type(tmp_path: Path) -> None:
    """And at run time, an error says what is wrong."""
    out = tmp_path / "run"
    with pytest.raises(InputError, match="unknown setting 'rouns'"):
        fedloom.run("fedavg", rouns=3, out=out)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="rounds must be a whole number"):
        fedloom.run("fedavg", rounds="three", out=out)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="optimizer must be"):
        fedloom.run("fedavg", optimizer="sgdm", out=out)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown setting 'callback'"):
        fedloom.run("fedavg", callback=None, out=out)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="unknown setting 'rouns'"):
        fedloom.compare(["fedavg"], rouns=3, out=out)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="lr must be a number"):
        fedloom.compare(["fedavg"], lr="fast", out=out)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rouns"):
        Config(rouns=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="rounds"):
        Config(rounds="three")  # type: ignore[arg-type]
    assert not out.exists()


def test_mypy_rejects_changes_of_the_result(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", model="logreg", rounds=1, steps=1, clients=2, report=False, out=tmp_path / "run")
    for change in (fedloom.resume, fedloom.verify):
        with pytest.raises(InputError, match="lr would change the result"):
            change(run.path, lr=0.1)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="workers must be a whole number"):
        fedloom.resume(run.path, workers="all")  # type: ignore[arg-type]
    assert fedloom.resume(run.path, engine="multiprocess", workers=2, report=False).digest == run.digest


def test_fedloom_and_a_callback_load_no_torch() -> None:
    code = "import sys, fedloom; fedloom.Callback; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
