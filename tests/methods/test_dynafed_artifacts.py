"""Tests of DynaFed's samples in the run directory and in the report.

One run is killed while it synthesizes them.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.runs.callback import Callback
from fedloom.utils.storage import read_safetensors
from tests.support.small_dynafed import convolutions, images

pytestmark = pytest.mark.usefixtures("one_thread")


class Interrupted(Callback):
    """Pulls the plug in the middle of the synthesis."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def on_server_progress(self, what: str, done: int, total: int) -> None:
        self.told.append((what, done, total))
        if done == 3:
            raise KeyboardInterrupt


def test_a_run_killed_in_the_synthesis_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Images, augmentation and batches too; and the other engine, for it must not matter."""
    settings = images(iterations=5, inner_batch=6, refine_batch=4)
    whole = fedloom.run("dynafed", out=tmp_path / "whole", **settings)
    watcher = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        fedloom.run("dynafed", out=tmp_path / "cut", callbacks=[watcher], checkpoint_seconds=0, **settings)
    assert watcher.told == [("synthesis", n, 5) for n in range(4)]
    assert not (tmp_path / "cut" / "synthetic.safetensors").exists()
    resumed = fedloom.resume(tmp_path / "cut", model=convolutions, report=False, engine="multiprocess", workers=2)
    assert resumed.digest == whole.digest
    files = [(run.path / "synthetic.safetensors").read_bytes() for run in (whole, resumed)]
    assert files[0] == files[1]


def test_the_samples_lie_in_the_folder_and_in_the_report(tmp_path: Path) -> None:
    run = fedloom.run("dynafed", out=tmp_path / "run", **{**images(iterations=3), "report": True})
    made = read_safetensors(tmp_path / "run" / "synthetic.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {
        "images": (10, 1, 8, 8),
        "labels": (10, 10),
        "rate": (),
        "losses": (3,),
        "mean": (1,),
        "std": (1,),
    }
    torch.testing.assert_close(made["labels"].sum(1), torch.ones(10))
    assert np.isfinite(run.history[2]["diagnostics"]["refiner.matching loss"])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Synthetic samples" in page
    assert page.count("data:image/png;base64,") >= 10


def test_nothing_is_shown_before_there_is_something_to_show(tmp_path: Path) -> None:
    run = fedloom.run("dynafed", out=tmp_path / "run", **{**images(L=20, s=5), "report": True})
    assert not (tmp_path / "run" / "synthetic.safetensors").exists()
    assert "Synthetic samples" not in (run.path / "report.html").read_text()
