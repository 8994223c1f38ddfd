"""The modules that a round passes through: those that docs/design.md lists."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fedloom
from fedloom import methods
from fedloom.runs.callback import Callback

PACKAGE = Path(fedloom.__file__).parent
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
MOST_MODULES = 25


class PathOfARound(Callback):
    """Notes the functions of fedloom that are called between the records of rounds 1 and 2."""

    def __init__(self) -> None:
        self.called: dict[str, set[str]] = {}
        """Names of the called functions by module, the modules in the order in which they are entered."""

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        if record["round"] == 1:
            sys.setprofile(self._note)
        elif record["round"] == 2:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            for seen in (frame.f_back, frame):
                if seen is not None and seen.f_code.co_filename.startswith(str(PACKAGE)):
                    module = Path(seen.f_code.co_filename).relative_to(PACKAGE).as_posix()
                    self.called.setdefault(module, set()).add(seen.f_code.co_qualname)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> PathOfARound:
    """The path of round 2 of FedAvg on the sequential engine, without a checkpoint."""
    methods.methods()
    path, before = PathOfARound(), sys.getprofile()
    settings: dict[str, Any] = {"engine": "sequential", "clients": 4, "clients_per_round": 2, "rounds": 3, "epochs": 1}
    try:
        out = tmp_path_factory.mktemp("path") / "run"
        fedloom.run("fedavg", **settings, out=out, callbacks=[path], report=False, checkpoint_seconds=1e6)
    finally:
        sys.setprofile(before)
    return path


def test_a_round_passes_through_the_modules_that_the_design_lists(path: PathOfARound) -> None:
    section = DESIGN.read_text(encoding="utf-8").partition("## The anatomy of a round\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \|", section, re.MULTILINE)
    assert list(path.called) == listed
    assert len(listed) <= MOST_MODULES


def test_no_two_things_on_that_path_share_a_name(path: PathOfARound) -> None:
    """Functions and classes of modules; methods of one name are those of one interface."""
    places: dict[str, set[str]] = {}
    for module, functions in path.called.items():
        for function in functions:
            places.setdefault(function.partition(".")[0], set()).add(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
