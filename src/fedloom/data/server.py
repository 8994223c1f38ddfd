"""Data on the server: samples that no client holds, or another data set.

Written `split:0.05` (a share of the training samples), `split:500` (so many of them), or as the name of a data set.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedloom.data.content import Dataset
from fedloom.data.federation import Federation, PooledFederation
from fedloom.data.partitions.request import Indices, Rng
from fedloom.data.samples import Samples
from fedloom.errors import InputError

DEFAULT = "split:0.05"
"""What is taken where a method needs data on the server and nobody says which."""
OWN = "own"
"""Said of samples that a user's own federation brings along."""
NOTHING: Indices = np.arange(0)


@dataclass(frozen=True)
class ServerData:
    """What the server holds, and where it comes from."""

    samples: Samples
    source: str
    """As it is written: `split:0.05`, `own`, or the name of a data set."""
    classes: int
    """How many classes its labels tell apart; 0 where they are not classes."""

    def sentence(self, users: tuple[str, ...]) -> str:
        """What a person should know about it, given the methods that use it."""
        used = f"used by {' and '.join(users)}" if users else "which no method here uses"
        whose = "samples that no client holds" if is_split(self.source) else "samples"
        return f"The server holds {len(self.samples)} {whose} (--server-data {self.source}), {used}."


def is_split(spec: str | None) -> bool:
    """Whether the server's data are part of the training samples."""
    return spec is not None and spec.strip().partition(":")[0] == "split"


def keep_back(spec: str | None, count: int, rng: Rng) -> Indices:
    """Sorted positions of the samples, of `count`, that the server keeps; none unless `spec` is a split."""
    if spec is None or not is_split(spec):
        return NOTHING
    taken = _size(spec, count)
    if not 0 < taken < count:
        left = "so nothing would be left for the clients" if taken else "which is none"
        raise InputError(f"server_data {spec!r} takes {taken} of {count} training samples, {left}.")
    return np.sort(rng.choice(count, taken, replace=False)).astype(np.int64)


def _size(spec: str, count: int) -> int:
    text = spec.strip().partition(":")[2].strip()
    try:
        if text.isascii() and text.isdigit() and int(text) > 0:
            return int(text)
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise InputError(
            f"server_data {spec!r} cannot be taken; expected a share between 0 and 1, such as {DEFAULT}, or a whole "
            "number of samples, such as split:500."
        )
    return int(share * count + 0.5)


def of_federation(federation: Federation, spec: str, rng: Rng) -> tuple[Federation, ServerData]:
    """What the server holds of a user's own federation, and the federation without it."""
    name = federation.name
    if not is_split(spec):
        if federation.server_data is None:
            raise InputError(
                f"server_data is {OWN!r}, but the data {name!r} bring none: set `server_data` of the federation."
            )
        return federation, _fitting(federation, ServerData(federation.server_data, spec, federation.classes))
    if not isinstance(federation, PooledFederation):
        raise InputError(
            f"the data {name!r} are spread over their clients already, so {spec!r} cannot be taken from them; set "
            "`server_data` of the federation, or name a data set."
        )
    held = keep_back(spec, len(federation.pool), rng)
    lighter = copy.copy(federation)
    lighter.parts = [part[~np.isin(part, held)] for part in federation.parts]
    return lighter, ServerData(federation.pool.take(held), spec, federation.classes)


def of_another(federation: Federation, spec: str, load: Callable[[str], Dataset]) -> ServerData:
    """The training samples of the data set `spec`, which must look like those of the federation."""
    if spec == federation.name:
        raise InputError(f"server_data {spec!r} is what the clients hold; expected another data set, or {DEFAULT}.")
    other = load(spec)
    return _fitting(federation, ServerData(other.train, spec, other.classes))


def _fitting(federation: Federation, held: ServerData) -> ServerData:
    mine, theirs = held.samples, _example(federation)
    if not len(mine):
        raise InputError(f"server_data {held.source!r} holds no samples.")
    alike = theirs is None or (mine.are_images, mine.are_tokens) == (theirs.are_images, theirs.are_tokens)
    if mine.shape != federation.shape or not alike:
        raise InputError(
            f"server_data {held.source!r} has inputs of {_kind(mine)} {_by(mine.shape)}, but those of "
            f"{federation.name!r} are {_kind(theirs or mine)} {_by(federation.shape)}."
        )
    if mine.are_tokens and federation.tokens and (largest := int(mine.x.max())) >= federation.tokens:
        raise InputError(
            f"server_data {held.source!r} has the token {largest}, but {federation.name!r} has {federation.tokens}."
        )
    return held


def _example(federation: Federation) -> Samples | None:
    if isinstance(federation, PooledFederation):
        return federation.pool
    return federation.test if federation.test is not None else federation.client(0)


def _kind(samples: Samples) -> str:
    return "images" if samples.are_images else "tokens" if samples.are_tokens else "numbers"


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
