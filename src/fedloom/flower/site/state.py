"""What a client keeps between rounds, in its site's own folder.

A state is named by the nonce of the job that made it. It is only staged at first: it becomes the client's state when a
later question says that the server took the update it came from. So an answer that was lost or refused leaves the
client as it was, as in every other engine, and a server that goes back to its last checkpoint finds the state that
belongs to it: the states before the present one are kept too. Of those that are only staged the last few are kept, so
that no server fills a site's disk with questions.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fedloom.errors import FedloomError, InputError
from fedloom.utils.storage import read_json, read_safetensors, write_json, write_safetensors

GENERATIONS = 3
"""States that the server has taken and that are still kept: the present one and those of two rounds before, for a
server that finds its newest checkpoint damaged."""
STAGED = 8
"""States that are staged at most: one for each time that the server asks anew before it takes one."""


class SiteStateStore:
    """The states of one client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index = folder / "kept.json"
        index = read_json(self._index) if self._index.exists() else {"taken": [], "staged": [], "digests": {}}
        self._taken: list[str] = list(index["taken"])
        """States that the server has taken, the newest last."""
        self._staged: list[str] = list(index["staged"])
        """States that it has not taken yet, likewise."""
        self._digests: dict[str, str] = dict(index["digests"])
        """Checksums of all states that lie here, staged ones too."""

    def get(self, nonce: str) -> dict[str, Tensor] | None:
        """The state with this name, which from now on is the client's; None where it is not there.

        What was staged and not taken is forgotten.
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
        """Start anew: the server knows of no state."""
        self._taken, self._staged = [], []
        self._sweep(set())

    def stage(self, nonce: str, state: Mapping[str, Tensor]) -> None:
        """Write a state that the server may take."""
        self._digests[nonce] = write_safetensors(self._path(nonce), state)
        self._staged = [*(other for other in self._staged if other != nonce), nonce][-STAGED:]
        if not self._sweep({*self._taken, *self._staged}):
            self._write()

    def _sweep(self, wanted: set[str]) -> bool:
        """Delete all states but these, if there are others; the index goes first: it names only what is there."""
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
            raise InputError(f"a nonce is 32 hexadecimal digits, not {nonce!r}.")
        return self.folder / f"{nonce}.safetensors"


class SiteStateLost(FedloomError):
    """The site has not the state that the server believes its client to have."""
