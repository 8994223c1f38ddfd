"""Checkpoints of a run: the state of all parts, and the client states.

A checkpoint is a file `round-000012.json`, which is written last. It names the files of its tensors:
`round-000012.safetensors` for the parts of the method, and `clients-*.safetensors` for the client states. Only changed
client states are written, so a checkpoint also refers to client files of earlier ones. If more of these files is out of
date than in use, all client states are written again.

On a GPU a thread may write a checkpoint from copies while the next rounds run. Until its JSON file exists, the
checkpoint before it counts, as after a crash.
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
    join_stored_tensors,
    read_json,
    read_safetensors,
    split_stored_tensors,
    write_json,
    write_safetensors,
)

SHARE_OF_MEMORY = 4
"""Copies take at most 1 / SHARE_OF_MEMORY of the free memory of a GPU, because training may need more of it."""
MOST_ON_HOST = 1 << 30
"""Maximum bytes of copies on the host."""


class _WriteCancelled(Exception):
    """The checkpoint that is being written was cancelled."""


class _BackgroundWriter:
    """Run one piece of work at a time in a thread."""

    def __init__(self) -> None:
        self._future: Future[None] | None = None
        self._cancelled = threading.Event()

    @property
    def busy(self) -> bool:
        return self._future is not None and not self._future.done()

    def start(self, work: Callable[[], None], device: torch.device) -> None:
        """Start `work`, in its own CUDA stream if `device` has streams."""

        def in_own_stream() -> None:
            with use_exclusive_stream(device):
                work()

        self.wait_until_written()
        self._cancelled.clear()
        thread = ThreadPoolExecutor(1)
        self._future = thread.submit(in_own_stream)
        thread.shutdown(wait=False)

    def wait_until_written(self) -> None:
        """Wait for the work, and raise its error, once."""
        future = self._future
        if future is None:
            return
        try:
            future.result()
        finally:
            if future.done():  # otherwise the wait was interrupted
                self._future = None

    def check_cancelled(self) -> None:
        """End the work if it was cancelled; the work calls this between two pieces."""
        if self._cancelled.is_set():
            raise _WriteCancelled

    def cancel(self) -> None:
        """Ask the work to end soon; `wait_until_written` waits until it has ended."""
        self._cancelled.set()


def _snapshot_tensors(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Copy tensors on their devices and wait for the copies. Return None if there is not enough free memory."""
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
    """Return how many bytes copies may take."""
    if device.type != "cuda":
        return MOST_ON_HOST
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
        device
    )  # such as the memory of the last copies
    return (free + idle) // SHARE_OF_MEMORY


FORMAT = 3


class Checkpoints:
    """The checkpoints in one folder, of which the last `keep_checkpoints` remain."""

    def __init__(self, folder: Path, keep_checkpoints: int = 2) -> None:
        self.folder = folder
        self.keep_checkpoints = keep_checkpoints
        self.damaged: list[str] = []
        """Messages about damaged checkpoints that loading has skipped."""
        self._client_files: dict[int, str] = {}
        self._clients_per_file: dict[str, int] = {}
        self._digests: dict[str, str] = {}
        self._write_began = 0.0
        self._write_took: float | None = 0.0
        self._background_writer = _BackgroundWriter()
        self._being_written: tuple[ClientStates, set[int]] | None = None

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, newest first."""
        found = [re.fullmatch(r"round-(\d+)\.json", path.name) for path in self.folder.glob("round-*.json")]
        return sorted((int(match[1]) for match in found if match), reverse=True)

    @property
    def write_seconds(self) -> float:
        """Seconds that the last checkpoint took to write, or has taken so far."""
        return self._write_took if self._write_took is not None else time.monotonic() - self._write_began

    def save(
        self,
        round: int,
        state: Mapping[str, Any],
        client_states: ClientStates,
        *,
        background_device: torch.device | None = None,
    ) -> None:
        """Write the state after `round` rounds.

        With `background_device`, the device of the state, a thread writes copies while the caller continues. If there
        is no memory for copies, the state is written at once. `wait_until_written` raises the errors of the thread.
        """
        self.wait_until_written()
        self._write_began, self._write_took = time.monotonic(), None
        tree, tensors = split_stored_tensors(state)
        client_ids = self._client_ids_to_write(client_states)
        client_tensors = {
            f"{c}/{key}": tensor for c in sorted(client_ids) for key, tensor in client_states.get(c).items()
        }
        copies = (
            _snapshot_tensors([*tensors.values(), *client_tensors.values()]) if background_device is not None else None
        )
        if background_device is None or copies is None:
            self._write(round, tree, tensors, client_ids, client_tensors, check_cancelled=lambda: None)
            client_states.changed.clear()
            return
        tensors = dict(zip(tensors, copies[: len(tensors)], strict=True))
        client_tensors = dict(zip(client_tensors, copies[len(tensors) :], strict=True))
        self._being_written = (client_states, set(client_states.changed))
        client_states.changed.clear()
        work = partial(
            self._write,
            round,
            tree,
            tensors,
            client_ids,
            client_tensors,
            check_cancelled=self._background_writer.check_cancelled,
        )
        self._background_writer.start(work, background_device)

    def wait_until_written(self, *, wait: bool = True) -> None:
        """Raise the error of a checkpoint that was written in the background.

        Wait for one that is still being written, unless `wait` is False.
        """
        if not wait and self._background_writer.busy:
            return
        try:
            self._background_writer.wait_until_written()
        except BaseException:
            if self._being_written is not None:  # otherwise an interrupt, and nothing was in the background
                client_states, changed = self._being_written
                client_states.changed |= changed
            raise

    def cancel(self) -> None:
        """Cancel a checkpoint that is being written; the one before it counts."""
        self._background_writer.cancel()
        with suppress(Exception):
            self.wait_until_written()

    def _write(
        self,
        round: int,
        tree: Any,
        tensors: Mapping[str, Tensor],
        client_ids: set[int],
        client_tensors: Mapping[str, Tensor],
        check_cancelled: Callable[[], None],
    ) -> None:
        """Write a split state and some client states; `check_cancelled` may raise an error to cancel."""
        digest = write_safetensors(
            self.folder / f"round-{round:06d}.safetensors", tensors, check_cancelled=check_cancelled
        )
        if client_ids:
            name = f"clients-{round:06d}.safetensors"
            self._digests[name] = write_safetensors(self.folder / name, client_tensors, check_cancelled=check_cancelled)
            self._clients_per_file[name] = len(client_ids)
            self._client_files.update(dict.fromkeys(client_ids, name))
        files = sorted(set(self._client_files.values()))
        write_json(
            self.folder / f"round-{round:06d}.json",
            {
                "format": FORMAT,
                "round": round,
                "state": tree,
                "digest": digest,
                "clients": {str(client_id): name for client_id, name in sorted(self._client_files.items())},
                "client_files": {name: [self._digests[name], self._clients_per_file[name]] for name in files},
            },
        )
        self._delete_old_files(round)
        self._write_took = time.monotonic() - self._write_began

    def _client_ids_to_write(self, client_states: ClientStates) -> set[int]:
        """Return the changed clients, or all if too much of the stored files would be out of date."""
        stored = sum(self._clients_per_file[name] for name in set(self._client_files.values()))
        every = stored + len(client_states.changed) > 2 * len(client_states)
        return set(client_states.client_ids()) if every else set(client_states.changed)

    def _delete_old_files(self, newest: int) -> None:
        """Delete files that no kept checkpoint needs, in an order that keeps every remaining checkpoint complete.

        Rounds after `newest` exist if they were damaged and the run went back. They do not count as kept ones.
        """
        rounds = [round for round in self.rounds() if round <= newest]
        for old in set(self.rounds()) - set(rounds[: self.keep_checkpoints]):
            (self.folder / f"round-{old:06d}.json").unlink(missing_ok=True)
        needed = {path.name for path in self.folder.glob("round-*.json")}
        for kept in rounds[: self.keep_checkpoints]:
            needed.add(f"round-{kept:06d}.safetensors")
            try:
                needed.update(read_json(self.folder / f"round-{kept:06d}.json")["client_files"])
            except InputError:  # an older one that is damaged
                continue
        for path in self.folder.iterdir():
            if path.name not in needed and not path.is_dir():
                path.unlink(missing_ok=True)

    def load_latest(self, client_states: ClientStates) -> tuple[int, dict[str, Any]] | None:
        """Return (round, state) of the newest intact checkpoint and load `client_states`; None without checkpoints.

        A damaged one is skipped for the one before it: resuming from there gives the same bits, but takes longer.
        """
        for round in self.rounds():
            try:
                return round, self._load(round, client_states)
            except InputError as error:
                self.damaged.append(str(error))
        if self.damaged:
            raise InputError(self.damaged[0])
        return None

    def _load(self, round: int, client_states: ClientStates) -> dict[str, Any]:
        path = self.folder / f"round-{round:06d}.json"
        record = read_json(path)
        if record.get("format") != FORMAT:
            raise InputError(f"{path} has format {record.get('format')!r}; this version of fedloom reads {FORMAT}.")
        tensors = read_safetensors(self.folder / f"round-{round:06d}.safetensors", record["digest"])
        client_files = {int(client_id): name for client_id, name in record["clients"].items()}
        files: dict[str, dict[str, Tensor]] = {
            name: read_safetensors(self.folder / name, digest) for name, (digest, _) in record["client_files"].items()
        }
        for client_id, name in client_files.items():
            client_states.save(client_id, {key: files[name][f"{client_id}/{key}"] for key in client_states.shapes})
        client_states.changed.clear()
        self._client_files = client_files
        self._digests = {name: digest for name, (digest, _) in record["client_files"].items()}
        self._clients_per_file = {name: size for name, (_, size) in record["client_files"].items()}
        state: dict[str, Any] = join_stored_tensors(record["state"], tensors)
        return state
