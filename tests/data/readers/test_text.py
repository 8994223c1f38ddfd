"""Tests of windows of characters, as in LEAF's code."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data.readers.text import (
    ALPHABET,
    LENGTH_IN_CHARACTERS,
    NAMES,
    encode_text_characters,
    make_text_windows,
    select_first_text_samples,
)
from fedloom.data.sources.shakespeare import _speech_lines


def decode(codes: np.ndarray) -> str:
    return "".join(ALPHABET[code] for code in codes)


def leaf_windows(speeches: list[str]) -> list[tuple[str, str]]:
    """LEAF's procedure, written out slowly: a line begins after 80 unknown characters, which are spaces."""
    pairs = []
    for line in _speech_lines(speeches):
        padded = " " * LENGTH_IN_CHARACTERS + line
        pairs += [
            (padded[i : i + LENGTH_IN_CHARACTERS], padded[i + LENGTH_IN_CHARACTERS])
            for i in range(len(padded) - LENGTH_IN_CHARACTERS)
        ]
    return pairs


def test_the_alphabet_is_leafs() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == len(NAMES) == 80
    assert [ALPHABET.index(letter) for letter in "\n AZaz}"] == [0, 1, 25, 50, 53, 78, 79]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.text(alphabet=ALPHABET, max_size=120), max_size=4), max_size=4))
def test_windows_are_those_of_the_slow_procedure(roles: list[list[str]]) -> None:
    x, y, owners, strange = make_text_windows([_speech_lines(role) for role in roles])
    expected = [(window, letter, k) for k, role in enumerate(roles) for window, letter in leaf_windows(role)]
    assert strange == 0
    assert x.shape == (len(expected), LENGTH_IN_CHARACTERS)
    assert [(decode(a), ALPHABET[b], k) for a, b, k in zip(x, y, owners, strict=True)] == expected


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(alphabet="ab ", max_size=30), min_size=1, max_size=4), st.integers(1, 50))
def test_every_thins_each_owner_from_its_first_on(said: list[str], every: int) -> None:
    spoken = [_speech_lines([speech]) for speech in said]
    x, y, owners, _ = make_text_windows(spoken)
    thin_x, thin_y, thin_owners, _ = make_text_windows(spoken, every)
    kept = np.concatenate([np.flatnonzero(owners == k)[::every] for k in range(len(said))])
    assert np.array_equal(thin_x, x[kept])
    assert np.array_equal(thin_y, y[kept])
    assert np.array_equal(thin_owners, owners[kept])


@given(st.text(max_size=50))
def test_strange_characters_are_spaces_and_counted(text: str) -> None:
    codes, strange = encode_text_characters(text)
    assert strange == sum(letter not in ALPHABET for letter in text)
    assert decode(codes) == "".join(letter if letter in ALPHABET else " " for letter in text)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.sampled_from([0.1, 0.5, 0.8, 0.9]))
def test_the_first_of_each(sizes: list[int], share: float) -> None:
    owners = np.repeat(np.arange(len(sizes)), sizes)
    first = select_first_text_samples(owners, share)
    for k, size in enumerate(sizes):
        own = first[owners == k]
        assert own.sum() == (max(1, int(size * share + 1e-9)) if size else 0)
        assert own.tolist() == sorted(own.tolist(), reverse=True)


def test_no_character_to_be_told_in_a_test_is_in_a_training_window() -> None:
    """Every sample's window looks back only: training windows end before the first test character."""
    said = ["abcdefghijklmnopqrstuvwxyz" * 3]
    x, y, owners, _ = make_text_windows([_speech_lines(said)])
    first = select_first_text_samples(owners, 0.9)
    last = int(np.flatnonzero(first)[-1])
    text = _speech_lines(said)[0]
    assert decode(y[first]) == text[: last + 1]
    assert all(decode(window).strip() in text[:last] for window in x[first])


def test_nothing_gives_nothing() -> None:
    for spoken in ([], [[]], [_speech_lines([])]):
        x, y, owners, strange = make_text_windows(spoken)
        assert x.shape == (0, LENGTH_IN_CHARACTERS)
        assert (len(y), len(owners), strange) == (0, 0, 0)


@pytest.mark.parametrize("speech", ["a  b\n\nc ", " a b c"])
def test_a_speech_is_one_line_with_single_spaces(speech: str) -> None:
    assert _speech_lines([speech]) == ["a b c\n"]
