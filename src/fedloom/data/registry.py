"""Registry of data sets: list, find, download and load them by name."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedloom.data.cache import Progress, load_through_cache
from fedloom.data.dataset import Dataset, DatasetInfo, DatasetSpec, parse_dataset_name
from fedloom.data.readers.huggingface import read_huggingface_dataset
from fedloom.data.readers.images import read_image_folder_dataset
from fedloom.data.readers.own_arrays import read_array_dataset
from fedloom.data.readers.tables import read_table_dataset
from fedloom.data.samples import InputTransform
from fedloom.data.sources import DATASET_SOURCES
from fedloom.data.sources.base import DatasetSource
from fedloom.data.sources.digit5 import DIGIT5
from fedloom.data.sources.femnist import FEMNIST
from fedloom.data.sources.hard_digits import NUM_TEST, NUM_TRAIN, SIDE, TRANSFORM, make_hard_digits
from fedloom.data.sources.image_folders import CINIC10, DOMAINNET, PACS
from fedloom.data.sources.mnist import TEN_DIGITS, read_sklearn_digits
from fedloom.errors import InputError, unknown_name_error
from fedloom.utils.data_folders import cache_folder, describe_data_state, possible_data_folders
from fedloom.utils.data_names import complete_data_name
from fedloom.utils.system import expand_user_path

DATASET_SOURCES.update({source.name: source for source in (CINIC10, FEMNIST, DIGIT5, DOMAINNET, PACS)})


OWN: dict[str, tuple[str, Callable[[DatasetSpec], Dataset]]] = {
    "folder": ("images of your own, one folder a class", read_image_folder_dataset),
    "domains": ("images of your own, one folder a domain, then one a class", read_image_folder_dataset),
    "table": ("a CSV or Parquet table of your own", read_table_dataset),
    "arrays": ("arrays of your own in an .npz file", read_array_dataset),
    "hf": ("a Hugging Face data set on disk, saved or as Parquet files", read_huggingface_dataset),
}
"""Kinds of user data: the prefix of the name, a summary, and the reader."""

DIGITS = DatasetInfo("digits", "handwritten digits, gray, 8 x 8", 10, (1, 8, 8), 1438, 359, "included")
HARD_DIGITS = DatasetInfo(
    "hard-digits", "distorted digits, gray, 16 x 16", 10, (1, SIDE, SIDE), NUM_TRAIN, NUM_TEST, "included"
)


def available_datasets() -> list[DatasetInfo]:
    """Return all data sets, and whether they are on this machine. Nothing is read or downloaded."""
    own = [DatasetInfo(f"{kind}:PATH", what, None, (), None, None, "your own") for kind, (what, _) in OWN.items()]
    included = [info for info, _ in INCLUDED.values()]
    return [*included, *(_describe(source) for source in DATASET_SOURCES.values()), *own]


def load_dataset(name: str, *, download: bool = True, progress: Progress | None = None) -> Dataset:
    """Load a data set by name, and download it into the cache folder if it is not on this machine.

    The files are searched in the folder named by the environment variable FEDLOOM_DATA, in the folders of packages of
    the operating system, and in the cache. Decoded data are cached and mapped into memory.

    Args:
        name: Name with options, such as "mnist", "cinic10:size=32" or "people.csv,label=income".
        download: Whether a download is allowed.
        progress: Called as `progress(file, bytes_done, bytes_total)` during a download.

    Returns:
        The data set, decoded.

    Raises:
        InputError: If the name or an option is unknown, files are missing or damaged, or the download fails.

    Example:
        >>> digits = load_dataset("digits")
        >>> len(digits.train), digits.shape
        (1438, (1, 8, 8))
    """
    name = complete_data_name(name)
    kind = name.partition(":")[0]
    if kind in OWN:
        return replace(OWN[kind][1](parse_dataset_name(name, takes_path=True)), name=name)
    if kind in INCLUDED:
        parse_dataset_name(name, takes_path=False).refuse_unused_options()
        info, load = INCLUDED[kind]
        return replace(load(), name=info.name)
    if kind not in DATASET_SOURCES:
        if kind == name and (advice := _read_as(name)):
            raise InputError(f"{name!r} is {advice}.")
        raise unknown_name_error("data set", kind, [*INCLUDED, *DATASET_SOURCES, *OWN])
    spec = parse_dataset_name(name, takes_path=False)
    source = DATASET_SOURCES[spec.name].with_options(spec)
    spec.refuse_unused_options()
    folder = _find(source) or _download(source, download, progress)
    content = load_through_cache(
        source.name, folder, source.cache_key(), source.input_files(folder), lambda: source.read(folder)
    )
    if lacking := source.missing_parts(folder):
        note = f"{name!r} is read without {', '.join(lacking)}, not found in {folder}."
        content = replace(content, notes=(*content.notes, note))
    return replace(content, name=name, transform=source.transform)


def load_dataset_fitted_without(name: str, rows: NDArray[np.int64]) -> Dataset:
    """Load a data set of the user whose inputs are `fitted`, as if the training rows `rows` were not known."""
    name = complete_data_name(name)
    spec = parse_dataset_name(name, takes_path=True)
    spec.rows_not_fitted = rows
    return replace(OWN[spec.name][1](spec), name=name)


def _load_digits() -> Dataset:
    train, test = read_sklearn_digits()
    gray = train.x.double() / 255
    transform = InputTransform((float(gray.mean()),), (float(gray.std()),))
    return Dataset(train, test, TEN_DIGITS, transform=transform)


def _load_hard_digits() -> Dataset:
    train, test = make_hard_digits()
    return Dataset(train, test, TEN_DIGITS, transform=TRANSFORM)


INCLUDED: dict[str, tuple[DatasetInfo, Callable[[], Dataset]]] = {
    DIGITS.name: (DIGITS, _load_digits),
    HARD_DIGITS.name: (HARD_DIGITS, _load_hard_digits),
}
"""Data sets that need no files: the description and the loader of each."""


def _describe(source: DatasetSource) -> DatasetInfo:
    found = _find(source)
    return DatasetInfo(
        source.name,
        source.summary,
        len(source.class_names),
        source.shape,
        source.num_train_examples,
        source.num_test_examples,
        describe_data_state(found, source.manual_steps),
        found,
        source.missing_parts(found) if found else (),
        "" if found else source.manual_steps,
    )


def _read_as(name: str) -> str:
    """Return advice on how to name a file or folder that was given by its path alone, or an empty text."""
    path = expand_user_path(name)
    try:
        if path.is_file():
            return f"a file; name it as table:{name},label=COLUMN, arrays:{name} or hf:{name}"
        if name and path.is_dir():
            return f"a folder; name it as {name}/ (one folder of images for each class), domains:{name} or hf:{name}"
    except (OSError, ValueError):  # not a valid path
        pass
    return ""


def _find(source: DatasetSource) -> Path | None:
    places = possible_data_folders(source.folder_names, source.system_folders)
    return next((folder for folder in places if source.is_complete(folder)), None)


def _download(source: DatasetSource, allowed: bool, progress: Progress | None) -> Path:
    if (own := os.environ.get("FEDLOOM_DATA")) and not Path(own).is_dir():
        raise InputError(f"FEDLOOM_DATA names {own!r}, which is no folder, so {source.name!r} was not found there.")
    folder = cache_folder() / source.folder_names[0]
    by_hand = (
        f"put {', '.join(source.files)} into {folder}, or into {source.folder_names[0]}/ of a folder that the "
        "environment variable FEDLOOM_DATA names"
    )
    if source.manual_steps:
        raise InputError(f"data set {source.name!r} must be downloaded by hand: {source.manual_steps}; then {by_hand}.")
    if not allowed:
        raise InputError(f"data set {source.name!r} is not on this machine; allow its download or {by_hand}.")
    try:
        source.download(folder, progress)
    except InputError as error:
        raise InputError(f"{str(error).rstrip('.')}; try again later or {by_hand}.") from None
    return folder
