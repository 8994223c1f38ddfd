"""Columns of a table as network input: numbers standardised, words one-hot, by what the training rows hold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedloom.data.columns import Column, Columns, Numbers, Texts, to_numbers
from fedloom.errors import InputError

MOST_WORDS = 1000
"""A column of more different words than this is a name or a text, and no category."""

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Standardise:
    """A column of numbers; a missing one becomes the mean, which is 0 then."""

    mean: float
    std: float

    width = 1

    def encode(self, values: Numbers) -> Matrix:
        scaled = (values - self.mean) / self.std
        return np.nan_to_num(scaled, nan=0.0).astype(np.float32)[:, None]


@dataclass(frozen=True)
class OneHot:
    """A column of words; a missing or new one has zeros everywhere."""

    words: dict[str, int]

    @property
    def width(self) -> int:
        return len(self.words)

    def encode(self, values: Texts) -> Matrix:
        matrix = np.zeros((len(values), len(self.words)), dtype=np.float32)
        at = np.array([self.words.get(word, -1) if word is not None else -1 for word in values], dtype=np.int64)
        rows = np.flatnonzero(at >= 0)
        matrix[rows, at[rows]] = 1
        return matrix


def encode(
    train: Columns, test: Columns, names: Sequence[str], where: str, tested: str
) -> tuple[Matrix, Matrix, list[str]]:
    """The columns called `names` of both as inputs, and sentences about what was left out, missing or new."""
    encoder = Encoder(train, names, where)
    return encoder.encode(train, where), encoder.encode(test, f"test: {tested}"), encoder.notes


class Encoder:
    """How the columns called `names` become inputs, learnt from those for training."""

    def __init__(self, columns: Columns, names: Sequence[str], where: str) -> None:
        self._where, self.notes = where, []
        self._parts: dict[str, Standardise | OneHot] = {}
        empty = []
        for name in names:
            values = columns[name]
            if isinstance(values, list):
                part: Standardise | OneHot = self._one_hot(name, values)
            else:
                part = self._standardise(name, values)
            if part.width and not (isinstance(part, Standardise) and np.isnan(part.mean)):
                self._parts[name] = part
            else:
                empty.append(name)
        if empty:
            self.notes.append(f"{where}: left out, for all values are missing: {', '.join(empty)}.")
        if not self._parts:
            raise InputError(f"{where} has no column to learn from beside label and owner.")
        numeric = sum(isinstance(part, Standardise) for part in self._parts.values())
        self.width = sum(part.width for part in self._parts.values())
        self.notes.append(
            f"{where}: columns of numbers: {numeric}, standardised by all training rows together; of words: "
            f"{len(self._parts) - numeric}, one-hot; inputs: {self.width}."
        )

    def _standardise(self, name: str, values: Numbers) -> Standardise:
        there = values[~np.isnan(values)]
        if not len(there):
            return Standardise(float("nan"), 1.0)
        # Divided first: the sum of values near the largest float would be infinite.
        scale = float(np.abs(there).max())
        if not np.isfinite(scale):
            raise InputError(f"{self._where} has an infinite value in column {name!r}; expected finite numbers.")
        mean = float((there / scale).mean()) * scale if scale else 0.0
        std = float((there / scale).std()) * scale if scale else 0.0
        # A column that never changes may have a deviation of rounding alone.
        return Standardise(mean, std if std > 1e-12 * scale else max(scale, 1.0))

    def _one_hot(self, name: str, values: Texts) -> OneHot:
        words = sorted({word for word in values if word is not None})
        # A slip of the pen among numbers makes them all words: it must be found.
        strange = [word for word in words if to_numbers([word]) is None]
        slip = f"{strange[0]!r} is no number" if 0 < len(strange) <= len(words) / 2 else ""
        if len(words) > MOST_WORDS:
            raise InputError(
                f"{self._where} has {len(words)} different words in column {name!r}, too many to be categories"
                f"{f' ({slip})' if slip else ''}; leave it out with drop={name}."
            )
        if slip:
            self.notes.append(f"{self._where}: column {name!r} was read as words, for {slip}.")
        return OneHot({word: position for position, word in enumerate(words)})

    def encode(self, columns: Columns, which: str) -> Matrix:
        """The inputs of all rows; what is missing or new in them is added to `notes`."""
        pieces, missing, new = [], 0, 0
        for name, part in self._parts.items():
            values = columns.get(name)
            if values is None:
                raise InputError(f"{which} has no column {name!r}, which {self._where} has.")
            if isinstance(part, Standardise):
                numbers = self._numbers(name, values, which)
                missing += int(np.isnan(numbers).sum())
                pieces.append(part.encode(numbers))
            else:
                texts = self._texts(values)
                missing += texts.count(None)
                new += sum(word is not None and word not in part.words for word in texts)
                pieces.append(part.encode(texts))
        if missing:
            self.notes.append(
                f"{which}: {missing} missing values, read as the column's mean or as none of its categories."
            )
        if new:
            self.notes.append(f"{which}: {new} words that no training row has, read as none of the categories.")
        matrix = np.concatenate(pieces, axis=1)
        if not np.isfinite(matrix).all():
            raise InputError(f"{which} has numbers too far from those of the training rows to be standardised.")
        return matrix

    def _numbers(self, name: str, values: Column, which: str) -> Numbers:
        if not isinstance(values, list):
            return values
        strange = next((value for value in values if value is not None), None)
        if strange is not None:
            raise InputError(f"{which} has {strange!r} in column {name!r}, which holds numbers in {self._where}.")
        return np.full(len(values), np.nan)

    @staticmethod
    def _texts(values: Column) -> Texts:
        if isinstance(values, list):
            return values
        return [None if np.isnan(value) else f"{value:g}" for value in values]
