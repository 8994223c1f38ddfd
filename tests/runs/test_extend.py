"""Extended runs: the digest of a run of as many rounds, or a refusal."""

from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.errors import InputError
from fedloom.methods import methods
from tests.support.core_methods import CORE_METHODS
from tests.support.quick_options import QUICK
from tests.support.small_runs import TINY

READ_ROUNDS = {"dynafed", "fedcda", "fedasam-swa", "fedrep"}
"""Methods that are known to read the number of rounds."""


def without_times(run: fedloom.RunResult) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in run.history]


@pytest.mark.quick_if(method=[*CORE_METHODS, "fedrep", "fedasam-swa"])
@pytest.mark.parametrize("engine", ["sequential", pytest.param("multiprocess", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("method", sorted(methods()))
def test_every_method_is_extended_exactly_or_refused(method: str, engine: str, tmp_path: Path) -> None:
    settings = {
        **TINY,
        "engine": engine,
        "options": {name: values for name, values in QUICK.items() if name == method},
        "eval_every": 2,
        "model": "mlp-128" if method in ("fedbabu", "fedrep", "fedma", "gamf") else TINY["model"],
    }
    try:
        first = fedloom.run(method, out=tmp_path / "a", **{**settings, "rounds": 3})
    except InputError as error:
        pytest.skip(str(error))
    whole = fedloom.run(method, out=tmp_path / "b", **{**settings, "rounds": 4})
    before = {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file()}
    if method in READ_ROUNDS:
        with pytest.raises(InputError, match="depends on the number of rounds"):
            fedloom.resume(first.path, rounds=4)
        assert {path: path.read_bytes() for path in before} == before, "a refused run is left as it was"
        return
    extended = fedloom.resume(first.path, rounds=4)
    assert extended.digest == whole.digest
    assert without_times(extended) == without_times(whole), "the evaluation of the earlier last round is gone"
    assert extended.accuracy == whole.accuracy
    assert fedloom.verify(first.path)[1] == whole.digest


@pytest.mark.parametrize("engine", ["sequential", "multiprocess"])
def test_a_reader_of_rounds_is_noticed_in_a_worker_too(engine: str, tmp_path: Path) -> None:
    run = fedloom.run("fedrep", out=tmp_path / "a", **{**TINY, "engine": engine, "model": "mlp-128"})
    with pytest.raises(InputError, match=r"fedrep depends on the number of rounds.*fedloom run --config"):
        fedloom.resume(run.path, rounds=5)


def test_epsilon_is_accounted_on(tmp_path: Path) -> None:
    private = {**TINY, "clip_update": 1.0, "noise": 1.0, "delta": 0.01}
    short = fedloom.run("fedavg", out=tmp_path / "a", **private)
    whole = fedloom.run("fedavg", out=tmp_path / "b", **{**private, "rounds": 5})
    extended = fedloom.resume(short.path, rounds=5)
    assert extended.digest == whole.digest
    assert extended.summary["epsilon"] == whole.summary["epsilon"] > short.summary["epsilon"]


@pytest.mark.parametrize(
    ("rounds", "said"), [(2, "a larger number extends it"), (0, "rounds must be"), ("x", "rounds")]
)
def test_other_numbers_are_refused(rounds: Any, said: str, tmp_path: Path) -> None:
    run = fedloom.run("fedavg", out=tmp_path / "a", **TINY)
    with pytest.raises(InputError, match=said):
        fedloom.resume(run.path, rounds=rounds)
    assert fedloom.resume(run.path, rounds=3).digest == run.digest


def test_an_unfinished_run_is_finished_first(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", out=tmp_path / "a", **TINY)
    (run.path / "summary.json").unlink()
    with pytest.raises(InputError, match="has not finished"):
        fedloom.resume(run.path, rounds=5)
    assert fedloom.resume(run.path).digest == run.digest
    assert fedloom.resume(run.path, rounds=5).summary["rounds"] == 5
