"""Tests of Shakespeare: LEAF's files, `by_role.json` and plain text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedloom.data import load_dataset
from fedloom.data.dataset import NO_OWNER
from fedloom.data.readers.text import ALPHABET, LENGTH_IN_CHARACTERS
from fedloom.data.sources.shakespeare import SHAKESPEARE
from fedloom.errors import InputError

SAID = {"HAMLET": ["To be, or not to be.", "Words, words, words."], "GHOST": ["Mark me."], "MUTE": [" "]}


def put(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def by_role(folder: Path, said: dict[str, list[str]] = SAID) -> Path:
    put(folder / "by_role.json", {"users": list(said), "speeches": said})
    return folder


def leaf(user_data: dict[str, tuple[list[Any], list[Any]]], **more: Any) -> dict[str, Any]:
    return {
        "users": list(user_data),
        "num_samples": [len(y) for _, y in user_data.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in user_data.items()},
        **more,
    }


def window(text: str) -> str:
    return text.rjust(LENGTH_IN_CHARACTERS)


def decode(codes: torch.Tensor) -> str:
    return "".join(ALPHABET[int(code)] for code in codes)


def test_text_by_role(tmp_path: Path) -> None:
    content = replace(SHAKESPEARE, test_share=0.2).read(by_role(tmp_path))
    assert content.owner_names == ("HAMLET", "GHOST")
    assert content.owners is not None
    whole = "".join(f"{speech}\n" for speech in SAID["HAMLET"])
    cut = int(len(whole) * 0.8)
    own = torch.from_numpy(content.owners == 0)
    assert decode(content.train.y[own]) == whole[:cut]
    assert decode(content.test.y) == whole[cut:] + "Mark me.\n"[7:]
    assert content.test_owners is not None
    assert content.test_owners.tolist() == [0] * (len(whole) - cut) + [1, 1]
    assert decode(content.train.x[own][5]) == window("To be")
    second = len(SAID["HAMLET"][0]) + 1
    assert decode(content.train.x[own][second]) == window("")  # a speech knows nothing of the one before
    assert content.train.x.dtype == torch.uint8
    assert content.vocabulary_size == len(content.class_names) == 80
    assert content.notes == ()


def test_plain_text_with_speakers(tmp_path: Path) -> None:
    put(
        tmp_path / "play.txt",
        "HAMLET:\nTo be, or not\r\nto be.\n\nGHOST:\nMark me.\n \n\nHAMLET:\nWords, words, words.\n\n\n",
    )
    text, json_ = SHAKESPEARE.read(tmp_path), SHAKESPEARE.read(by_role(tmp_path / "b"))
    assert text.owner_names == json_.owner_names
    assert torch.equal(text.train.x, json_.train.x)
    assert torch.equal(text.test.y, json_.test.y)


def test_leaf_files(tmp_path: Path) -> None:
    put(tmp_path / "train" / "a.json", leaf({"B": ([window("ab")], ["c"]), "EMPTY": ([], [])}))
    put(tmp_path / "train" / "b.json", leaf({"A": ([window("x"), window("xy")], ["y", "ø"])}, hierarchies=["P"]))
    put(tmp_path / "test" / "a.json", leaf({"A": ([window("?")], ["!"]), "NEW": ([window("")], ["z"])}))
    content = SHAKESPEARE.read(tmp_path)
    assert content.owner_names == ("B", "A")
    assert content.owners is not None
    assert content.owners.tolist() == [0, 1, 1]
    assert content.test_owners is not None
    assert content.test_owners.tolist() == [1, NO_OWNER]
    assert [decode(x) for x in content.train.x] == [window("ab"), window("x"), window("xy")]
    assert decode(content.train.y) == "cy "
    assert decode(content.test.y) == "!z"
    assert content.notes == ("1 characters are not in LEAF's alphabet and were read as spaces.",)


def test_leaf_files_that_are_not_split_yet(tmp_path: Path) -> None:
    text = "abcdefghij"
    put(
        tmp_path / "data" / "all_data" / "all_data.json",
        leaf({"A": ([window(text[:i]) for i in range(10)], list(text))}),
    )
    content = replace(SHAKESPEARE, test_share=0.3).read(tmp_path)
    assert (decode(content.train.y), decode(content.test.y)) == (text[:7], text[7:])


def test_roles_with_few_characters_are_left_out_of_both_parts(tmp_path: Path) -> None:
    assert replace(SHAKESPEARE, min_characters=10).read(by_role(tmp_path)).owner_names == ("HAMLET",)
    put(tmp_path / "train" / "a.json", leaf({"A": ([window("")] * 3, ["c"] * 3), "B": ([window("")], ["c"])}))
    put(tmp_path / "test" / "a.json", leaf({"A": ([window("")], ["c"]), "B": ([window("")], ["c"])}))
    content = replace(SHAKESPEARE, min_characters=4).read(tmp_path)
    assert content.owner_names == ("A",)
    assert (len(content.train), len(content.test)) == (3, 1)
    with pytest.raises(InputError, match="leaves no characters to train or to test with, when roles have 5 or more"):
        replace(SHAKESPEARE, min_characters=5).read(tmp_path)


def test_by_name_with_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_role(tmp_path / "shakespeare")
    put(tmp_path / "shakespeare" / "play.txt", "KING:\nSpeak. Speak. Speak.\n")
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    assert load_dataset("shakespeare").owner_names == ("HAMLET", "GHOST")
    thin = load_dataset("shakespeare:every=2,min=10,test=0.5")
    assert thin.owner_names == ("HAMLET",)
    assert (len(thin.train), len(thin.test)) == (10, 11)
    again = load_dataset("shakespeare:every=2,min=10,test=0.5")  # from the cache
    assert torch.equal(again.train.x, thin.train.x)
    assert (again.vocabulary_size, again.owner_names, again.shape) == (80, ("HAMLET",), (80,))
    assert load_dataset("shakespeare:file=play.txt").owner_names == ("KING",)
    with pytest.raises(InputError, match="unknown option of 'shakespeare' 'mim'; did you mean 'min'"):
        load_dataset("shakespeare:mim=3")


def test_a_file_outside_its_folder_is_not_read(tmp_path: Path) -> None:
    put(tmp_path / "secret.txt", "KING:\nSpeak.\n")
    (tmp_path / "shakespeare").mkdir()
    with pytest.raises(InputError, match=r"expected a file in"):
        replace(SHAKESPEARE, file="../secret.txt").read(tmp_path / "shakespeare")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "truncated, or not JSON"),
        ("[]", "expected 'users' and 'user_data'"),
        ({"users": ["A", "A"], "user_data": {}}, "not different names"),
        ({"users": [3], "user_data": {}}, "not different names"),
        ({"users": ["A"], "user_data": {}}, "no lists x and y for the user 'A'"),
        ({"users": ["A"], "user_data": {"A": {"x": ["a"], "y": []}}}, "1 x and 0 y for the user 'A'"),
        (leaf({"A": ([window("")], ["c"])}, num_samples=[2]), "num_samples says 2"),
        (leaf({"A": ([window("")], ["c"])}, num_samples=[]), "does not have one number for each"),
        (leaf({"A": (["short"], ["c"])}), "not 80 characters with the one that follows: 'short', 'c'"),
        (leaf({"A": ([window("")], ["cc"])}), "not 80 characters"),
        (leaf({"A": ([window("")], [7])}), "not 80 characters"),
        (leaf({"A": ([[1.0] * 784], [7])}), r"not 80 characters .*\(\d+ characters\)"),
        (leaf({"A": ([], [])}), "holds no samples"),
        (
            leaf({"A": ([window("")], ["c"]), "B": ([window("")], ["c"])}, users=["A"], num_samples=[1]),
            "samples of 'B', who is not among its users",
        ),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_leaf_files(tmp_path: Path, content: Any, message: str) -> None:
    put(tmp_path / "train" / "a.json", content)
    put(tmp_path / "test" / "a.json", leaf({"A": ([window("")], ["c"])}))
    with pytest.raises(InputError, match=message):
        SHAKESPEARE.read(tmp_path)


def test_a_user_in_two_files(tmp_path: Path) -> None:
    for name in ("train/a.json", "train/b.json", "test/a.json"):
        put(tmp_path / name, leaf({"A": ([window("")], ["c"])}))
    with pytest.raises(InputError, match=r"b\.json holds the user 'A', whom another file holds already"):
        SHAKESPEARE.read(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"users": ["A"]}, "expected 'users' and 'speeches'"),
        ({"users": ["A"], "speeches": {"A": "text"}}, "no list of speeches for 'A'"),
        ({"users": ["A"], "speeches": {"A": [1]}}, "no list of speeches for 'A'"),
        ({"users": ["A"], "speeches": {"A": ["x"], "B": ["y"]}}, "speeches of 'B', who is not among its users"),
        ({"users": [], "speeches": {}}, "leaves no characters"),
    ],
)
def test_broken_text_by_role(tmp_path: Path, content: Any, message: str) -> None:
    put(tmp_path / "by_role.json", content)
    with pytest.raises(InputError, match=message):
        SHAKESPEARE.read(tmp_path)


def test_text_without_speakers(tmp_path: Path) -> None:
    put(tmp_path / "a.txt", "Once upon a time")
    with pytest.raises(InputError, match="speech without a speaker, 'Once upon a time'; expected a line like HAMLET:"):
        SHAKESPEARE.read(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"KING:\n\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8"):
        SHAKESPEARE.read(tmp_path)
    put(tmp_path / "b.txt", "KING:\nSpeak.\n")
    with pytest.raises(InputError, match="say which with file=NAME"):
        SHAKESPEARE.read(tmp_path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_refused_or_read_whole(tmp_path: Path, data: st.DataObject) -> None:
    """Cut off, or with bytes changed: one sentence, or a data set that is consistent."""
    whole = json.dumps(leaf({"A": ([window("ab"), window("abc")], ["c", "d"]), "B": ([window("")], ["x"])})).encode()
    cut = data.draw(st.integers(0, len(whole)))
    damaged = bytearray(whole[:cut] if data.draw(st.booleans()) else whole)
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    for part in ("train", "test"):
        (tmp_path / part).mkdir(exist_ok=True)
        (tmp_path / part / "a.json").write_bytes(bytes(damaged))
    try:
        content = SHAKESPEARE.read(tmp_path)
    except InputError:
        return
    assert content.owners is not None
    assert len(content.train) == len(content.owners) == 3
    assert int(content.train.x.max()) < 80
    assert np.bincount(content.owners).min() > 0


@pytest.mark.data("shakespeare")
def test_the_plays() -> None:
    plays = load_dataset("shakespeare")
    assert (len(plays.owner_names), plays.classes) == (1070, 80)
    assert len(plays.train) + len(plays.test) == 4_176_369
    assert plays.owners is not None
    assert np.bincount(plays.owners).min() >= 1
    first = "In delivering my son from me, I bury a second husband.\n"
    assert plays.owner_names[0] == "ALLS_WELL_THAT_ENDS_WELL_COUNTESS"
    assert decode(plays.train.y[: len(first)]) == first
    assert "10 characters" in plays.notes[0]
    assert len(load_dataset("shakespeare:min=5700,every=100").owner_names) == 240
