"""A data set's name with what a person says beside it: `table:people.csv,label=income,owner=site`.

A data set in memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedloom.data.samples import InputTransform, Samples
from fedloom.errors import InputError, unknown_name_error
from fedloom.utils.system import expand_user_path


@dataclass
class DatasetSpec:
    """`name:PATH,option=value,...`, or `name:option=value,...` where the data set takes no path.

    Each option is taken once, by one of the methods, and `done` refuses those that nobody took.
    """

    name: str
    path: Path | None
    options: dict[str, str]
    asked: list[str]

    def text(self, key: str, default: str = "") -> str:
        """An option as it was written."""
        self.asked.append(key)
        return self.options.pop(key, default)

    def whole(self, key: str, default: int, least: int) -> int:
        """A whole number."""
        text = self.text(key, str(default))
        if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < least:
            raise InputError(f"{key} of {self.name!r} is {text!r}; expected a whole number of at least {least}.")
        return int(text)

    def share(self, key: str, default: float) -> float:
        """A part of the whole, above 0 and below 1."""
        text = self.text(key, str(default))
        share = parse_number_option(text)
        if not 0 < share < 1:
            raise InputError(f"{key} of {self.name!r} is {text!r}; expected a share above 0 and below 1.")
        return share

    def yes(self, key: str) -> bool:
        """Whether the option says yes; it is no by default."""
        text = self.text(key, "no").lower()
        if text not in ("yes", "no"):
            raise InputError(f"{key} of {self.name!r} is {text!r}; expected yes or no.")
        return text == "yes"

    def done(self) -> None:
        """Complain about what is left."""
        if self.options:
            raise unknown_name_error(f"option of {self.name!r}", next(iter(self.options)), self.asked)


def parse_number_option(text: str) -> float:
    """The number that a text says; NaN where it says none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def parse_dataset_name(text: str, takes_path: bool) -> DatasetSpec:
    """The parts of a data set's name."""
    name, _, rest = text.partition(":")
    if "\0" in rest:
        raise InputError(f"the data set {text!r} has a zero byte, which no path or name has.")
    pieces = rest.split(",") if rest else []
    path = None
    if takes_path:
        if not pieces or not pieces[0].strip():
            raise InputError(f"{name!r} wants a path, as in {name}:PATH; {text!r} has none.")
        path = expand_user_path(pieces.pop(0).strip())
    options: dict[str, str] = {}
    for piece in pieces:
        key, mark, value = (part.strip() for part in piece.partition("="))
        if not (key and mark and value):
            raise InputError(f"cannot read {piece!r} in the data set {text!r}; expected KEY=VALUE.")
        if key in options:
            raise InputError(f"the data set {text!r} says {key} twice.")
        options[key] = value
    return DatasetSpec(name, path, options, [])


NO_OWNER = -1
"""The owner of a sample that is nobody's, or left out."""


@dataclass(frozen=True)
class Dataset:
    """Training and test samples, and where it is known whose each sample is and where it comes from.

    `owners` and `domains` give for each training sample a position in `owner_names` and `domain_names`, and
    `test_owners` and `test_domains` for each test sample; there NOBODY is somebody without training samples.
    """

    train: Samples
    test: Samples
    class_names: tuple[str, ...]
    """Empty where the task is no classification."""
    owners: NDArray[np.int64] | None = None
    owner_names: tuple[str, ...] = ()
    domains: NDArray[np.int64] | None = None
    domain_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What a person should know about how it was read, a sentence each."""
    tokens: int = 0
    """Where inputs are tokens: how many different ones there may be; 0 where nobody says."""
    test_owners: NDArray[np.int64] | None = None
    test_domains: NDArray[np.int64] | None = None
    name: str = ""
    """What it is called; a reader leaves it to `load`."""
    prepare: InputTransform = field(default_factory=InputTransform.identity)
    """Makes network input of shape `shape` from stored samples; images without constants are scaled to 0..1."""

    def __post_init__(self) -> None:
        if self.train.are_images and not self.prepare.mean:
            object.__setattr__(self, "prepare", self.train.default_prepare())
        training, testing = (len(self.train), "training", 0), (len(self.test), "test", NO_OWNER)
        for (count, part, least), what, values, names in (
            (training, "owners", self.owners, self.owner_names),
            (training, "domains", self.domains, self.domain_names),
            (testing, "owners", self.test_owners, self.owner_names),
            (testing, "domains", self.test_domains, self.domain_names),
        ):
            if values is None:
                continue
            if values.shape != (count,):
                raise InputError(f"{count} {part} samples have {what} of shape {values.shape}.")
            if len(values) and (values.min() < least or values.max() >= len(names)):
                raise InputError(f"{what} run from {values.min()} to {values.max()}, but {len(names)} have a name.")

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.train.shape


def owner_positions(of: Sequence[str | None], names: Sequence[str]) -> NDArray[np.int64]:
    """Where each of these owners stands in `names`; NOBODY for one who does not."""
    at = {name: position for position, name in enumerate(names)}
    return np.array([NO_OWNER if name is None else at.get(name, NO_OWNER) for name in of], dtype=np.int64)


State = Literal["embedded", "at hand", "can be downloaded", "must be fetched by hand", "your own"]


@dataclass(frozen=True)
class DatasetInfo:
    """What is known about a data set without loading it."""

    name: str
    summary: str
    classes: int | None
    """None where the files decide, as they do on the rest."""
    shape: tuple[int, ...]
    """Empty where the files decide."""
    samples: int | None
    """For training; `test_samples` come on top. None where it depends on how the files were made."""
    test_samples: int | None
    state: State
    found: Path | None = None
    """The folder it was found in, where it is at hand."""
    missing: tuple[str, ...] = ()
    """Parts that were not found and that can be done without."""
    get: str = ""
    """What a person must do to get it, where it must be fetched by hand."""
