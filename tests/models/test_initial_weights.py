"""Tests of initial weights: what is loaded, what is new, what is rejected."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedloom
from fedloom.core.rng import RngStreams
from fedloom.errors import InputError
from fedloom.models import build_model
from fedloom.models.initial_weights import InitialWeights, load_initial_weights, read_initial_weights
from fedloom.report import make_comparison_table, read_run_record
from fedloom.runs.callback import Callback

Command = Callable[..., Any]
TINY = ("--clients", 4, "--rounds", 2, "--epochs", 1, "--workers", 1)
SETTINGS: dict[str, Any] = {"clients": 4, "rounds": 2, "epochs": 1, "engine": "sequential", "report": False}


def network(classes: int = 10, seed: int = 1, name: str = "mlp") -> nn.Module:
    torch.manual_seed(seed)
    return build_model(name, (1, 8, 8), classes)


def begin(module: nn.Module, path: Path, **options: Any) -> InitialWeights:
    return load_initial_weights(module, read_initial_weights(path), RngStreams(0), **options)


def same(one: nn.Module, other: nn.Module, *, but: tuple[str, ...] = ()) -> bool:
    pairs = ((name, tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
    return all(torch.equal(a, b) != (name in but) for name, a, b in pairs)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "start.safetensors"
    save_file(network().state_dict(), path)
    return path


# what is taken over


def test_all_tensors_are_taken_over(file: Path) -> None:
    module = network(seed=2)
    begun = begin(module, file)
    assert same(module, network())
    assert begun.matched == tuple(module.state_dict())
    assert (begun.replaced, begun.missing, begun.unexpected) == ((), (), ())
    assert begun.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def wrap(kind: str, state: dict[str, Tensor]) -> Any:
    if kind in ("module.", "model.", "_orig_mod.", "module.model."):
        return {f"{kind}{name}": tensor for name, tensor in state.items()}
    if kind == "two wrappers":
        return {"model": {"state_dict": wrap("module.", state)}, "optimizer": {"lr": 0.1}}
    return {kind: state, "epoch": 3}


@pytest.mark.parametrize(
    "kind", ["module.", "model.", "_orig_mod.", "module.model.", "state_dict", "model", "two wrappers"]
)
def test_prefixes_and_wrappers_are_seen_through(tmp_path: Path, kind: str) -> None:
    torch.save(wrap(kind, dict(network().state_dict())), tmp_path / "start.pt")
    module = network(seed=2)
    begun = begin(module, tmp_path / "start.pt")
    assert same(module, network())
    assert (begun.missing, begun.unexpected) == ((), ())


@pytest.mark.parametrize("legacy", [False, True])
def test_both_formats_of_torch_are_read(tmp_path: Path, legacy: bool) -> None:
    torch.save(network().state_dict(), tmp_path / "start.pt", _use_new_zipfile_serialization=not legacy)
    module = network(seed=2)
    begin(module, tmp_path / "start.pt")
    assert same(module, network())


def test_what_is_missing_and_what_is_unexpected_is_listed(tmp_path: Path) -> None:
    state = {**network().state_dict(), "extra.weight": torch.ones(2)}
    del state["fc2.bias"]
    save_file(state, tmp_path / "start.safetensors")
    module = network(seed=2)
    begun = begin(module, tmp_path / "start.safetensors")
    assert (begun.missing, begun.unexpected) == (("fc2.bias",), ("extra.weight",))
    assert torch.equal(module.state_dict()["fc2.bias"], network(seed=2).state_dict()["fc2.bias"])
    for word in ("5 of 6", "missing in the file: fc2.bias", "unexpected in it: extra.weight"):
        assert word in begun.describe()


def test_half_precision_becomes_single(tmp_path: Path) -> None:
    save_file({name: tensor.half() for name, tensor in network().state_dict().items()}, tmp_path / "s.safetensors")
    module = network(seed=2)
    begin(module, tmp_path / "s.safetensors")
    weight = module.get_parameter("fc1.weight")
    assert weight.dtype is torch.float32
    assert torch.equal(weight, network().get_parameter("fc1.weight").half().float())


# the classifier


def test_a_classifier_for_other_classes_is_made_new_by_the_keyed_stream(file: Path) -> None:
    one, other, third = network(5, seed=2), network(5, seed=3), network(5, seed=2)
    begun = begin(one, file)
    assert begun.replaced == ("head.weight", "head.bias")
    assert begun.new_classifier_reason == "10 classes in the file, 5 in the network"
    assert torch.equal(one.get_parameter("fc2.weight"), network().get_parameter("fc2.weight"))
    begin(other, file)
    assert same(one, other), "whatever the network held before"
    load_initial_weights(third, read_initial_weights(file), RngStreams(1))
    assert same(one, third, but=("head.weight", "head.bias")), "and another seed draws another"


def test_a_new_classifier_can_be_asked_for(file: Path) -> None:
    module = network(seed=2)
    assert begin(module, file, new_head=True).replaced == ("head.weight", "head.bias")
    assert same(module, network(), but=("head.weight", "head.bias"))


def test_without_a_head_the_last_linear_layer_is_the_classifier(tmp_path: Path) -> None:
    def own(classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, classes))

    save_file(own(3).state_dict(), tmp_path / "own.safetensors")
    assert begin(own(10), tmp_path / "own.safetensors").replaced == ("3.weight", "3.bias")


# refused


def test_other_shapes_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    state = dict(network().state_dict()) | {"fc2.weight": torch.zeros(200, 100), "fc2.bias": torch.zeros(100)}
    save_file(state, tmp_path / "s.safetensors")
    module = network(seed=2)
    with pytest.raises(InputError, match=r"fc2\.weight is 200 x 100 in the file and 200 x 200 .*\(and 1 more\)"):
        begin(module, tmp_path / "s.safetensors", model_name="mlp")
    assert same(module, network(seed=2))


def test_a_classifier_of_another_width_is_refused(tmp_path: Path) -> None:
    state = dict(network().state_dict()) | {"head.weight": torch.zeros(5, 7)}
    save_file(state, tmp_path / "s.safetensors")
    with pytest.raises(InputError, match=r"head\.weight is 5 x 7 in the file and 10 x 200"):
        begin(network(), tmp_path / "s.safetensors")


def test_nothing_in_common_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "s.safetensors")
    with pytest.raises(InputError, match="has no tensors for the network 'mlp'"):
        begin(network(), tmp_path / "s.safetensors", model_name="mlp")
    save_file(network(name="logreg").state_dict(), tmp_path / "l.safetensors")
    with pytest.raises(InputError, match="has no tensors for"):  # only a classifier, and that for other classes
        begin(network(5, name="logreg"), tmp_path / "l.safetensors")


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    state = dict(network().state_dict()) | {"fc2.bias": torch.full((200,), torch.nan)}
    save_file(state, tmp_path / "s.safetensors")
    with pytest.raises(InputError, match=r"fc2\.bias in .* not finite"):
        begin(network(), tmp_path / "s.safetensors")


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_a_pickle_with_code_is_refused_and_not_executed(tmp_path: Path) -> None:
    exploded = tmp_path / "exploded"
    pickle.loads(pickle.dumps(Bomb(exploded)))  # the danger is real
    exploded.rmdir()
    torch.save({"fc1.weight": Bomb(exploded)}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"fc1.weight": Bomb(exploded)}))
    torch.save(network(), tmp_path / "module.pt")
    for name in ("zip.pt", "plain.pt", "module.pt"):
        with pytest.raises(InputError, match="could execute code"):
            read_initial_weights(tmp_path / name)
    assert not exploded.exists()


BROKEN: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "missing": (lambda file, out: None, "No such file"),
    "cut": (lambda file, out: _write(out, file.read_bytes()[:-9]), "not a whole safetensors file"),
    "cut header": (lambda file, out: _write(out, file.read_bytes()[:20]), "not a whole safetensors file"),
    "empty": (lambda file, out: _write(out, b""), "not a whole safetensors file"),
    "folder": (lambda file, out: out.mkdir(), "no model.safetensors"),
    "wrong model": (lambda file, out: save_file(network(name="cnn").state_dict(), out), "does not fit"),
    "no tensors": (lambda file, out: save_file({}, out), "no named tensors"),
}


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


@pytest.mark.parametrize("how", BROKEN)
def test_bad_files_end_in_one_sentence_and_nothing_is_written(
    command: Command, file: Path, tmp_path: Path, how: str
) -> None:
    breaks, words = BROKEN[how]
    breaks(file, tmp_path / "bad.safetensors")
    ended = command("run", "fedavg", *TINY, "--init", "bad.safetensors", "--out", "r", "--quiet")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("fedloom: ")
    assert ended.err.count("\n") == 1
    assert words in ended.err
    assert "bad.safetensors" in ended.err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(("content", "words"), [(b"PK\x03\x04 cut", "whole torch file"), (b"hello", "neither")])
def test_other_files_are_refused(command: Command, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "bad.pt").write_bytes(content)
    ended = command("run", "fedavg", *TINY, "--init", "bad.pt", "-q")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert words in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--new-head",), "no init is given"),
        (("--init-sha256", "0" * 64), "no init is given"),
        (("--init", "start.safetensors", "--init-sha256", "0" * 64), "not the expected file"),
        (("--init", "start.safetensors", "--init-sha256", "xyz"), "64 hexadecimal digits"),
        (("--init", "a\x00b"), "cannot read"),
    ],
)
def test_settings_that_make_no_sense(command: Command, file: Path, words: tuple[str, ...], said: str) -> None:
    ended = command("run", "fedavg", *TINY, *words)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert said in ended.err


# runs


def test_a_run_in_runs_goes_by_its_name(command: Command, tmp_path: Path) -> None:
    """From where the run was made; a file of that name comes first, and a path is taken as it is."""
    first = command("run", "fedavg", *TINY, "--out", "runs/first", "--quiet", "--json").result
    by_path = command("run", "fedavg", *TINY, "--init", "runs/first", "--out", "a", "--quiet", "--json").result
    by_name = command("run", "fedavg", *TINY, "--init", "first", "--out", "b", "--quiet", "--json").result
    assert by_name["digest"] == by_path["digest"] != first["digest"]
    assert fedloom.runs.execute.RunDirectory.open(tmp_path / "b").config.init == str(tmp_path / "runs" / "first")
    save_file(network().state_dict(), tmp_path / "first")
    by_file = command("run", "fedavg", *TINY, "--init", "first", "--out", "c", "--quiet", "--json").result
    assert by_file["digest"] != by_name["digest"]
    for other in ("second", "deep/first"):
        ended = command("run", "fedavg", *TINY, "--init", other, "--out", "d", "--quiet")
        assert (ended.code, ended.err.count("\n")) == (2, 1)
        assert "cannot read" in ended.err


def test_a_run_starts_there_and_says_what_it_took(command: Command, file: Path, tmp_path: Path) -> None:
    ended = command("run", "fedavg", *TINY, "--classes", "0-4", "--init", "start.safetensors", "--out", "r")
    assert ended.code == 0, ended.err
    assert "4 of 6 tensors taken from" in ended.err
    assert "new classifier head.weight, head.bias (10 classes in the file, 5 in the network)" in ended.err
    record = json.loads((tmp_path / "r" / "initial.json").read_text())
    assert record["matched"] == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert record["replaced"] == ["head.weight", "head.bias"]
    config = fedloom.runs.execute.RunDirectory.open(tmp_path / "r").config
    assert config.init == str(file)
    assert config.init_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    start = load_file(tmp_path / "r" / "initial.safetensors")
    assert torch.equal(start["fc1.weight"], network().state_dict()["fc1.weight"])
    again = fedloom.verify(tmp_path / "r")
    assert again[0] == again[1]


def test_the_first_record_is_that_of_the_given_model(file: Path, tmp_path: Path) -> None:
    trained = fedloom.run(out=tmp_path / "a", **{**SETTINGS, "rounds": 5})
    further = fedloom.run(init=str(tmp_path / "a"), out=tmp_path / "b", **SETTINGS)
    assert further.history[0]["accuracy"] == trained.accuracy
    assert further.config.init_sha256 == hashlib.sha256((tmp_path / "a/model.safetensors").read_bytes()).hexdigest()
    assert torch.equal(
        further.model().get_parameter("head.bias"), load_file(further.path / "model.safetensors")["head.bias"]
    )


def test_your_own_module_starts_there_and_is_left_alone(tmp_path: Path) -> None:
    def own(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        layers[1].requires_grad_(False)
        return layers

    save_file(own(1).state_dict(), tmp_path / "own.safetensors")
    mine = own(2)
    run = fedloom.run(model=mine, init=str(tmp_path / "own.safetensors"), out=tmp_path / "r", **SETTINGS)
    assert same(mine, own(2))
    tensors = load_file(run.path / "model.safetensors")
    assert torch.equal(tensors["1.weight"], own(1).state_dict()["1.weight"]), "the frozen layer comes from the file"


class StopsAfter(Callback):
    """Asks a run to stop after some rounds, and keeps the notes."""

    def __init__(self, rounds: int) -> None:
        self.left, self.notes = rounds, list[str]()

    def on_message(self, text: str) -> None:
        self.notes.append(text)

    def on_round_end(self, record: Any) -> None:
        self.left -= record["round"] > 0

    def should_stop(self) -> bool:
        return self.left <= 0


@pytest.mark.parametrize("fate", ["there", "gone", "changed"])
def test_a_stopped_run_goes_on_whatever_became_of_the_file(file: Path, tmp_path: Path, fate: str) -> None:
    settings = {**SETTINGS, "rounds": 3, "init": str(file), "classes": "3-9"}
    whole = fedloom.run(out=tmp_path / "whole", **settings)
    with pytest.raises(fedloom.FedloomError, match="stopped after round 1"):
        fedloom.run(out=tmp_path / "r", callbacks=[StopsAfter(1)], **settings)
    if fate == "gone":
        file.unlink()
    if fate == "changed":
        save_file(network(seed=9).state_dict(), file)
    watcher = StopsAfter(99)
    assert fedloom.resume(tmp_path / "r", callbacks=[watcher], report=False).digest == whole.digest
    assert ["gone or has changed" in note for note in watcher.notes] == [True] * (fate != "there")
    watcher = StopsAfter(99)
    assert fedloom.verify(tmp_path / "r", callbacks=[watcher]) == (whole.digest, whole.digest)
    assert len(watcher.notes) == (fate != "there")


def test_a_run_that_was_killed_before_its_copy_was_made_needs_the_same_file(file: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "init": str(file)}
    whole = fedloom.run(out=tmp_path / "r", **settings)
    content = file.read_bytes()
    for name in ("summary.json", "initial.json"):
        (tmp_path / "r" / name).unlink()
    save_file(network(seed=9).state_dict(), file)
    with pytest.raises(InputError, match="not the expected file"):
        fedloom.resume(tmp_path / "r")
    file.unlink()
    with pytest.raises(InputError, match="No such file"):
        fedloom.resume(tmp_path / "r")
    file.write_bytes(content)
    assert fedloom.resume(tmp_path / "r", report=False).digest == whole.digest
    assert (tmp_path / "r" / "initial.json").exists()


def test_a_damaged_copy_is_refused(file: Path, tmp_path: Path) -> None:
    fedloom.run(out=tmp_path / "r", init=str(file), **SETTINGS)
    (tmp_path / "r" / "summary.json").unlink()
    copy = tmp_path / "r" / "initial.safetensors"
    copy.write_bytes(copy.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match=r"initial\.safetensors is damaged"):
        fedloom.resume(tmp_path / "r")


def test_a_comparison_notices_that_the_file_has_changed(command: Command, file: Path) -> None:
    words = ("compare", "fedavg", *TINY, "--init", file, "--out", "c", "-q")
    assert command(*words).code == 0
    assert command(*words).code == 0, "it goes on with what is there"
    save_file(network(seed=9).state_dict(), file)
    ended = command(*words)
    assert ended.code == 2
    assert "init_sha256" in ended.err


def test_the_report_tells_starts_and_tasks_apart(command: Command, file: Path, tmp_path: Path) -> None:
    for name, words in {"a": (), "b": ("--init", file), "c": ("--init", file, "--classes", "0-4")}.items():
        assert command("run", "fedavg", *TINY, *words, "--out", name, "-q").code == 0
    page = (tmp_path / "c" / "report.html").read_text()
    assert "Initial weights" in page
    assert "head.weight and head.bias" in page
    assert "Initial weights" not in (tmp_path / "a" / "report.html").read_text()
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    table = make_comparison_table([read_run_record(tmp_path / name) for name in "abc"], None)
    labels = [group.label for group in table.groups]
    assert len(set(labels)) == 3
    assert f"init=start.safetensors {sha256[:8]}" in labels[1]
    assert "classes 0-4" in labels[2]
