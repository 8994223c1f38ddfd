"""What a column of labels and a column of owners mean."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedloom.data.columns import Texts, are_whole, to_numbers
from fedloom.data.spec import Spec
from fedloom.errors import InputError, unknown

MOST_CLASSES = 1000
"""Above this many different whole numbers nobody can know whether they are classes or quantities."""

TASKS = ("auto", "classification", "regression")


@dataclass(frozen=True)
class Targets:
    """Labels as numbers: int64 of n, or for a regression, which has no class names, float32 of n x 1."""

    y: NDArray[np.int64] | NDArray[np.float32]
    class_names: tuple[str, ...]


def task_of(spec: Spec) -> str:
    """The option `task`."""
    task = spec.text("task", "auto")
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    return task


def make_targets(texts: Texts, task: str, where: str) -> Targets:
    """The targets that a column of labels without gaps means: whole numbers and words are classes, others are not."""
    numbers = to_numbers(texts)
    if task == "auto":
        task = "regression" if numbers is not None and not are_whole(texts) else "classification"
        if task == "classification" and numbers is not None and len(set(texts)) > MOST_CLASSES:
            raise InputError(
                f"{where} has {len(set(texts))} different whole numbers as labels; say task=regression or "
                "task=classification."
            )
    if task == "regression":
        if numbers is None:
            strange = next(text for text in texts if text is None or to_numbers([text]) is None)
            raise InputError(f"{where} has the label {strange!r}; a regression wants numbers.")
        with np.errstate(over="ignore"):
            y = numbers.astype(np.float32)[:, None]
        if not np.isfinite(y).all():
            raise InputError(f"{where} has labels that are infinite in single precision; expected finite numbers.")
        return Targets(y, ())
    names = ordered(texts)
    if len(names) < 2:
        raise InputError(f"{where} has only the label {names[0]!r}; there must be two to tell apart.")
    position = {name: number for number, name in enumerate(names)}
    return Targets(np.array([position[str(text)] for text in texts], dtype=np.int64), names)


def join_targets(train: Texts, test: Texts, task: str, where: str, tested: str) -> Targets:
    """The targets of both, one after the other; a class that no training row has cannot be tested."""
    targets = make_targets(train + test, task, where)
    if targets.class_names and (new := set(test) - set(train)):
        raise InputError(f"{tested} has the label {min(map(str, new))!r}, which no training row has.")
    return targets


def ordered(texts: Texts) -> tuple[str, ...]:
    """The different words, in the order of numbers where all of them are numbers."""
    words = sorted({text for text in texts if text is not None})
    if (numbers := to_numbers(list(words))) is not None:
        return tuple(words[i] for i in np.argsort(numbers, kind="stable"))
    return tuple(words)


def make_owners(texts: Texts, where: str, column: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Whose each row is, and the owners' names."""
    if None in texts:
        raise InputError(f"{where} does not say whose row {texts.index(None) + 1} is: {column!r} is missing there.")
    names = ordered(texts)
    position = {name: number for number, name in enumerate(names)}
    return np.array([position[str(text)] for text in texts], dtype=np.int64), names


def test_rows(owners: NDArray[np.int64] | None, count: int, share: float) -> NDArray[np.bool_]:
    """Which rows are for testing: of each owner's a share, always the same ones; each keeps one to train on."""
    rng = np.random.default_rng(0)
    held = np.zeros(count, dtype=np.bool_)
    groups = [np.arange(count)] if owners is None else [np.flatnonzero(owners == k) for k in range(owners.max() + 1)]
    for rows in groups:
        held[rng.permutation(rows)[: min(int(share * len(rows) + 0.5), len(rows) - 1)]] = True
    return held
