"""Tests of client states at a site: staged, then committed by the server."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.errors import InputError
from fedloom.flower.site.state import GENERATIONS, STAGED, SiteStateStore


def name(number: int) -> str:
    return f"{number:032x}"


def state(number: int) -> dict[str, torch.Tensor]:
    return {"c": torch.full((3,), float(number))}


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, GENERATIONS)), max_size=12))
def test_a_state_is_there_as_long_as_the_server_may_ask_for_it(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[tuple[bool, bool, int]]
) -> None:
    """Each round: (the server took the update, the site was restarted, how many rounds the server falls back)."""
    folder = tmp_path_factory.mktemp("kept")
    kept, taken = SiteStateStore(folder), list[int]()
    for number, (accepted, restarted, back) in enumerate(rounds, start=1):
        if restarted:
            kept = SiteStateStore(folder)
        if 0 < back < min(len(taken), GENERATIONS):  # it goes on from an older checkpoint
            taken = taken[:-back]
        if taken:
            found = kept.get(name(taken[-1]))
            assert found is not None
            assert torch.equal(found["c"], state(taken[-1])["c"])
        else:
            kept.forget()
        kept.stage(name(number), state(number))
        if accepted:
            taken.append(number)
        assert len(list(folder.glob("*.safetensors"))) <= GENERATIONS + 1


@pytest.mark.parametrize("restarted", [False, True])
def test_however_often_a_server_asks_the_disk_does_not_fill(tmp_path: Path, restarted: bool) -> None:
    kept = SiteStateStore(tmp_path)
    for number in range(1, GENERATIONS + 1):
        kept.stage(name(number), state(number))
        kept.get(name(number))
    for number in range(100, 150):
        kept = SiteStateStore(tmp_path) if restarted else kept
        kept.stage(name(number), state(number))
        assert len(list(tmp_path.glob("*.safetensors"))) <= GENERATIONS + STAGED
    found = SiteStateStore(tmp_path).get(name(150 - STAGED))
    assert found is not None, "the last few can still be taken"
    assert torch.equal(found["c"], state(150 - STAGED)["c"])
    assert SiteStateStore(tmp_path).get(name(100)) is None
    again = SiteStateStore(tmp_path).get(name(GENERATIONS))
    assert again is not None, "and what was taken before is there"


def test_what_was_not_taken_is_gone(tmp_path: Path) -> None:
    kept = SiteStateStore(tmp_path)
    kept.stage(name(1), state(1))
    kept.get(name(1))
    kept.stage(name(2), state(2))
    assert kept.get(name(1)) is not None
    assert kept.get(name(2)) is None
    assert SiteStateStore(tmp_path).get(name(2)) is None
    kept.forget()
    assert kept.get(name(1)) is None
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_damaged_state_is_not_used(tmp_path: Path) -> None:
    kept = SiteStateStore(tmp_path)
    kept.stage(name(1), state(1))
    file = tmp_path / f"{name(1)}.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        kept.get(name(1))


def test_a_nonce_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    for nonce in ("../../" + "a" * 26, "A" * 32, "", "a" * 31, "a" * 31 + "\n"):
        with pytest.raises(InputError, match="32 hexadecimal digits"):
            SiteStateStore(tmp_path).stage(nonce, state(1))
    assert not list(tmp_path.iterdir())
