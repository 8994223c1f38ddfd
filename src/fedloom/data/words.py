"""Text as words: LEAF's way to cut it, a vocabulary from the training texts or from a file, and tokens."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedloom.data.leaf import read_json
from fedloom.data.spec import Spec, home_path
from fedloom.errors import InputError

LENGTH = 25
LONGEST = 10_000
WORDS = 10_000
"""How many words a vocabulary from the training texts holds."""

MOST_WORDS = 10_000_000
LONGEST_LINE = 1 << 20

_WORD = re.compile(r"[\w']+|[.,!?;]")


Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Wording:
    """How texts become tokens."""

    length: int = LENGTH
    """Words of a text; the rest is cut off."""
    words: int = WORDS
    """The size of the vocabulary made from the training texts."""
    vocabulary: Path | None = None
    """A file with the vocabulary, instead."""
    lower: bool = False
    """Whether all letters are made small first."""

    @staticmethod
    def of(spec: Spec) -> "Wording":
        """The options `length`, `words`, `vocabulary` and `lower`."""
        length, words, lower = spec.whole("length", LENGTH, 1), spec.whole("words", WORDS, 1), spec.yes("lower")
        if length > LONGEST:
            raise InputError(f"length of {spec.name!r} is {length}; expected at most {LONGEST} words.")
        file = spec.text("vocabulary")
        return Wording(length, words, home_path(file) if file else None, lower)

    def tokens(self, train: Sequence[str], test: Sequence[str], where: str) -> tuple[Tokens, Tokens, int, str]:
        """The tokens of both, how many different ones there are, and a sentence about the vocabulary."""
        if self.vocabulary is None:
            vocabulary = build_vocabulary(train, self.words, self.lower)
        else:
            vocabulary = read_vocabulary(self.vocabulary)
        if not vocabulary:
            raise InputError(f"{where} has training texts without a single word.")
        x, strange = to_tokens(train, vocabulary, self.length, self.lower)
        note = (
            f"{where}: {len(vocabulary)} words in the vocabulary, token {len(vocabulary)} for all others; "
            f"{strange} words of the training texts are not in it."
        )
        return x, to_tokens(test, vocabulary, self.length, self.lower)[0], len(vocabulary) + 1, note


def split_words(text: str, lower: bool = False) -> list[str]:
    """Words and marks, as LEAF's code cuts them; it leaves capitals as they are."""
    return _WORD.findall(text.lower() if lower else text)


def build_vocabulary(texts: Iterable[str], size: int, lower: bool = False) -> list[str]:
    """The `size` most frequent words, the most frequent first; among equals the alphabet decides."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split_words(text, lower))
    return sorted(counts, key=lambda word: (-counts[word], word))[:size]


def to_tokens(texts: Sequence[str], vocabulary: Sequence[str], length: int, lower: bool = False) -> tuple[Tokens, int]:
    """The first `length` words of each text as positions in the vocabulary, and how many words are not in it.

    As in LEAF's code one number more, the size of the vocabulary, stands for unknown words and fills short texts up.
    """
    position = {word: number for number, word in enumerate(vocabulary)}
    tokens = np.full((len(texts), length), len(position), dtype=np.int32)
    strange = 0
    for row, text in enumerate(texts):
        found = [position.get(word, len(position)) for word in split_words(text, lower)[:length]]
        strange += found.count(len(position))
        tokens[row, : len(found)] = found
    return tokens, strange


def read_vocabulary(path: Path) -> list[str]:
    """The words of LEAF's `embs.json`, of a GloVe file, or of a file with one word a line; doubles count once."""
    try:
        words = _from_json(path) if path.suffix == ".json" else _from_lines(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    words = list(dict.fromkeys(words))
    if not words:
        raise InputError(f"{path} holds no words; expected one at the beginning of each line.")
    return words


def _from_json(path: Path) -> list[str]:
    content = read_json(path)
    words = content.get("vocab") if isinstance(content, dict) else content
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InputError(f"{path} has no list of words; expected one under 'vocab', as in LEAF's embs.json.")
    return words


def _from_lines(path: Path) -> list[str]:
    words: list[str] = []
    with path.open(encoding="utf-8") as lines:
        while line := lines.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise InputError(f"line {len(words) + 1} of {path} is longer than {LONGEST_LINE} characters.")
            if word := line.split(" ", 1)[0].strip():
                words.append(word)
            if len(words) > MOST_WORDS:
                raise InputError(f"{path} holds more than {MOST_WORDS} words; that is no vocabulary.")
    return words
