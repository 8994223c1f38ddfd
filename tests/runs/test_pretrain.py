"""Tests of pretraining: ordinary training, exact, resumable, a start for runs."""

import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fedloom
from fedloom.config import PretrainConfig
from fedloom.core.rng import RngStreams
from fedloom.data import load_dataset, select_classes
from fedloom.errors import FedloomError, InputError
from fedloom.models import build_model
from fedloom.runs.callback import Callback
from fedloom.utils.storage import write_json

Command = Callable[..., Any]


class StopsAfter(Callback):
    """Asks to stop after some epochs."""

    def __init__(self, epochs: int) -> None:
        self.left, self.records, self.notes = epochs, list[Any](), list[str]()

    def on_message(self, text: str) -> None:
        self.notes.append(text)

    def on_round_end(self, record: Any) -> None:
        self.records.append(record)
        self.left -= 1

    def should_stop(self) -> bool:
        return self.left <= 0


def pretrain(out: Path, **settings: Any) -> fedloom.PretrainResult:
    return fedloom.pretrain("digits", out, **{"model": "logreg", "epochs": 3, **settings})


def test_it_is_ordinary_training(tmp_path: Path) -> None:
    """The same as a loop with torch.optim: the optimiser lives on between epochs and the rate follows the cosine."""
    settings = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "lr": 0.1}
    made = pretrain(tmp_path / "m.safetensors", **settings)
    dataset, streams = load_dataset("digits"), RngStreams(0)
    with streams.seed_global_rng("init"):
        module = build_model("logreg", (1, 8, 8), 10)
    steps = torch.optim.SGD(module.parameters(), **settings)
    x, y = dataset.transform(dataset.train.x), dataset.train.y
    for epoch in range(3):
        steps.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * epoch / 3)) / 2
        order = torch.from_numpy(streams.numpy("batches", epoch, 0).permutation(len(y)))
        for batch in order.split(64):
            steps.zero_grad()
            F.cross_entropy(module(x[batch]), y[batch]).backward()
            steps.step()
    for name, tensor in load_file(made.path).items():
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=1e-5, atol=1e-6)
    right = module(dataset.transform(dataset.test.x)).argmax(dim=1) == dataset.test.y
    assert made.accuracy == pytest.approx(float(right.float().mean()))
    assert made.accuracy > 0.9


def test_the_schedules() -> None:
    constant = PretrainConfig(data="digits", lr=0.3, schedule="constant", epochs=7).training_config()
    assert {constant.lr_at(epoch) for epoch in range(7)} == {0.3}
    cosine = [PretrainConfig(data="digits", lr=0.3, epochs=8).training_config().lr_at(epoch) for epoch in range(8)]
    assert cosine[0] == 0.3
    assert cosine[4] == pytest.approx(0.15)
    assert cosine == sorted(cosine, reverse=True)


def test_the_same_seed_gives_the_same_file_and_another_another(tmp_path: Path) -> None:
    one, two = pretrain(tmp_path / "a" / "m.safetensors"), pretrain(tmp_path / "b" / "m.safetensors")
    assert one.path.read_bytes() == two.path.read_bytes()
    assert one.sha256 == two.sha256
    assert pretrain(tmp_path / "c.safetensors", seed=1).digest != one.digest
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["m.safetensors"], "no checkpoint is left behind"


def test_a_gpu_is_told_to_compute_the_same_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test-gpu` makes a file twice; this holds where there is no GPU."""
    told: list[Any] = []
    monkeypatch.setattr("fedloom.runs.pretrain.set_precision", lambda *given, **named: told.append((given, named)))
    pretrain(tmp_path / "m.safetensors", epochs=1)
    assert told == [((torch.device("cpu"), "tf32"), {"deterministic": True})]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_stopped_and_gone_on_equals_uninterrupted(tmp_path: Path, optimizer: str) -> None:
    """With everything that has state: momentum or moments, augmentation, the schedule."""
    settings = {"optimizer": optimizer, "lr": 0.003, "epochs": 4, "augment": "crop+flip", "model": "cnn"}
    settings |= {"classes": "0-1"}
    whole = pretrain(tmp_path / "whole.safetensors", **settings)
    out = tmp_path / "m.safetensors"
    for _ in range(2):
        with pytest.raises(FedloomError, match="continue with the same command"):
            pretrain(out, callbacks=[StopsAfter(1)], **settings)
        assert not out.exists()
    last = StopsAfter(99)
    assert pretrain(out, callbacks=[last], **settings).digest == whole.digest
    assert [record["round"] for record in last.records] == [3, 4]
    assert not (tmp_path / "m.safetensors.unfinished").exists()


def test_killed_and_gone_on_equals_uninterrupted(tmp_path: Path) -> None:
    words = "digits --model mlp --epochs 60 --checkpoint-seconds 0 --json --quiet --out"
    start = [sys.executable, "-m", "fedloom", "pretrain", *shlex.split(words)]
    process = subprocess.Popen([*start, "m.safetensors"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    saved = tmp_path / "m.safetensors.unfinished" / "checkpoints"
    deadline = time.monotonic() + 120
    while not list(saved.glob("round-*.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "m.safetensors").exists()
    watcher = StopsAfter(99)
    went_on = fedloom.pretrain("digits", tmp_path / "m.safetensors", "mlp", epochs=60, callbacks=[watcher])
    assert watcher.records[0]["round"] > 1
    assert went_on.digest == fedloom.pretrain("digits", tmp_path / "whole.safetensors", "mlp", epochs=60).digest


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    whole, out = pretrain(tmp_path / "whole.safetensors"), tmp_path / "m.safetensors"
    with pytest.raises(FedloomError):
        pretrain(out, callbacks=[StopsAfter(2)], checkpoint_seconds=0)
    newest = tmp_path / "m.safetensors.unfinished" / "checkpoints" / "round-000002.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    watcher = StopsAfter(99)
    assert pretrain(out, callbacks=[watcher]).digest == whole.digest
    assert "Continuing from the checkpoint before it" in watcher.notes[0]


@pytest.mark.parametrize(("takes", "expected"), [(0.0, [3, 6]), (0.1, [3])])
def test_checkpoints_are_as_far_apart_as_was_asked_and_further_where_they_take_long(
    takes: float, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, saved = 0.0, list[int]()

    class EpochsOfASecond(Callback):
        def on_round_end(self, record: Any) -> None:
            nonlocal now
            now += 1.0

    def write(path: Path, record: dict[str, Any]) -> None:
        nonlocal now
        now += takes  # a tenth of a second is a fiftieth of five
        saved.append(record["round"])
        write_json(path, record)

    monkeypatch.setattr("fedloom.runs.checkpoints.time.monotonic", lambda: now)
    monkeypatch.setattr("fedloom.runs.checkpoints.write_json", write)
    pretrain(tmp_path / "m.safetensors", epochs=8, checkpoint_seconds=3, callbacks=[EpochsOfASecond()])
    assert saved == expected


def test_a_finished_one_is_returned_and_never_written_over(tmp_path: Path) -> None:
    out = tmp_path / "m.safetensors"
    made, changed = pretrain(out), out.stat().st_mtime_ns
    watcher = StopsAfter(0)
    assert pretrain(out, callbacks=[watcher], checkpoint_seconds=7).metadata == made.metadata
    assert watcher.records == []
    with pytest.raises(InputError, match=r"with lr 0\.05, not 0\.1; choose another --out"):
        pretrain(out, lr=0.1)
    assert out.stat().st_mtime_ns == changed
    save_file({"a": torch.ones(1)}, out)
    with pytest.raises(InputError, match="not made by fedloom pretrain"):
        pretrain(out)


def test_the_unfinished_of_other_settings_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "m.safetensors"
    with pytest.raises(FedloomError):
        pretrain(out, callbacks=[StopsAfter(1)])
    with pytest.raises(InputError, match=r"unfinished is a pretraining with epochs 3, not 5"):
        pretrain(out, epochs=5)


def test_the_file_says_what_it_is(command: Command, tmp_path: Path) -> None:
    words = ("digits", "--model", "logreg", "--epochs", 2, "--classes", "3,5,7", "--seed", 4, "--no-channels-last")
    result = command("pretrain", *words, "--out", "m.safetensors", "--json").result
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        about = json.loads(file.metadata()["fedloom"])
        assert tuple(file.get_tensor("head.weight").shape) == (3, 64)
    assert about["class_names"] == ["3", "5", "7"]
    assert (about["model"], about["shape"], about["classes"], about["data"], about["seed"]) == (
        *("logreg", [1, 8, 8], 3, "digits", 4),
    )
    assert [record["epoch"] for record in about["history"]] == [1, 2]
    assert about["accuracy"] == about["history"][-1]["accuracy"] == result["accuracy"]
    again = shlex.split(about["command"])
    (tmp_path / "m.safetensors").rename(tmp_path / "first.safetensors")
    assert command(*again[1:], "-q").code == 0
    assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "first.safetensors").read_bytes()


def test_progress_and_result_for_people(command: Command, tmp_path: Path) -> None:
    ended = command("pretrain", "digits", "--model", "logreg", "--epochs", 2, "-o", "m.safetensors")
    assert ended.code == 0
    assert "2 epochs" in ended.err
    assert "epoch 2/2" in ended.err
    assert ended.out.startswith("accuracy  9")
    assert "10 classes of digits" in ended.out
    everything = command("pretrain", "--help").out
    for name in PretrainConfig.model_fields:
        if name != "data":
            assert f"-{name.replace('_', '-')} " in everything


def test_half_of_the_classes_then_the_rest_is_two_commands(command: Command, tmp_path: Path) -> None:
    assert command("pretrain", "digits", "--classes", "0-4", "--out", "half.safetensors", "-q").code == 0
    run = ("run", "fedavg", "--classes", "5-9", "--clients", 5, "--rounds", 1, "--partition", "dirichlet:1")
    ended = command(*run, "--init", "half.safetensors", "--out", "r")
    assert ended.code == 0, ended.err
    assert "6 of 6 tensors" in ended.err
    assert "trained for the classes 0, 1, 2, 3, 4; use --new-head" in ended.err
    names = json.loads((tmp_path / "r" / "partition.json").read_text())["class_names"]
    assert names == ["5", "6", "7", "8", "9"]
    ended = command(*run, "--init", "half.safetensors", "--new-head", "--out", "s")
    assert "new classifier head.weight, head.bias (as requested)" in ended.err
    assert "--new-head starts" not in ended.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pretrain digitz --out m", ("'digitz'", "'digits'")),
        ("pretrain digits", ("--out",)),
        ("pretrain --out m", ("data",)),
        ("pretrain digits --out m --model mpl", ("'mpl'", "'mlp'")),
        ("pretrain digits --out m --model lenet", ("'lenet'", "8 x 8")),
        ("pretrain digits --out m --epochs 0", ("epochs",)),
        ("pretrain digits --out m --lr nan", ("lr",)),
        ("pretrain digits --out m --schedule cosin", ("'cosine'", "'cosin'")),
        ("pretrain digits --out m --augment flap", ("'flap'",)),
        ("pretrain digits --out m --nesterov --momentum 0", ("momentum",)),
        ("pretrain digits --out m --device toaster", ("'toaster'",)),
        ("pretrain digits --out m --classes 5", ("only one",)),
        ("pretrain digits --out m --classes 5-12", ("no class 12",)),
        ("pretrain digits --out m --classes 4-2", ("backwards", "2-4")),
        ("pretrain digits --out m --classes 0-3,2", ("class 2 twice",)),
        ("pretrain digits --out m --classes cats", ("'cats'", "0-4")),
        ("pretrain digits --out .", ("folder",)),
        (f"pretrain digits --out {'x' * 300}", ("File name too long",)),
        ("run fedavg --classes 0-10", ("no class 10",)),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    command: Command, tmp_path: Path, line: str, words: tuple[str, ...]
) -> None:
    ended = command(*line.split())
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith("fedloom: ")
    for word in words:
        assert word in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_blows_up_is_said_to(tmp_path: Path) -> None:
    with pytest.raises(FedloomError, match="not finite after epoch 1; try a smaller lr"):
        pretrain(tmp_path / "m.safetensors", lr=1e38)
    assert not (tmp_path / "m.safetensors").exists()


def test_classes_are_kept_renumbered_and_named() -> None:
    everything = load_dataset("digits")
    part = select_classes(everything, "7, 2-3")
    assert (part.classes, part.class_names) == (3, ("2", "3", "7"))
    for samples, before in ((part.train, everything.train), (part.test, everything.test)):
        kept = torch.isin(before.y, torch.tensor([2, 3, 7]))
        assert torch.equal(samples.x, before.x[kept])
        assert torch.equal(torch.tensor([2, 3, 7])[samples.y], before.y[kept])
    assert select_classes(everything, None) is everything


def test_classes_of_your_own_data_cannot_be_picked() -> None:
    x, y = torch.randn(20, 4), torch.arange(20) % 4
    mine = fedloom.FederatedDataset.from_arrays([(x, y)], test=(x, y))
    with pytest.raises(InputError, match="given by name"):
        fedloom.run(data=mine, model="logreg", classes="0-1")
