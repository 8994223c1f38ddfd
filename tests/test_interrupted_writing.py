"""Who is interrupted at a bad moment of a checkpoint is told of that and nothing else, and loses nothing."""

from pathlib import Path

import pytest
import torch

from fedloom.beside import Beside
from fedloom.checkpoints import Checkpoints
from fedloom.engines.base import Homes


def test_an_interrupt_is_told_where_nothing_was_ever_written_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is on a CPU, where each round looks all the same whether something went wrong with it."""

    def interrupted(_: Beside) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Beside, "settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).settle(wait=False)


def test_what_was_broken_off_does_not_break_off_one_that_is_written_at_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.abandon()
    checkpoints.save(1, {"model": torch.ones(2)}, Homes({}, torch.float32))
    assert checkpoints.rounds() == [1]
