"""Client states on disk, in the site's own folder.

A client state is what a client keeps between rounds.

A state is named by the nonce of the task that made it. At first it is only staged. It becomes the client's state when a
later request says that the server accepted the update. So a failed or refused reply leaves the client unchanged, as in
every other engine. Earlier states are kept too, for a server that goes back to its last checkpoint. Only the last few
staged states are kept, so that no server fills a site's disk with requests.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fedloom.errors import FedloomError, InputError
from fedloom.utils.storage import read_json, read_safetensors, write_json, write_safetensors

GENERATIONS = 3
"""Number of accepted states to keep: the current one and those of two rounds before, for a server that finds its newest
checkpoint damaged."""
STAGED = 8
"""Maximum number of staged states: one for each time that the server asks again before it accepts one."""


class SiteStateStore:
    """The stored states of one client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index = folder / "kept.json"
        index = read_json(self._index) if self._index.exists() else {"taken": [], "staged": [], "digests": {}}
        self._taken: list[str] = list(index["taken"])
        """States that the server accepted, the newest last."""
        self._staged: list[str] = list(index["staged"])
        """States that it has not accepted yet, the newest last."""
        self._digests: dict[str, str] = dict(index["digests"])
        """Checksums of all stored states, staged ones too."""

    def get(self, nonce: str) -> dict[str, Tensor] | None:
        """Return the state with this name and make it the current one; None if it does not exist.

        All other staged states are deleted.
        """
        if nonce not in self._digests:
            return None
        tensors = read_safetensors(self._path(nonce), self._digests[nonce])
        new = self._taken[-1:] != [nonce]
        if new:
            before = self._taken[: self._taken.index(nonce)] if nonce in self._taken else self._taken
            self._taken = [*before, nonce][-GENERATIONS:]
        self._staged = []
        if not self._sweep(set(self._taken)) and new:
            self._write()
        return tensors

    def forget(self) -> None:
        """Delete all states, because the server knows of none."""
        self._taken, self._staged = [], []
        self._sweep(set())

    def stage(self, nonce: str, state: Mapping[str, Tensor]) -> None:
        """Write a state that the server may accept."""
        self._digests[nonce] = write_safetensors(self._path(nonce), state)
        self._staged = [*(other for other in self._staged if other != nonce), nonce][-STAGED:]
        if not self._sweep({*self._taken, *self._staged}):
            self._write()

    def _sweep(self, wanted: set[str]) -> bool:
        """Delete all other states; return whether there were any. The index goes first, to name only existing files."""
        gone = set(self._digests) - wanted
        if not gone:
            return False
        self._digests = {nonce: digest for nonce, digest in self._digests.items() if nonce in wanted}
        self._write()
        for nonce in gone:
            self._path(nonce).unlink(missing_ok=True)
        return True

    def _write(self) -> None:
        write_json(self._index, {"taken": self._taken, "staged": self._staged, "digests": self._digests})

    def _path(self, nonce: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{32}", nonce):  # it came from outside and names a file
            raise InputError(f"a nonce must be 32 hexadecimal digits, not {nonce!r}.")
        return self.folder / f"{nonce}.safetensors"


class SiteStateLost(FedloomError):
    """The site does not have the client state that the server expects."""
