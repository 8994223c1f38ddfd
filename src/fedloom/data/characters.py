"""Text as characters: LEAF's alphabet, and windows from which the next character is to be told."""

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters in LEAF's order."""

NAMES = tuple({"\n": "newline", " ": "space"}.get(letter, letter) for letter in ALPHABET)

LENGTH = 80
"""How many characters a window holds."""

Codes = NDArray[np.uint8]

_ELSE = len(ALPHABET)
_CODE_OF = np.full(128, _ELSE, dtype=np.uint8)
_CODE_OF[[ord(letter) for letter in ALPHABET]] = np.arange(len(ALPHABET))


def encode(text: str) -> tuple[Codes, int]:
    """The number of each character in the alphabet, and how many are not in it: these become spaces, as LEAF has it."""
    points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    codes = np.where(points < 128, _CODE_OF[np.minimum(points, 127)], np.uint8(_ELSE)).astype(np.uint8)
    strange = codes == _ELSE
    codes[strange] = ALPHABET.index(" ")
    return codes, int(np.count_nonzero(strange))


def lines(speeches: Sequence[str]) -> list[str]:
    """Speeches as LEAF has them: one line each, with single spaces and a newline at the end."""
    return [f"{' '.join(speech.split())}\n" for speech in speeches]


def next_characters(spoken: Sequence[Sequence[str]], every: int = 1) -> tuple[Codes, Codes, NDArray[np.int64], int]:
    """Every character of every owner's lines with the 80 before it: (windows, characters, whose, strange ones).

    As in LEAF's code a line begins after 80 spaces and knows nothing of the line before it. Of each owner's
    characters, in their order, `every` keeps the first, and each so many after it.
    """
    padding = " " * LENGTH
    codes, strange = encode("".join(padding + line for owner in spoken for line in owner))
    sizes = np.array([len(line) for owner in spoken for line in owner], dtype=np.int64)
    counts = np.array([sum(map(len, owner)) for owner in spoken], dtype=np.int64)
    owners = np.repeat(np.arange(len(spoken)), counts)
    # Characters stand one after the other, but for the padding before each line.
    targets = np.arange(sizes.sum()) + LENGTH * np.repeat(np.arange(1, len(sizes) + 1), sizes)
    if every > 1:
        turn = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        targets, owners = targets[turn % every == 0], owners[turn % every == 0]
    if not len(targets):
        return np.zeros((0, LENGTH), np.uint8), np.zeros(0, np.uint8), owners, strange
    return sliding_window_view(codes, LENGTH)[targets - LENGTH], codes[targets], owners, strange


def first_of_each(owners: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Which samples are among the first `share` of their owner's, rounded down but one at least.

    The samples of an owner stand together. Later ones are for testing: cut at random, a window of one part would hold
    the characters to be told in the other.
    """
    counts = np.bincount(owners) if len(owners) else np.zeros(0, dtype=np.int64)
    turn = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = np.maximum(1, (counts * share + 1e-9).astype(np.int64))
    return np.asarray(turn < kept[owners])
