"""Tests of Sent140: LEAF's files, LEAF's splitting into words, vocabularies."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.data import load_dataset
from fedloom.data.dataset import NO_OWNER
from fedloom.data.readers.text import _build_vocabulary, _encode_words, _read_vocabulary, _split_words
from fedloom.data.sources.sent140 import SENT140
from fedloom.errors import InputError

TRAIN = {"ann": [("so happy today!", 1), ("so sad", 0)], "bob": [("happy, happy", 1)], "eve": []}
TEST = {"ann": [("never seen words", 0)], "zoe": [("happy", 1)]}


def tweet(text: str) -> list[str]:
    return ["1467810369", "Mon Apr 06 22:19:45 PDT 2009", "NO_QUERY", "someone", text]


def put(path: Path, users: dict[str, list[tuple[Any, Any]]]) -> None:
    data = {
        user: {"x": [x if x is None else tweet(x) for x, _ in rows], "y": [y for _, y in rows]}
        for user, rows in users.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"users": list(users), "num_samples": [len(rows) for rows in users.values()], "user_data": data}
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    put(tmp_path / "sent140" / "train" / "a.json", TRAIN)
    put(tmp_path / "sent140" / "test" / "a.json", TEST)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "sent140"


def test_words_are_cut_as_leaf_does() -> None:
    assert _split_words("I can't, OK?!  a-b #tag") == ["I", "can't", ",", "OK", "?", "!", "a", "b", "tag"]
    assert _split_words("OK", lower=True) == ["ok"]


def test_a_vocabulary_is_the_most_frequent_words_whatever_their_order() -> None:
    texts = ["b a b", "c a", "d"]
    assert _build_vocabulary(texts, 3) == ["a", "b", "c"]
    assert _build_vocabulary(texts[::-1], 3) == ["a", "b", "c"]


def test_tokens_are_cut_and_filled_with_the_number_of_the_unknown() -> None:
    tokens, strange = _encode_words(["a b c d", "x", ""], ["a", "b"], 3)
    assert tokens.tolist() == [[0, 1, 2], [2, 2, 2], [2, 2, 2]]
    assert strange == 2  # c and x: what is cut off and what fills up are no unknown words


def test_by_name(folder: Path) -> None:
    data = load_dataset("sent140")
    assert data.owner_names == ("ann", "bob")
    assert data.owners is not None
    assert data.owners.tolist() == [0, 0, 1]
    assert data.test_owners is not None
    assert data.test_owners.tolist() == [0, NO_OWNER]
    assert data.train.y.tolist() == [1, 0, 1]
    words = ["happy", "so", "!", ",", "sad", "today"]
    assert data.vocabulary_size == len(words) + 1
    assert (data.shape, data.classes, data.class_names) == ((25,), 2, ("negative", "positive"))
    assert data.train.x[0, :5].tolist() == [1, 0, 5, 2, 6]
    assert data.test.x[0].tolist() == [6] * 25
    assert data.transform(data.train.x).dtype == torch.int64
    assert "6 words in the vocabulary, token 6 for all others; 0 words" in data.notes[0]


def test_options(folder: Path, tmp_path: Path) -> None:
    data = load_dataset("sent140:words=2,length=3,lower=yes,min=3")
    assert data.owner_names == ("ann",)
    assert (data.shape, data.vocabulary_size, len(data.test)) == ((3,), 3, 1)
    (tmp_path / "words.txt").write_text("sad 0.1 0.2\nhappy 0.3 0.4\nsad 9 9\n", encoding="utf-8")
    given = load_dataset(f"sent140:vocabulary={tmp_path / 'words.txt'}")
    assert given.vocabulary_size == 3
    assert given.train.x[0, :4].tolist() == [2, 1, 2, 2]
    with pytest.raises(InputError, match="length of 'sent140' is 99999; expected at most"):
        load_dataset("sent140:length=99999")


def test_files_that_are_not_split_yet(tmp_path: Path) -> None:
    put(tmp_path / "all_data" / "all_data.json", {"ann": [("a", 1)] * 4 + [("b", 0)]})
    content = SENT140.read(tmp_path)
    assert (content.train.y.tolist(), content.test.y.tolist()) == ([1, 1, 1, 1], [0])
    assert content.vocabulary_size == 2  # of the training texts alone


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ({"ann": [("a", 2)]}, "a sample of 'ann' with the label 2; expected 0 or 1"),
        ({"ann": [("a", "1")]}, "with the label '1'"),
        ({"ann": [("a", True)]}, "with the label True"),
        ({"ann": [("a", [1])]}, r"with the label \[1\]"),
        ({"ann": [(None, 1)]}, "without a text as its fifth entry"),
        ({"ann": [(" ", 1)]}, "without a single word"),
    ],
)
def test_broken_samples(tmp_path: Path, users: dict[str, list[tuple[Any, Any]]], message: str) -> None:
    put(tmp_path / "train" / "a.json", users)
    put(tmp_path / "test" / "a.json", TEST)
    with pytest.raises(InputError, match=message):
        SENT140.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.json", b"{", "not JSON"),
        ("v.json", b'{"vocab": [1]}', "no list of words"),
        ("v.json", b"[" * 100_000, "nested too deeply"),
        ("v.txt", b"\n \n", "holds no words"),
        ("v.txt", b"\xff\xfe\n", "not UTF-8"),
        ("v.txt", b"x" * (1 << 20), "longer than"),
    ],
)
def test_broken_vocabularies(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        _read_vocabulary(tmp_path / name)


def test_vocabularies_of_leaf_and_none(tmp_path: Path) -> None:
    (tmp_path / "embs.json").write_text(json.dumps({"vocab": ["a", "b", "a"], "emba": [[1], [2], [3]]}))
    assert _read_vocabulary(tmp_path / "embs.json") == ["a", "b"]
    with pytest.raises(InputError, match=r"cannot read .*gone\.txt: No such file"):
        _read_vocabulary(tmp_path / "gone.txt")


@given(st.lists(st.text(max_size=30), max_size=6), st.integers(1, 5), st.integers(1, 8))
def test_any_text_becomes_tokens_in_range(texts: list[str], size: int, length: int) -> None:
    vocabulary = _build_vocabulary(texts, size)
    tokens, _ = _encode_words(texts, vocabulary, length)
    assert tokens.shape == (len(texts), length)
    assert np.all((tokens >= 0) & (tokens <= len(vocabulary)))
