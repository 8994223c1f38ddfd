"""Tests that server work stopped in a round continues with the same bits."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.config import make_config
from fedloom.errors import RunStopped
from fedloom.runs.build import build_run
from fedloom.runs.callback import Callback
from fedloom.runs.directory import RunDirectory
from fedloom.runs.resolve import resolve_run
from fedloom.utils import partial_results
from fedloom.utils.partial_results import PartialResults
from fedloom.utils.storage import write_json
from tests.support.rewritten_config import rewrite_config
from tests.support.small_dynafed import convolutions, images, refiner_of

pytestmark = pytest.mark.usefixtures("one_thread")
ITERATIONS = 6


class Watching(Callback):
    """Notes how far the synthesis is, and does something after a step of it."""

    def __init__(self, at: int = -1, then: Callable[[], None] = lambda: None) -> None:
        self.steps: list[int] = []
        self.messages: list[str] = []
        self.stop = False
        self._at, self._then = at, then

    def on_server_progress(self, what: str, done: int, total: int) -> None:
        assert (what, total) == ("synthesis", ITERATIONS)
        self.steps.append(done)
        if done == self._at:
            self._then()

    def on_message(self, text: str) -> None:
        self.messages.append(text)

    def should_stop(self) -> bool:
        return self.stop


class Killed(BaseException):
    """The process dies here."""


def die() -> None:
    raise Killed


def kept_in(folder: Path, seconds: float, wants_stop: Callable[[], bool], how_to_go_on: str) -> PartialResults:
    place = PartialResults()
    place.keep_in(folder, seconds, wants_stop, how_to_go_on)
    return place


def settings(**more: Any) -> dict[str, Any]:
    return {**images(iterations=ITERATIONS, inner_batch=6, refine_batch=4, **more), "checkpoint_seconds": 0}


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is kept, and nobody waits for the end of a round."""
    monkeypatch.setattr(partial_results, "PATIENCE", 0.0)


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_run_killed_in_the_synthesis_goes_on_where_it_was(optimizer: str, tmp_path: Path) -> None:
    given = settings(optimizer=optimizer)
    whole = fedloom.run("dynafed", out=tmp_path / "whole", **given)
    with pytest.raises(Killed):
        fedloom.run("dynafed", out=tmp_path / "cut", callbacks=[Watching(4, die)], **given)
    again = Watching(4, die)
    with pytest.raises(Killed):
        fedloom.resume(tmp_path / "cut", model=convolutions, report=False, callbacks=[again])
    assert again.steps == [3, 4], "three steps were kept"
    third = Watching()
    run = fedloom.resume(tmp_path / "cut", model=convolutions, report=False, callbacks=[third])
    assert third.steps == [3, 4, 5, 6]
    assert run.digest == whole.digest
    made = [(r.path / "synthetic.safetensors").read_bytes() for r in (run, whole)]
    assert made[0] == made[1]
    assert run.history[-1]["accuracy"] == whole.history[-1]["accuracy"]
    assert not (run.path / "partial").exists(), "a finished run has no draft"


@pytest.mark.usefixtures("_at_once")
def test_who_wants_it_to_stop_need_not_wait_for_the_synthesis(tmp_path: Path) -> None:
    given = settings()
    whole = fedloom.run("dynafed", out=tmp_path / "whole", **given)
    watcher = Watching(3, lambda: setattr(watcher, "stop", True))
    with pytest.raises(RunStopped, match=r"^stopped within a round, .*; continue with: fedloom resume .*cut$"):
        fedloom.run("dynafed", out=tmp_path / "cut", callbacks=[watcher], **given)
    assert watcher.steps == [0, 1, 2, 3]
    after = Watching()
    assert fedloom.resume(tmp_path / "cut", model=convolutions, report=False, callbacks=[after]).digest == whole.digest
    assert after.steps == [3, 4, 5, 6]


def test_a_short_synthesis_is_waited_for(tmp_path: Path) -> None:
    watcher = Watching(3, lambda: setattr(watcher, "stop", True))
    with pytest.raises(RunStopped, match="stopped after round 2"):
        fedloom.run("dynafed", out=tmp_path / "cut", callbacks=[watcher], **settings())
    assert watcher.steps == [*range(ITERATIONS + 1)]
    assert not (tmp_path / "cut" / "partial").exists(), "and nothing was worth keeping"


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("harm", ["other options", "other models", "damaged", "gone"])
def test_a_draft_that_is_not_its_own_is_not_used(harm: str, tmp_path: Path) -> None:
    given = settings()
    whole = fedloom.run("dynafed", out=tmp_path / "whole", **given)
    with pytest.raises(Killed):
        fedloom.run("dynafed", out=tmp_path / "cut", callbacks=[Watching(4, die)], **given)
    if harm == "other options":
        given = settings(inner_lr=0.5)
        whole = fedloom.run("dynafed", out=tmp_path / "other", **given)
        dynafed = RunDirectory.open(tmp_path / "cut").config.options["dynafed"]
        rewrite_config(tmp_path / "cut", options={"dynafed": {**dynafed, "inner_lr": 0.5}})
    if harm == "other models":
        given |= {"epochs": 2}
        whole = fedloom.run("dynafed", out=tmp_path / "other", **given)
        rewrite_config(tmp_path / "cut", epochs=2)
        shutil.rmtree(tmp_path / "cut" / "checkpoints")
    for path in (tmp_path / "cut" / "partial").glob("*"):
        if harm == "gone":
            path.unlink()
        elif harm == "damaged" and path.suffix == ".safetensors":
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    watcher = Watching()
    run = fedloom.resume(tmp_path / "cut", model=convolutions, report=False, callbacks=[watcher])
    assert watcher.steps == [*range(ITERATIONS + 1)], "it begins again"
    named = [text for text in watcher.messages if "partial" in text and "is damaged" in text]
    assert len(named) == (harm == "damaged")
    assert run.digest == whole.digest


class Noting(PartialResults):
    """Keeps nothing, and notes under what."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: set[str] = set()

    def load_partial(self, mark: str) -> None:
        self.marks.add(mark)

    def save_partial_if_due(self, mark: str, done: int, make_partial: Callable[[], Mapping[str, Any]]) -> None:
        self.marks.add(mark)


def test_the_samples_are_known_by_their_models_options_and_draws() -> None:
    def mark(seed: int = 0, models: tuple[int, int] = (0, 1), **options: Any) -> str:
        noting = Noting()
        values = {**images(**options), "method": "dynafed", "model": "mlp", "seed": seed}
        values.pop("report")
        with build_run(resolve_run(make_config(values))).engine_closed() as experiment:
            refiner = refiner_of(experiment)
            server = replace(refiner.context.server, partial_results=noting)
            refiner._synthesis.context = replace(refiner.context, server=server)
            refiner.trajectory = [torch.full((experiment.layout.size,), 0.01 * model) for model in models]
            refiner.synthesize()
        (found,) = noting.marks
        return found

    assert mark() == mark()
    assert len({mark(), mark(seed=1), mark(models=(0, 2)), mark(models=(1, 0)), mark(inner_lr=0.5)}) == 5


def test_drafts_are_kept_by_time_and_the_last_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = 0.0, list[int]()
    monkeypatch.setattr("fedloom.utils.partial_results.time.monotonic", lambda: now)
    place = kept_in(tmp_path, 10.0, lambda: False, "")

    def give(step: int) -> Mapping[str, Any]:
        asked.append(step)
        return {"step": step}

    for step in range(26):
        now = float(step)
        place.save_partial_if_due("work", step, lambda step=step: give(step))
    assert asked == [10, 20]
    assert place.load_partial("work") == {"step": 20}
    assert place.load_partial("other work") is None
    tensors, record = sorted(tmp_path.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert tensors.name == f"{record.stem}-000020.safetensors"
    now = 99.0
    left = tmp_path / f".{record.stem}-000019.safetensors.part"
    left.touch()  # by a process that died as it wrote
    place.save_partial_if_due("other work", 3, lambda: {"other": 3})
    assert (place.load_partial("work"), place.load_partial("other work")) == ({"step": 20}, {"other": 3}), (
        "neither takes another's place"
    )
    now = 199.0
    place.save_partial_if_due("work", 30, lambda: {"step": 30})
    assert place.load_partial("work") == {"step": 30}
    assert not left.exists()
    assert len([*tmp_path.iterdir()]) == 4
    place.clear()
    assert not tmp_path.exists()
    place.clear()


@pytest.mark.parametrize("seconds", [0.0, 1.0, 30.0])
def test_they_are_never_kept_more_often_than_every_few_seconds(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, kept = 0.0, list[float]()
    monkeypatch.setattr("fedloom.utils.partial_results.time.monotonic", lambda: now)
    place = kept_in(tmp_path, seconds, lambda: False, "")
    for tenth in range(1000):
        now = tenth / 10
        place.save_partial_if_due("work", tenth, lambda now=now: kept.append(now) or {})
    assert kept[0] == pytest.approx(max(seconds, partial_results.PATIENCE))
    assert all(b - a >= partial_results.PATIENCE for a, b in pairwise(kept))


def test_drafts_that_take_long_to_write_come_further_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, kept = 0.0, list[float]()
    monkeypatch.setattr("fedloom.utils.partial_results.time.monotonic", lambda: now)
    place = kept_in(tmp_path, 10.0, lambda: False, "")

    def slow() -> Mapping[str, Any]:
        kept.append(now)
        return {}

    def slowly(path: Path, value: Any) -> None:
        nonlocal now
        now += 4.0

    monkeypatch.setattr("fedloom.utils.partial_results.write_json", slowly)
    for second in range(500):
        now = max(now, float(second))
        place.save_partial_if_due("work", second, slow)
    assert kept == [10.0, 214.0, 418.0], "four seconds are a fiftieth of two hundred"


@pytest.mark.parametrize(("seconds", "drafts_made"), [(0.0, ITERATIONS), (1e6, 0)])
def test_a_run_keeps_drafts_as_often_as_checkpoints(
    seconds: float, drafts_made: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_results, "PATIENCE", 0.0)
    made: list[Path] = []

    def noted(path: Path, value: Any) -> None:
        made.append(path)
        write_json(path, value)

    monkeypatch.setattr("fedloom.utils.partial_results.write_json", noted)
    fedloom.run("dynafed", out=tmp_path / "run", **{**settings(), "checkpoint_seconds": seconds})
    assert [path.parent.name for path in made if path.parent.name != "checkpoints"] == ["partial"] * drafts_made


def test_a_run_that_dies_at_its_very_end_leaves_no_draft_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run is not played again, so that nobody would take it away."""
    monkeypatch.setattr(partial_results, "PATIENCE", 0.0)
    write = RunDirectory.write_summary

    def dies(self: RunDirectory, summary: dict[str, Any], **more: Any) -> None:
        write(self, summary, **more)
        raise Killed

    monkeypatch.setattr(RunDirectory, "write_summary", dies)
    with pytest.raises(Killed):
        fedloom.run("dynafed", out=tmp_path / "run", **settings())
    assert fedloom.resume(tmp_path / "run", model=convolutions, report=False).digest
    assert not (tmp_path / "run" / "partial").exists()


def test_who_wants_it_to_stop_waits_for_a_while_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("fedloom.utils.partial_results.time.monotonic", lambda: now)
    place = kept_in(tmp_path, 1e9, lambda: now >= 107, "go on")
    for each in (100.0, 106.9, 107.0, 111.9):
        now = each
        place.save_partial_if_due("work", 1, lambda: {"n": 1})
    assert place.load_partial("work") is None
    now = 112.0
    with pytest.raises(RunStopped, match="go on"):
        place.save_partial_if_due("work", 2, lambda: {"n": 2})
    assert place.load_partial("work") == {"n": 2}


def test_who_wants_it_to_stop_does_not_wait_for_two_long_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is longer than anybody's patience was under way when it was asked for; another would follow it."""
    now = 0.0
    monkeypatch.setattr("fedloom.utils.partial_results.time.monotonic", lambda: now)
    place = kept_in(tmp_path, 1e9, lambda: now > 100, "go on")
    place.save_partial_if_due("long", 1, lambda: {"n": 1})
    now = 180.0
    place.save_partial_if_due("other work", 1, lambda: {"n": 1})  # its first draft: it may be short
    with pytest.raises(RunStopped, match="go on"):
        place.save_partial_if_due("long", 2, lambda: {"n": 2})
    assert (place.load_partial("long"), place.load_partial("other work")) == ({"n": 2}, None)


def test_without_a_folder_nothing_is_kept_or_asked_for() -> None:
    nowhere = PartialResults()
    nowhere.save_partial_if_due("work", 1, die)
    assert nowhere.load_partial("work") is None
    nowhere.clear()


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize(
    ("dies", "found"),
    [
        ("fedloom.utils.partial_results.write_safetensors", 1),
        ("fedloom.utils.partial_results.write_json", 1),
        ("pathlib.Path.unlink", 2),
    ],
)
def test_a_draft_whose_writing_is_cut_off_does_not_cost_the_one_before(
    dies: str, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offer(value: int) -> None:
        place = kept_in(tmp_path, 0.0, lambda: False, "")
        place.save_partial_if_due("work", value, lambda: {"value": torch.full((3,), float(value))})

    offer(1)
    with monkeypatch.context() as patch:
        patch.setattr(dies, lambda *_, **__: die())
        with pytest.raises(Killed):
            offer(2)
    draft = kept_in(tmp_path, 0.0, lambda: False, "").load_partial("work")
    assert draft is not None
    assert draft["value"].tolist() == [found] * 3
    offer(3)
    assert len([*tmp_path.iterdir()]) == 2


def test_a_run_whose_rounds_cannot_be_played_again_is_not_stopped_within_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_results, "PATIENCE", 0.0)
    monkeypatch.setattr("fedloom.engines.base.Engine.checkpoint_every_round", True)
    watcher = Watching(3, lambda: setattr(watcher, "stop", True))
    with pytest.raises(RunStopped, match="stopped after round 2"):
        fedloom.run("dynafed", out=tmp_path / "cut", callbacks=[watcher], **settings())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.usefixtures("_at_once")
def test_on_a_gpu_recorded_steps_go_on_with_the_same_bits(tmp_path: Path) -> None:
    given = {**settings(), "engine": "cuda", "device": "cuda", "precision": "fp32"}
    whole = fedloom.run("dynafed", out=tmp_path / "whole", **given)
    with pytest.raises(Killed):
        fedloom.run("dynafed", out=tmp_path / "cut", callbacks=[Watching(5, die)], **given)
    run = fedloom.resume(tmp_path / "cut", model=convolutions, report=False)
    assert run.digest == whole.digest
    made = [(r.path / "synthetic.safetensors").read_bytes() for r in (run, whole)]
    assert made[0] == made[1]
