"""Turn text into tokens as LEAF does.

Tokens are words of a vocabulary, or windows of characters that predict the next one.
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
"""Size of a vocabulary that is built from the training texts."""

MOST_WORDS = 10_000_000
LONGEST_LINE = 1 << 20

_WORD = re.compile(r"[\w']+|[.,!?;]")


Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class TextTokenizer:
    """Splits texts into words and maps them to tokens."""

    length: int = LENGTH_IN_WORDS
    """Words kept of each text; the rest is cut off."""
    words: int = WORDS
    """Size of the vocabulary that is built from the training texts."""
    vocabulary: Path | None = None
    """A file with a vocabulary to use instead."""
    lower: bool = False
    """Whether to convert text to lower case first."""

    @staticmethod
    def from_spec(spec: DatasetSpec) -> "TextTokenizer":
        """Read the options `length`, `words`, `vocabulary` and `lower`."""
        length, words, lower = (
            spec.integer_option("length", LENGTH_IN_WORDS, 1),
            spec.integer_option("words", WORDS, 1),
            spec.yes_no_option("lower"),
        )
        if length > LONGEST:
            raise InputError(f"length of {spec.name!r} is {length}; expected at most {LONGEST} words.")
        file = spec.text_option("vocabulary")
        return TextTokenizer(length, words, expand_user_path(file) if file else None, lower)

    def tokenize(self, train: Sequence[str], test: Sequence[str], source: str) -> tuple[Tokens, Tokens, int, str]:
        """Return training tokens, test tokens, the vocabulary size, and a note about the vocabulary."""
        if self.vocabulary is None:
            vocabulary = _build_vocabulary(train, self.words, self.lower)
        else:
            vocabulary = _read_vocabulary(self.vocabulary)
        if not vocabulary:
            raise InputError(f"{source} has training texts without a single word.")
        x, strange = _encode_words(train, vocabulary, self.length, self.lower)
        note = (
            f"{source}: {len(vocabulary)} words in the vocabulary, token {len(vocabulary)} for all others; "
            f"{strange} words of the training texts are not in it."
        )
        return x, _encode_words(test, vocabulary, self.length, self.lower)[0], len(vocabulary) + 1, note


def _split_words(text: str, lower: bool = False) -> list[str]:
    """Split a text into words and punctuation, as LEAF's code does; LEAF keeps capital letters."""
    return _WORD.findall(text.lower() if lower else text)


def _build_vocabulary(texts: Iterable[str], size: int, lower: bool = False) -> list[str]:
    """Return the `size` most frequent words, ties in alphabetical order."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_split_words(text, lower))
    return sorted(counts, key=lambda word: (-counts[word], word))[:size]


def _encode_words(
    texts: Sequence[str], vocabulary: Sequence[str], length: int, lower: bool = False
) -> tuple[Tokens, int]:
    """Encode the first `length` words of each text as positions in the vocabulary, and count unknown words.

    As in LEAF's code, one more token (the size of the vocabulary) stands for unknown words and pads short texts.
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
    """Read the words of LEAF's `embs.json`, of a GloVe file, or of a file with one word per line."""
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
"""Characters in a window."""

Codes = NDArray[np.uint8]


def encode_text_characters(text: str) -> tuple[Codes, int]:
    """Encode characters as positions in `ALPHABET`, and count unknown ones, which become spaces as in LEAF."""
    points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    codes = np.where(points < 128, _CODE_OF[np.minimum(points, 127)], np.uint8(_ELSE)).astype(np.uint8)
    strange = codes == _ELSE
    codes[strange] = ALPHABET.index(" ")
    return codes, int(np.count_nonzero(strange))


def make_text_windows(
    lines_by_owner: Sequence[Sequence[str]], stride: int = 1
) -> tuple[Codes, Codes, NDArray[np.int64], int]:
    """Return the 80 characters before each character: windows, characters, owners, number of unknown characters.

    As in LEAF's code, 80 spaces precede each line, so a window never contains text of the previous line. Every
    `stride`-th character of each owner is kept, beginning with the first.
    """
    padding = " " * LENGTH_IN_CHARACTERS
    codes, strange = encode_text_characters("".join(padding + line for owner in lines_by_owner for line in owner))
    sizes = np.array([len(line) for owner in lines_by_owner for line in owner], dtype=np.int64)
    counts = np.array([sum(map(len, owner)) for owner in lines_by_owner], dtype=np.int64)
    owners = np.repeat(np.arange(len(lines_by_owner)), counts)
    # Characters are contiguous, except for the padding before each line.
    targets = np.arange(sizes.sum()) + LENGTH_IN_CHARACTERS * np.repeat(np.arange(1, len(sizes) + 1), sizes)
    if stride > 1:
        turn = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        targets, owners = targets[turn % stride == 0], owners[turn % stride == 0]
    if not len(targets):
        return np.zeros((0, LENGTH_IN_CHARACTERS), np.uint8), np.zeros(0, np.uint8), owners, strange
    return (
        sliding_window_view(codes, LENGTH_IN_CHARACTERS)[targets - LENGTH_IN_CHARACTERS],
        codes[targets],
        owners,
        strange,
    )


def select_first_text_samples(owners: NDArray[np.int64], train_share: float) -> NDArray[np.bool_]:
    """Select the first `train_share` of each owner's samples for training, rounded down but at least one.

    The samples of an owner must be contiguous. The later ones are for testing. With a random split, training windows
    would contain characters that the test asks for.
    """
    counts = np.bincount(owners) if len(owners) else np.zeros(0, dtype=np.int64)
    turn = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = np.maximum(1, (counts * train_share + 1e-9).astype(np.int64))
    return np.asarray(turn < kept[owners])
