"""Who is interrupted at a bad moment of a checkpoint is told of that and nothing else, and loses nothing."""

from pathlib import Path

import pytest

from fedloom.beside import Beside
from fedloom.checkpoints import Checkpoints


def test_an_interrupt_is_told_where_nothing_was_ever_written_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is on a CPU, where each round looks all the same whether something went wrong with it."""

    def interrupted(_: Beside) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Beside, "settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).settle(wait=False)
