"""Checkpoints of a run: the state of every part after a round, and what the clients keep.

A checkpoint is `round-000012.json`, written last and so the moment it exists, which names the files its tensors lie in:
`round-000012.safetensors` for the server's parts, and `clients-*.safetensors` for what clients keep. A client's state
is written only when it has changed, so a checkpoint refers to client files of earlier ones; when more of those files
is out of date than in use, everything is written once more.

On a GPU a checkpoint may be written beside the rounds that follow, from copies. Until its JSON file is there the one
before it counts, as if the machine had died in between.

Writing beside the training: what is to be written is copied first, and a thread of its own takes it from there.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.devices.cuda_runtime import use_exclusive_stream
from fedloom.errors import InputError
from fedloom.training.local_training import ClientStates
from fedloom.utils.storage import (
    join_state_tensors,
    read_json,
    read_safetensors,
    split_state_tensors,
    write_json,
    write_safetensors,
)

SHARE_OF_MEMORY = 4
"""Copies take one part in so many of what is free on a GPU at most: training may want more of it meanwhile."""
MOST_ON_HOST = 1 << 30
"""Bytes that are copied on the host at most."""


class _WriteCancelled(Exception):
    """Nobody wants the work any more."""


class _BackgroundWriter:
    """One piece of work at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._work: Future[None] | None = None
        self._unwanted = threading.Event()

    @property
    def busy(self) -> bool:
        return self._work is not None and not self._work.done()

    def begin(self, work: Callable[[], None], device: torch.device) -> None:
        """Do it from now on, in a stream of its own where `device` has streams."""

        def in_own_stream() -> None:
            with use_exclusive_stream(device):
                work()

        self.settle()
        self._unwanted.clear()
        thread = ThreadPoolExecutor(1)
        self._work = thread.submit(in_own_stream)
        thread.shutdown(wait=False)

    def settle(self) -> None:
        """Wait for what was begun; raises what went wrong with it, once."""
        work = self._work
        if work is None:
            return
        try:
            work.result()
        finally:
            if work.done():  # else whoever waited was interrupted
                self._work = None

    def check(self) -> None:
        """For the work to call now and then: ends it if it was abandoned."""
        if self._unwanted.is_set():
            raise _WriteCancelled

    def abandon(self) -> None:
        """Have what was begun end as soon as it can; `settle` then waits for that."""
        self._unwanted.set()


def _snapshot_tensors(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Copies where the originals lie, done when this returns; None where there is not memory enough to spare."""
    wanted = Counter[torch.device]()
    for tensor in tensors:
        wanted[tensor.device] += tensor.numel() * tensor.itemsize
    if any(size > _to_spare(device) for device, size in wanted.items()):
        return None
    try:
        copies = [tensor.detach().clone() for tensor in tensors]
    except torch.OutOfMemoryError:
        return None
    for device in wanted:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return copies


def _to_spare(device: torch.device) -> int:
    """Bytes that copies may take."""
    if device.type != "cuda":
        return MOST_ON_HOST
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # such as the last copies' place
    return (free + idle) // SHARE_OF_MEMORY


FORMAT = 1


class Checkpoints:
    """The checkpoints in one folder; the last `keep` are kept."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        self.damaged: list[str] = []
        """What was found damaged and passed over when loading, in words."""
        self._where: dict[int, str] = {}
        self._sizes: dict[str, int] = {}
        self._digests: dict[str, str] = {}
        self._began = 0.0
        self._took: float | None = 0.0
        self._beside = _BackgroundWriter()
        self._under_way: tuple[ClientStates, set[int]] | None = None

    def rounds(self) -> list[int]:
        """The rounds after which there is a checkpoint, newest first."""
        found = [re.fullmatch(r"round-(\d+)\.json", path.name) for path in self.folder.glob("round-*.json")]
        return sorted((int(match[1]) for match in found if match), reverse=True)

    @property
    def seconds(self) -> float:
        """How long the last checkpoint took to write, or takes so far."""
        return self._took if self._took is not None else time.monotonic() - self._began

    def save(
        self, round: int, state: Mapping[str, Any], homes: ClientStates, *, beside: torch.device | None = None
    ) -> None:
        """Write the state after `round` rounds.

        With `beside`, the device that what is written lies on, it is copied there and written while the caller goes on;
        where there is no memory for copies, at once all the same. What goes wrong is raised by `settle`.
        """
        self.settle()
        self._began, self._took = time.monotonic(), None
        tree, tensors = split_state_tensors(state)
        clients = self._to_write(homes)
        kept = {f"{c}/{key}": tensor for c in sorted(clients) for key, tensor in homes.get(c).items()}
        copies = _snapshot_tensors([*tensors.values(), *kept.values()]) if beside is not None else None
        if beside is None or copies is None:
            self._write(round, tree, tensors, clients, kept, check=lambda: None)
            homes.changed.clear()
            return
        tensors = dict(zip(tensors, copies[: len(tensors)], strict=True))
        kept = dict(zip(kept, copies[len(tensors) :], strict=True))
        self._under_way = (homes, set(homes.changed))
        homes.changed.clear()
        work = partial(self._write, round, tree, tensors, clients, kept, check=self._beside.check)
        self._beside.begin(work, beside)

    def settle(self, *, wait: bool = True) -> None:
        """Raise what went wrong with a checkpoint that was written beside other work.

        Waits for one that is still being written, unless `wait` is False.
        """
        if not wait and self._beside.busy:
            return
        try:
            self._beside.settle()
        except BaseException:
            if self._under_way is not None:  # else it was an interrupt, and nothing was ever written beside
                homes, changed = self._under_way
                homes.changed |= changed
            raise

    def abandon(self) -> None:
        """Break off a checkpoint that is being written: the one before it counts."""
        self._beside.abandon()
        with suppress(Exception):
            self.settle()

    def _write(
        self,
        round: int,
        tree: Any,
        tensors: Mapping[str, Tensor],
        clients: set[int],
        kept: Mapping[str, Tensor],
        check: Callable[[], None],
    ) -> None:
        """A state in two parts, and what some clients keep; `check` may raise something to end it."""
        digest = write_safetensors(self.folder / f"round-{round:06d}.safetensors", tensors, check=check)
        if clients:
            name = f"clients-{round:06d}.safetensors"
            self._digests[name] = write_safetensors(self.folder / name, kept, check=check)
            self._sizes[name] = len(clients)
            self._where.update(dict.fromkeys(clients, name))
        files = sorted(set(self._where.values()))
        write_json(
            self.folder / f"round-{round:06d}.json",
            {
                "format": FORMAT,
                "round": round,
                "state": tree,
                "digest": digest,
                "clients": {str(client): name for client, name in sorted(self._where.items())},
                "client_files": {name: [self._digests[name], self._sizes[name]] for name in files},
            },
        )
        self._sweep(round)
        self._took = time.monotonic() - self._began

    def _to_write(self, homes: ClientStates) -> set[int]:
        """The clients that changed, or all, when too much of what is stored would be out of date."""
        stored = sum(self._sizes[name] for name in set(self._where.values()))
        every = stored + len(homes.changed) > 2 * len(homes)
        return set(homes.clients()) if every else set(homes.changed)

    def _sweep(self, newest: int) -> None:
        """Delete what no kept checkpoint needs, in an order that leaves every one that remains whole.

        Later rounds than the one just saved are there when they were damaged and the run went back: they must not
        take the place of whole ones.
        """
        rounds = [round for round in self.rounds() if round <= newest]
        for old in set(self.rounds()) - set(rounds[: self.keep]):
            (self.folder / f"round-{old:06d}.json").unlink(missing_ok=True)
        needed = {path.name for path in self.folder.glob("round-*.json")}
        for kept in rounds[: self.keep]:
            needed.add(f"round-{kept:06d}.safetensors")
            try:
                needed.update(read_json(self.folder / f"round-{kept:06d}.json")["client_files"])
            except InputError:  # a damaged older one: it needs nothing any more
                continue
        for path in self.folder.iterdir():
            if path.name not in needed and not path.is_dir():
                path.unlink(missing_ok=True)

    def load_latest(self, homes: ClientStates) -> tuple[int, dict[str, Any]] | None:
        """The newest whole checkpoint, (round, state), with `homes` filled from it; None when there is none at all.

        A damaged one is passed over for the one before: going on from there gives the same bits, only later.
        """
        for round in self.rounds():
            try:
                return round, self._load(round, homes)
            except InputError as error:
                self.damaged.append(str(error))
        if self.damaged:
            raise InputError(self.damaged[0])
        return None

    def _load(self, round: int, homes: ClientStates) -> dict[str, Any]:
        path = self.folder / f"round-{round:06d}.json"
        record = read_json(path)
        if record.get("format") != FORMAT:
            raise InputError(f"{path} has format {record.get('format')!r}; this version of fedloom reads {FORMAT}.")
        tensors = read_safetensors(self.folder / f"round-{round:06d}.safetensors", record["digest"])
        where = {int(client): name for client, name in record["clients"].items()}
        files: dict[str, dict[str, Tensor]] = {
            name: read_safetensors(self.folder / name, digest) for name, (digest, _) in record["client_files"].items()
        }
        for client, name in where.items():
            homes.keep(client, {key: files[name][f"{client}/{key}"] for key in homes.shapes})
        homes.changed.clear()
        self._where = where
        self._digests = {name: digest for name, (digest, _) in record["client_files"].items()}
        self._sizes = {name: size for name, (_, size) in record["client_files"].items()}
        state: dict[str, Any] = join_state_tensors(record["state"], tensors)
        return state
