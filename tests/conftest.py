"""Fixtures of all tests, and the marks for tests that need real data sets."""

import gc
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: threads of two workers wait for each other's cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from fedloom.methods import registry

try:
    from hypothesis import settings
except ImportError:  # on a machine that only runs the GPU's tests
    pass
else:
    # The same inputs every time, so that the tests of one commit always say the same; `make fuzz` looks for new ones.
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.register_profile("search", derandomize=False, deadline=None, print_blob=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_configure(config: pytest.Config) -> None:
    """Where there is a GPU, runs that do not say otherwise take it: only those tests see it that are about it."""
    if "gpu" not in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts its background jobs like this
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collections: they take a tenth of the time."""
    gc.collect()
    gc.freeze()


FOLDERS = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = os.environ.get("FEDLOOM_DATA")
    for item in items:
        for mark in item.iter_markers("quick_if"):
            parameters = item.callspec.params  # type: ignore[attr-defined]  # of a parametrized function
            if any(parameters[name] not in values for name, values in mark.kwargs.items()):
                item.add_marker(pytest.mark.exhaustive)
        if item.get_closest_marker("flower") and find_spec("flwr") is None:
            item.add_marker(pytest.mark.skip(reason="Flower is not installed (make test-flower)"))
        for mark in item.iter_markers("data"):
            name = mark.args[0]
            if root is None or not (Path(root) / FOLDERS.get(name, name)).is_dir():
                item.add_marker(pytest.mark.skip(reason=f"the data set {name} is not in the folder FEDLOOM_DATA"))


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> Any:
        """What `--json` printed: one line and nothing else."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1, self.out
        assert self.out.endswith("\n")
        return json.loads(self.out)


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """`fedloom ARGUMENTS` in this process, which saves the two seconds of starting one; works in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Outcome:
        from fedloom.cli.main import main

        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Outcome(ended.value.code or 0, captured.out, captured.err)

    return call


@pytest.fixture(autouse=True, scope="session")
def _cache() -> Iterator[None]:
    """Decoded data of the tests are their own, shared among them, and too large to be left behind."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.delenv("FEDLOOM_CACHE", raising=False)
        patch.setenv("XDG_CACHE_HOME", folder)
        yield


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Methods that a test registers are forgotten after it."""
    known = registry.methods()
    yield
    registry._methods.clear()
    registry._methods.update(known)
