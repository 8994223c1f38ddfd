"""Tests of the choice of cuDNN's kernels."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import nn

from fedloom.devices import precision
from fedloom.devices.precision import (
    SECOND_RULE,
    _has_narrow_convolutions,
    choose_cudnn_heuristic,
    prefers_channels_last,
)
from fedloom.models import build_model

GPU = torch.device("cuda")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What the environment says at each convolution, with CPUs for GPUs."""
    found: list[str | None] = []
    ones = torch.ones
    monkeypatch.delenv(SECOND_RULE, raising=False)
    monkeypatch.setattr(precision, "_second", None)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    monkeypatch.setattr(precision.F, "conv2d", lambda *given: found.append(os.environ.get(SECOND_RULE)))
    return found


@pytest.mark.parametrize(
    ("model", "narrow"),
    [("lenet", False), ("cnn", True), ("resnet20", True), ("vgg16", False), ("resnet18", False), ("mlp", False)],
)
def test_which_networks_are_narrow(model: str, narrow: bool) -> None:
    assert _has_narrow_convolutions(build_model(model, (3, 32, 32), 10)) is narrow


@pytest.mark.parametrize(
    ("model", "faster"),
    [
        ("resnet18", True),
        ("resnet50", True),
        ("vgg16", True),
        ("vgg16:norm=none", False),
        ("resnet18:norm=group", False),
        ("resnet20", False),
        ("convnet", False),
        ("cnn", False),
        ("mlp", False),
    ],
)
def test_a_gpu_has_images_in_the_order_in_which_it_was_faster(model: str, faster: bool) -> None:
    module = build_model(model, (3, 32, 32), 10)
    found = {bits: prefers_channels_last(module, bits) for bits in ("fp32", "tf32", "bf16")}
    assert found == {"fp32": False, "tf32": faster, "bf16": True}


def test_torch_looks_while_the_second_rule_is_asked_for(seen: list[str | None]) -> None:
    choose_cudnn_heuristic(nn.Conv2d(3, 16, 3), GPU, "bf16", deterministic=True)
    assert seen == ["1"]
    assert SECOND_RULE not in os.environ, "other processes decide for themselves"


@pytest.mark.parametrize(
    ("module", "device", "bits", "deterministic"),
    [
        (nn.Conv2d(3, 65, 3), GPU, "bf16", True),
        (nn.Linear(3, 16), GPU, "bf16", True),
        (nn.Conv2d(3, 16, 3), GPU, "tf32", True),
        (nn.Conv2d(3, 16, 3), GPU, "fp32", True),
        (nn.Conv2d(3, 16, 3), GPU, "bf16", False),
        (nn.Conv2d(3, 16, 3), torch.device("cpu"), "bf16", True),
    ],
)
def test_elsewhere_torch_finds_the_environment_as_it_is(
    seen: list[str | None], module: nn.Module, device: torch.device, bits: str, deterministic: bool
) -> None:
    choose_cudnn_heuristic(module, device, bits, deterministic)
    assert not seen
    assert SECOND_RULE not in os.environ


NARROW, WIDE = (nn.Conv2d(3, 32, 3), "bf16"), (nn.Conv2d(3, 65, 3), "bf16")


@pytest.mark.parametrize(
    ("first", "second", "noted"),
    [
        (NARROW, NARROW, False),
        (WIDE, WIDE, False),
        (NARROW, WIDE, True),
        (WIDE, NARROW, True),
        (NARROW, (nn.Linear(3, 16), "bf16"), False),
    ],
)
def test_the_first_run_of_a_process_decides(
    seen: list[str | None],
    caplog: pytest.LogCaptureFixture,
    first: tuple[nn.Module, str],
    second: tuple[nn.Module, str],
    noted: bool,
) -> None:
    choose_cudnn_heuristic(first[0], GPU, first[1], deterministic=True)
    before = len(seen)
    assert not caplog.messages
    choose_cudnn_heuristic(second[0], GPU, second[1], deterministic=True)
    assert len(seen) == before
    assert any("first run of this process" in said for said in caplog.messages) is noted


@pytest.mark.parametrize("said", ["0", "1"])
def test_the_environment_has_the_last_word(said: str, seen: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECOND_RULE, said)
    choose_cudnn_heuristic(nn.Conv2d(3, 16, 3), GPU, "bf16", deterministic=True)
    assert not seen
    assert os.environ[SECOND_RULE] == said


def test_nothing_is_left_behind_when_the_gpu_cannot(seen: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(precision.F, "conv2d", fails)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        choose_cudnn_heuristic(nn.Conv2d(3, 16, 3), GPU, "bf16", deterministic=True)
    assert SECOND_RULE not in os.environ
    assert precision._second is None, "the next run is to make torch look"


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_that_lets_torch_look_by_itself_decides_too(
    seen: list[str | None], caplog: pytest.LogCaptureFixture, deterministic: bool
) -> None:
    """With `--fast`, or with no convolution over images, torch looks all the same."""
    choose_cudnn_heuristic(nn.Conv1d(3, 16, 3) if deterministic else nn.Conv2d(3, 16, 3), GPU, "bf16", deterministic)
    choose_cudnn_heuristic(nn.Conv2d(3, 16, 3), GPU, "bf16", deterministic=True)
    assert not seen
    assert "first run of this process" in caplog.text


def test_runs_at_once_do_not_take_each_others_choice_for_somebodys_word(
    seen: list[str | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looking, go_on = Event(), Event()

    def slow(*given: object) -> None:
        looking.set()
        assert go_on.wait(30)

    monkeypatch.setattr(precision.F, "conv2d", slow)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(choose_cudnn_heuristic, nn.Conv2d(3, 16, 3), GPU, "bf16", True)
        assert looking.wait(30)
        other = pool.submit(choose_cudnn_heuristic, nn.Conv2d(3, 65, 3), GPU, "bf16", True)
        with pytest.raises(TimeoutError):
            other.result(0.2)
        go_on.set()
        one.result(30)
        other.result(30)
    assert "first run of this process" in caplog.text


TRAINED_IN_BF16 = """
from hashlib import sha256
from tests.support.cuda_agreement import experiment_of, jobs_of, trained_at_once

given = {"precision": "bf16", "channels_last": True}
with experiment_of("resnet20", "cuda", double=False, **given).engine_closed() as experiment:
    rows, _ = trained_at_once(experiment, jobs_of(experiment), "cuda")
print(sha256(b"".join(row.cpu().numpy().tobytes() for row in rows)).hexdigest())
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_narrow_network_in_bf16_has_the_same_kernels_in_every_process() -> None:
    """Those of the second rule, for which torch looks once in a process."""
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    known = {name: value for name, value in os.environ.items() if name != SECOND_RULE} | {"PYTHONPATH": paths}
    command = [sys.executable, "-c", TRAINED_IN_BF16]
    rules: list[dict[str, str]] = [{}, {}, {SECOND_RULE: "1"}, {SECOND_RULE: "0"}]
    processes = [subprocess.Popen(command, env=known | rule, stdout=subprocess.PIPE, text=True) for rule in rules]
    ours, again, second, first = (process.communicate()[0] for process in processes)
    assert len(ours.strip()) == 64
    assert ours == again == second
    assert ours != first, "this network cannot tell the rules apart"
