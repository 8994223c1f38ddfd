"""Tests of files written in pieces: hashes and reused memory."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.errors import FedloomError
from fedloom.utils import storage


class Slow:
    """A digest that takes its time."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def update(self, piece: Any) -> None:
        time.sleep(0.02)
        self.seen.append(bytes(piece))


@pytest.mark.parametrize("small", [0, 3, 99])
def test_a_piece_is_hashed_before_the_next_takes_its_place(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves a GPU goes through one and the same pinned memory, piece by piece."""
    monkeypatch.setattr(storage, "SMALL", small)

    def reused() -> Iterator[memoryview]:
        place = bytearray(4)
        for number in range(5):
            place[:] = bytes([number] * 4)
            yield memoryview(place)[: 4 - number % 3]

    slow: Any = Slow()
    written = [bytes(piece) for piece in storage._hashed(reused(), slow, lambda: None)]
    assert slow.seen == written
    assert [piece[0] for piece in written] == [0, 1, 2, 3, 4]


def test_tensors_that_were_read_lie_where_torch_puts_its_own(tmp_path: Path) -> None:
    """Or a run that goes on might round otherwise: products depend on it on some processors."""
    storage.write_safetensors(tmp_path / "t", {f"{size}": torch.randn(size) for size in (1, 3, 101, 7, 64, 5)})
    read = storage.read_safetensors(tmp_path / "t")
    assert all(tensor.shape == (int(name),) for name, tensor in read.items())
    assert {tensor.data_ptr() % 64 for tensor in read.values()} == {torch.randn(5).data_ptr() % 64}


def test_whoever_is_asked_between_pieces_may_end_it(tmp_path: Path) -> None:
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise FedloomError("enough")

    with pytest.raises(FedloomError, match="enough"):
        storage.write_safetensors(tmp_path / "file", {name: torch.ones(9) for name in "abc"}, check_cancelled=check)
    assert not list(tmp_path.iterdir())
