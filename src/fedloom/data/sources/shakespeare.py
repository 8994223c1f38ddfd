"""Shakespeare: predict the next character, by speaking role.

It reads LEAF's JSON files, `by_role.json` (`users`, and `speeches` by user), or plain text in which a line `SPEAKER:`
begins a speech and an empty line ends it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.dataset import Dataset, DatasetSpec, dataset_owner_positions
from fedloom.data.readers.leaf import LEAF_SPLIT, LEAF_WHOLE, Users, find_leaf_files, read_leaf_users
from fedloom.data.readers.text import (
    LENGTH_IN_CHARACTERS,
    NAMES,
    Codes,
    encode_text_characters,
    make_text_windows,
    select_first_text_samples,
)
from fedloom.data.samples import InputTransform, Samples
from fedloom.data.sources.base import DatasetSource
from fedloom.errors import InputError
from fedloom.utils.storage import parse_json_file


def _speech_lines(speeches: Sequence[str]) -> list[str]:
    """Speeches as LEAF has them: one line each, with single spaces and a newline at the end."""
    return [f"{' '.join(speech.split())}\n" for speech in speeches]


BY_ROLE = "by_role.json"


@dataclass(frozen=True)
class _CharacterWindows:
    """Windows, the characters that follow, and their owners (positions in `owner_names`); an owner's stand together."""

    x: Codes
    y: Codes
    owners: NDArray[np.int64]
    num_unknown_characters: int
    """How many characters are not in the alphabet."""
    owner_names: tuple[str, ...]

    def select(self, chosen: NDArray[np.bool_]) -> "_CharacterWindows":
        return _CharacterWindows(
            self.x[chosen], self.y[chosen], self.owners[chosen], self.num_unknown_characters, self.owner_names
        )

    def to_samples(self) -> Samples:
        return Samples(torch.from_numpy(self.x), torch.from_numpy(self.y.astype(np.int64)))


@dataclass(frozen=True, kw_only=True)
class ShakespeareSource(DatasetSource):
    """Shakespeare's characters, and which of them to read."""

    min_characters: int = 1
    """Roles with fewer characters are left out (LEAF's -k)."""
    stride: int = 1
    """Each so many-th character of a role is kept."""
    test_share: float = 0.1
    """How much of each role is for testing: its last characters. What LEAF has split stays as it is."""
    file: str = ""
    """The one file of the folder to read; by default LEAF's, then `by_role.json`, then the only `.txt`."""

    def is_complete(self, folder: Path) -> bool:
        return (folder / self.file).is_file() if self.file else super().is_complete(folder)

    def with_options(self, spec: DatasetSpec) -> "ShakespeareSource":
        return replace(
            self,
            min_characters=spec.integer_option("min", 1, 1),
            stride=spec.integer_option("every", 1, 1),
            test_share=spec.fraction_option("test", 0.1),
            file=spec.text_option("file"),
        )

    def cache_key(self) -> str:
        return f"{super().cache_key()} {self.min_characters} {self.stride} {self.test_share} {self.file}"

    def read(self, folder: Path) -> Dataset:
        leaf = None if self.file else find_leaf_files(folder)
        if leaf:
            users, test_users = read_leaf_users(*leaf, self.min_characters)
            train = _windows(users, self.stride, folder)
            test = _windows(test_users, self.stride, folder) if test_users is not None else None
        else:
            roles = {role: _speech_lines(said) for role, said in _roles(self.text_file(folder)).items()}
            roles = {role: said for role, said in roles.items() if sum(map(len, said)) >= self.min_characters}
            train, test = _CharacterWindows(*make_text_windows(list(roles.values()), self.stride), tuple(roles)), None
        strange = train.num_unknown_characters + (test.num_unknown_characters if test else 0)
        if test is None:
            first = select_first_text_samples(train.owners, 1 - self.test_share)
            train, test = train.select(first), train.select(~first)
        if not len(train.x) or not len(test.x):
            raise InputError(
                f"{folder} leaves no characters to train or to test with, when roles have {self.min_characters} or "
                "more."
            )
        notes = () if not strange else (f"{strange} characters are not in LEAF's alphabet and were read as spaces.",)
        return Dataset(
            train.to_samples(),
            test.to_samples(),
            NAMES,
            train.owners,
            train.owner_names,
            notes=notes,
            vocabulary_size=len(NAMES),
            test_owners=dataset_owner_positions(test.owner_names, train.owner_names)[test.owners],
        )

    def text_file(self, folder: Path) -> Path:
        """The file of the roles: `file`, `by_role.json`, or the only `.txt`."""
        if self.file:
            if not (folder / self.file).resolve().is_relative_to(folder.resolve()):
                raise InputError(f"file of 'shakespeare' is {self.file!r}; expected a file in {folder}.")
            return folder / self.file
        texts = sorted(folder.glob("*.txt"))
        if (folder / BY_ROLE).is_file() or len(texts) == 1:
            return folder / BY_ROLE if (folder / BY_ROLE).is_file() else texts[0]
        raise InputError(f"{folder} has neither LEAF's files, nor {BY_ROLE}, nor one .txt; say which with file=NAME.")


def _windows(users: Users, stride: int, folder: Path) -> _CharacterWindows:
    """Samples as LEAF's files hold them: the window is a string, and so is the character."""
    users = {user: (xs[::stride], ys[::stride]) for user, (xs, ys) in users.items() if xs}
    for user, pairs in users.items():
        for x, y in zip(*pairs, strict=True):
            if not isinstance(x, str) or len(x) != LENGTH_IN_CHARACTERS or not isinstance(y, str) or len(y) != 1:
                raise InputError(
                    f"{folder} has a sample of {user!r} that is not {LENGTH_IN_CHARACTERS} characters "
                    "with the one that follows: "
                    f"{_short(x)}, {_short(y)}."
                )
    x, strange = encode_text_characters("".join(x for xs, _ in users.values() for x in xs))
    y, odd = encode_text_characters("".join(y for _, ys in users.values() for y in ys))
    owners = np.repeat(np.arange(len(users)), np.array([len(ys) for _, ys in users.values()], dtype=np.int64))
    return _CharacterWindows(x.reshape(-1, LENGTH_IN_CHARACTERS), y, owners, strange + odd, tuple(users))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def _roles(path: Path) -> dict[str, Sequence[str]]:
    return _from_json(path) if path.suffix == ".json" else _from_text(path)


def _from_json(path: Path) -> dict[str, Sequence[str]]:
    content = parse_json_file(path)
    users, speeches = (content.get("users"), content.get("speeches")) if isinstance(content, dict) else (None, None)
    if not isinstance(users, list) or not isinstance(speeches, dict):
        raise InputError(f"{path} is not text by role; expected 'users' and 'speeches'.")
    if not all(isinstance(user, str) for user in users) or len(set(users)) < len(users):
        raise InputError(f"{path} has 'users' that are not different names.")
    for user in users:
        said = speeches.get(user)
        if not isinstance(said, list) or not all(isinstance(speech, str) for speech in said):
            raise InputError(f"{path} has no list of speeches for {user!r}.")
    if surplus := speeches.keys() - set(users):
        raise InputError(f"{path} has speeches of {min(surplus)!r}, who is not among its users.")
    return {user: speeches[user] for user in users if any(speech.strip() for speech in speeches[user])}


def _from_text(path: Path) -> dict[str, Sequence[str]]:
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    roles: dict[str, list[str]] = {}
    for speech in re.split(r"\n[ \t]*\n\s*", text.strip()):
        speaker, _, said = speech.partition("\n")
        if not speaker.strip().endswith(":") or len(speaker) > 200:
            raise InputError(f"{path} has a speech without a speaker, {_short(speaker)}; expected a line like HAMLET:.")
        roles.setdefault(speaker.strip()[:-1].strip(), []).append(said)
    return {role: said for role, said in roles.items() if any(speech.strip() for speech in said)}


SHAKESPEARE = ShakespeareSource(
    name="shakespeare",
    summary="the next character in Shakespeare's plays, by speaking role",
    shape=(LENGTH_IN_CHARACTERS,),
    num_train_examples=None,
    num_test_examples=None,
    transform=InputTransform.identity(),
    class_names=NAMES,
    file_names=("train/*.json and test/*.json of LEAF", BY_ROLE),
    file_patterns={"text": [*LEAF_SPLIT, *LEAF_WHOLE, [BY_ROLE], ["*.txt"]]},
    folder_names=("shakespeare",),
    base_url="https://github.com/TalwalkarLab/leaf",
    manual_steps="run LEAF's data/shakespeare/preprocess.sh, or bring by_role.json or a text with speakers",
)
