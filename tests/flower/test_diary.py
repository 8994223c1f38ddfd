"""What a site does not forget of a models key."""

from pathlib import Path

import pytest

from fedloom.flower.diary import MOST_BEGINNINGS, Diary
from fedloom.flower.parcel import Refused

KEY, OTHER = bytes(32), b"\1" * 32


def test_rounds_go_by_once_and_models_are_trained_once(tmp_path: Path) -> None:
    diary = Diary(tmp_path, KEY)
    diary.refuse("run", "0", 3, "a model")
    diary.commit("run", "0", 3, "a model")
    for again in (diary, Diary(tmp_path, KEY)):  # also when the process was started anew
        for round in (0, 3):
            with pytest.raises(Refused, match=f"it has committed itself in round {round + 1} or later"):
                again.refuse("run", "0", round, "another")
        with pytest.raises(Refused, match="it has trained this model before, and trains none twice"):
            again.refuse("run", "0", 4, "a model")
        again.refuse("run", "0", 4, "another")
        again.refuse("run", "1", 3, "a model")
        assert [again.is_over("run", "0", round) for round in (2, 3, 4)] == [True, True, False]
        assert not again.is_over("run", "1", 0)
    again.commit("run", "0", 4, "another")
    with pytest.raises(Refused, match="it has trained this model before"):
        Diary(tmp_path, KEY).refuse("run", "0", 5, "a model")


def test_a_key_serves_one_run(tmp_path: Path) -> None:
    Diary(tmp_path, KEY).commit("run", "0", 0, "a model")
    with pytest.raises(
        Refused,
        match=r"its models key has served another run, or this one with other settings, as models-key-0{32}.json says",
    ):
        Diary(tmp_path, KEY).is_over("another", "1", 5)
    assert not Diary(tmp_path, OTHER).is_over("another", "1", 5)


def test_a_client_begins_some_times_and_never_after_it_has_trained_what_others_sealed(tmp_path: Path) -> None:
    diary = Diary(tmp_path, KEY)
    for round in range(MOST_BEGINNINGS):
        diary.refuse("run", "0", round, f"initial {round}")
        diary.commit("run", "0", round, f"initial {round}")
    with pytest.raises(Refused, match=f"it has begun anew {MOST_BEGINNINGS} times, and no exchange has succeeded"):
        diary.refuse("run", "0", MOST_BEGINNINGS, "initial")
    diary.refuse("run", "0", MOST_BEGINNINGS, "a sealed one", (4, 0))
    diary.commit("run", "1", 0, "a sealed one", (4, 0))
    with pytest.raises(Refused, match="it has trained models of this run that are sealed, and does not begin anew"):
        Diary(tmp_path, KEY).refuse("run", "1", 1, "initial 1")


def test_an_inventory_is_used_some_times_and_no_older_one_more_often(tmp_path: Path) -> None:
    """With many exchanges from the same models a server could compare who was there."""
    diary = Diary(tmp_path, KEY)
    diary.commit("run", "0", 0, "initial")
    for round in range(1, 1 + MOST_BEGINNINGS):
        diary.refuse("run", "0", round, f"model {round}", (3, 1))
        diary.commit("run", "0", round, f"model {round}", (3, 1))
    for stale in ((3, 1), (3, 0), (0, 0)):
        with pytest.raises(Refused, match="it has trained models of this inventory, or of newer ones, 5 times already"):
            Diary(tmp_path, KEY).refuse("run", "0", 9, "another", stale)
    Diary(tmp_path, KEY).refuse("run", "0", 9, "another", (3, 2))
    Diary(tmp_path, KEY).refuse("run", "1", 9, "another", (3, 1))
