"""`Dataset`, a data set in memory, its classes, and the parser of data set names.

A name may have a path and options, as in `table:people.csv,label=income,owner=site`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.samples import InputTransform, Samples
from fedloom.errors import InputError, unknown_name_error
from fedloom.utils.system import expand_user_path


@dataclass
class DatasetSpec:
    """A parsed name: `name:PATH,option=value,...`, or `name:option=value,...` for a data set without a path.

    Each method reads one option and removes it; `refuse_unused_options` rejects the remaining ones.
    """

    name: str
    path: Path | None
    options: dict[str, str]
    known_options: list[str]
    rows_not_fitted: NDArray[np.int64] | None = None
    """Training rows that standardization and categories must not depend on."""

    def text_option(self, key: str, default: str = "") -> str:
        """Return an option as text."""
        self.known_options.append(key)
        return self.options.pop(key, default)

    def integer_option(self, key: str, default: int, minimum: int) -> int:
        """Return an option as a whole number of at least `minimum`."""
        text = self.text_option(key, str(default))
        if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < minimum:
            raise InputError(f"{key} of {self.name!r} is {text!r}; expected a whole number of at least {minimum}.")
        return int(text)

    def fraction_option(self, key: str, default: float) -> float:
        """Return an option as a fraction above 0 and below 1."""
        text = self.text_option(key, str(default))
        share = parse_dataset_number(text)
        if not 0 < share < 1:
            raise InputError(f"{key} of {self.name!r} is {text!r}; expected a share above 0 and below 1.")
        return share

    def yes_no_option(self, key: str) -> bool:
        """Return whether an option is `yes`; the default is `no`."""
        text = self.text_option(key, "no").lower()
        if text not in ("yes", "no"):
            raise InputError(f"{key} of {self.name!r} is {text!r}; expected yes or no.")
        return text == "yes"

    def refuse_unused_options(self) -> None:
        """Raise `InputError` if an option was not read."""
        if self.options:
            raise unknown_name_error(f"option of {self.name!r}", next(iter(self.options)), self.known_options)


def parse_dataset_number(text: str) -> float:
    """Return a text as a number, or NaN if it is not one."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def parse_dataset_name(text: str, takes_path: bool) -> DatasetSpec:
    """Parse the name of a data set into name, path and options."""
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
"""The owner of a sample that has no owner or that no client gets."""


@dataclass(frozen=True)
class Dataset:
    """Training and test samples, with the owner and the domain of each sample if they are known.

    `owners` and `domains` give for each training sample a position in `owner_names` and `domain_names`;
    `test_owners` and `test_domains` do so for each test sample. There `NO_OWNER` means: not in the training samples.
    """

    train: Samples
    test: Samples
    class_names: tuple[str, ...]
    """Empty for a regression."""
    owners: NDArray[np.int64] | None = None
    owner_names: tuple[str, ...] = ()
    domains: NDArray[np.int64] | None = None
    domain_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences for the user about how the data were read."""
    vocabulary_size: int = 0
    """Number of different tokens, if inputs are tokens; 0 if unknown."""
    test_owners: NDArray[np.int64] | None = None
    test_domains: NDArray[np.int64] | None = None
    name: str = ""
    """Set by `load_dataset`; readers leave it empty."""
    transform: InputTransform = field(default_factory=InputTransform.identity)
    """Turns stored samples into network inputs of `shape`; images are scaled to 0..1 if it has no constants."""
    fitted: bool = False
    """Whether the inputs depend on statistics of the training samples, such as the mean of a column."""

    def __post_init__(self) -> None:
        if self.train.are_images and not self.transform.mean:
            object.__setattr__(self, "transform", self.train.default_transform())
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


def dataset_owner_positions(owners: Sequence[str | None], owner_names: Sequence[str]) -> NDArray[np.int64]:
    """Return the position of each owner in `owner_names`, or `NO_OWNER` if it is not there."""
    at = {name: position for position, name in enumerate(owner_names)}
    return np.array([NO_OWNER if name is None else at.get(name, NO_OWNER) for name in owners], dtype=np.int64)


State = Literal["included", "on this machine", "can be downloaded", "must be downloaded by hand", "your own"]


@dataclass(frozen=True)
class DatasetInfo:
    """A data set of `available_datasets`, described without loading it."""

    name: str
    summary: str
    classes: int | None
    """None if it depends on the files; so do the next three."""
    shape: tuple[int, ...]
    """Shape of one network input, or empty."""
    num_train_examples: int | None
    """Number of training samples, without the test samples."""
    num_test_examples: int | None
    state: State
    folder: Path | None = None
    """The folder with its files, if they were found."""
    missing_parts: tuple[str, ...] = ()
    """Optional parts that were not found."""
    manual_steps: str = ""
    """What you must do to get the files, if fedloom cannot download them."""


def select_classes(dataset: Dataset, spec: str | None) -> Dataset:
    """Keep the samples of some classes.

    Args:
        dataset: The data set to select from; it is not changed.
        spec: The classes to keep, such as "0-4" or "0,2,7-9". None keeps all.

    Returns:
        A data set with fewer classes. Its labels count from 0 again, in the order of the original classes.

    Raises:
        InputError: If `spec` cannot be read, names a class that does not exist, or names fewer than two.
    """
    if spec is None:
        return dataset
    kept = _parse_classes(spec, dataset.classes, dataset.name)
    new_label = torch.full((dataset.classes,), -1)
    new_label[kept] = torch.arange(len(kept))

    def part(samples: Samples) -> Samples:
        labels = new_label[samples.y]
        index = torch.nonzero(labels >= 0).flatten()
        return Samples(samples.x.index_select(0, index), labels[index])

    def marks(values: NDArray[np.int64] | None, samples: Samples) -> NDArray[np.int64] | None:
        return None if values is None else values[np.isin(samples.y.numpy(), kept)]

    return replace(
        dataset,
        train=part(dataset.train),
        test=part(dataset.test),
        class_names=tuple(dataset.class_names[label] for label in kept),
        owners=marks(dataset.owners, dataset.train),
        domains=marks(dataset.domains, dataset.train),
        test_owners=marks(dataset.test_owners, dataset.test),
        test_domains=marks(dataset.test_domains, dataset.test),
    )


def _parse_classes(spec: str, count: int, name: str) -> list[int]:
    """Parse `spec` into sorted classes of the data set `name`, which has `count` classes."""
    kept: list[int] = []
    for piece in spec.split(","):
        found = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", piece, flags=re.ASCII)
        if found is None:
            raise InputError(f"classes are given as 0-4 or 0,1,2, not {spec!r}.")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise InputError(f"the classes {piece.strip()!r} run backwards; write {last}-{first}.")
        if last >= count:
            raise InputError(f"{name!r} has the classes 0 to {count - 1}, so there is no class {last}.")
        kept += range(first, last + 1)
    if len(set(kept)) < len(kept):
        raise InputError(f"the classes {spec!r} name class {next(c for c in kept if kept.count(c) > 1)} twice.")
    if len(kept) < 2:
        raise InputError(f"the classes {spec!r} are only one; there must be two to tell apart.")
    return sorted(kept)
