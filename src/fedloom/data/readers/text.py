"""Text as words: LEAF's way to cut it, a vocabulary from the training texts or from a file, and tokens.

Text as characters: LEAF's alphabet, and windows from which the next character is to be told.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedloom.data.dataset import DatasetSpec
from fedloom.errors import InputError
from fedloom.utils.storage import parse_json_file
from fedloom.utils.system import expand_user_path

LENGTH_IN_WORDS = 25
LONGEST = 10_000
WORDS = 10_000
"""How many words a vocabulary from the training texts holds."""

MOST_WORDS = 10_000_000
LONGEST_LINE = 1 << 20

_WORD = re.compile(r"[\w']+|[.,!?;]")


Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class TextTokenizer:
    """How texts become tokens."""

    length: int = LENGTH_IN_WORDS
    """Words of a text; the rest is cut off."""
    words: int = WORDS
    """The size of the vocabulary made from the training texts."""
    vocabulary: Path | None = None
    """A file with the vocabulary, instead."""
    lower: bool = False
    """Whether all letters are made small first."""

    @staticmethod
    def of(spec: DatasetSpec) -> "TextTokenizer":
        """The options `length`, `words`, `vocabulary` and `lower`."""
        length, words, lower = (
            spec.whole("length", LENGTH_IN_WORDS, 1),
            spec.whole("words", WORDS, 1),
            spec.yes("lower"),
        )
        if length > LONGEST:
            raise InputError(f"length of {spec.name!r} is {length}; expected at most {LONGEST} words.")
        file = spec.text("vocabulary")
        return TextTokenizer(length, words, expand_user_path(file) if file else None, lower)

    def tokens(self, train: Sequence[str], test: Sequence[str], where: str) -> tuple[Tokens, Tokens, int, str]:
        """The tokens of both, how many different ones there are, and a sentence about the vocabulary."""
        if self.vocabulary is None:
            vocabulary = _build_vocabulary(train, self.words, self.lower)
        else:
            vocabulary = _read_vocabulary(self.vocabulary)
        if not vocabulary:
            raise InputError(f"{where} has training texts without a single word.")
        x, strange = _encode_words(train, vocabulary, self.length, self.lower)
        note = (
            f"{where}: {len(vocabulary)} words in the vocabulary, token {len(vocabulary)} for all others; "
            f"{strange} words of the training texts are not in it."
        )
        return x, _encode_words(test, vocabulary, self.length, self.lower)[0], len(vocabulary) + 1, note


def _split_words(text: str, lower: bool = False) -> list[str]:
    """Words and marks, as LEAF's code cuts them; it leaves capitals as they are."""
    return _WORD.findall(text.lower() if lower else text)


def _build_vocabulary(texts: Iterable[str], size: int, lower: bool = False) -> list[str]:
    """The `size` most frequent words, the most frequent first; among equals the alphabet decides."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_split_words(text, lower))
    return sorted(counts, key=lambda word: (-counts[word], word))[:size]


def _encode_words(
    texts: Sequence[str], vocabulary: Sequence[str], length: int, lower: bool = False
) -> tuple[Tokens, int]:
    """The first `length` words of each text as positions in the vocabulary, and how many words are not in it.

    As in LEAF's code one number more, the size of the vocabulary, stands for unknown words and fills short texts up.
    """
    position = {word: number for number, word in enumerate(vocabulary)}
    tokens = np.full((len(texts), length), len(position), dtype=np.int32)
    strange = 0
    for row, text in enumerate(texts):
        found = [position.get(word, len(position)) for word in _split_words(text, lower)[:length]]
        strange += found.count(len(position))
        tokens[row, : len(found)] = found
    return tokens, strange


def _read_vocabulary(path: Path) -> list[str]:
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
    content = parse_json_file(path)
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


ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters in LEAF's order."""

_ELSE = len(ALPHABET)
_CODE_OF = np.full(128, _ELSE, dtype=np.uint8)
_CODE_OF[[ord(letter) for letter in ALPHABET]] = np.arange(len(ALPHABET))

NAMES = tuple({"\n": "newline", " ": "space"}.get(letter, letter) for letter in ALPHABET)

LENGTH_IN_CHARACTERS = 80
"""How many characters a window holds."""

Codes = NDArray[np.uint8]


def encode_text_characters(text: str) -> tuple[Codes, int]:
    """The number of each character in the alphabet, and how many are not in it: these become spaces, as LEAF has it."""
    points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    codes = np.where(points < 128, _CODE_OF[np.minimum(points, 127)], np.uint8(_ELSE)).astype(np.uint8)
    strange = codes == _ELSE
    codes[strange] = ALPHABET.index(" ")
    return codes, int(np.count_nonzero(strange))


def make_text_windows(spoken: Sequence[Sequence[str]], every: int = 1) -> tuple[Codes, Codes, NDArray[np.int64], int]:
    """Every character of every owner's lines with the 80 before it: (windows, characters, whose, strange ones).

    As in LEAF's code a line begins after 80 spaces and knows nothing of the line before it. Of each owner's
    characters, in their order, `every` keeps the first, and each so many after it.
    """
    padding = " " * LENGTH_IN_CHARACTERS
    codes, strange = encode_text_characters("".join(padding + line for owner in spoken for line in owner))
    sizes = np.array([len(line) for owner in spoken for line in owner], dtype=np.int64)
    counts = np.array([sum(map(len, owner)) for owner in spoken], dtype=np.int64)
    owners = np.repeat(np.arange(len(spoken)), counts)
    # Characters stand one after the other, but for the padding before each line.
    targets = np.arange(sizes.sum()) + LENGTH_IN_CHARACTERS * np.repeat(np.arange(1, len(sizes) + 1), sizes)
    if every > 1:
        turn = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        targets, owners = targets[turn % every == 0], owners[turn % every == 0]
    if not len(targets):
        return np.zeros((0, LENGTH_IN_CHARACTERS), np.uint8), np.zeros(0, np.uint8), owners, strange
    return (
        sliding_window_view(codes, LENGTH_IN_CHARACTERS)[targets - LENGTH_IN_CHARACTERS],
        codes[targets],
        owners,
        strange,
    )


def select_first_text_samples(owners: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Which samples are among the first `share` of their owner's, rounded down but one at least.

    The samples of an owner stand together. Later ones are for testing: cut at random, a window of one part would hold
    the characters to be told in the other.
    """
    counts = np.bincount(owners) if len(owners) else np.zeros(0, dtype=np.int64)
    turn = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = np.maximum(1, (counts * share + 1e-9).astype(np.int64))
    return np.asarray(turn < kept[owners])
