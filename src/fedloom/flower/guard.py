"""What sites send is measured before the server has it in memory.

Flower stores a message as a tree of small objects and puts it together in the server's process. A site may send as
many as it likes; and since equal pieces of an array are stored once, a few of them may unfold to any size. Here the
server stops fetching as soon as an answer has more bytes than any it could expect, looks at how large its arrays would
become before they do, and takes what cannot be put together for no answer at all.
"""

import json
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from fedloom.flower.parcel import MOST_BLOCKS, MOST_HEADER

TOO_LARGE = "refused: it has more than"
MARK = "fedloom: "
"""Before what this file says, among Flower's own words."""
SPARE = 8 * MOST_HEADER
"""Bytes of an answer beside its arrays: the header, and Flower's own records."""
MOST_OBJECTS = 4 * MOST_BLOCKS


class Guard:
    """Stands between Flower's Grid and what it fetches."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._inflated: dict[str, Any] = {}

    def install(self, grid: Any) -> None:
        """Let the Grid fetch through this guard. Other kinds, such as that of the simulation, are left alone."""
        from fedloom.flower.hasty import is_tested

        module: Any = import_module("flwr.superlink.grid.http_grid")
        if not isinstance(grid, module.HttpGrid) or not is_tested():
            return
        self._pull, self._inflate = module.pull_objects, module.inflate_object_from_contents
        module.pull_objects, module.inflate_object_from_contents = self.pull, self.inflate
        client = grid._runtime_client._client
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks["response"], self.look]}

    def look(self, response: Any) -> None:
        """Refuse one piece that is too large, when its length is known and before it is read."""
        length = response.headers.get("content-length", "")
        if response.request.url.path.endswith("/pull-object") and length.isdecimal():
            self._check(int(length), "")

    def pull(self, object_ids: list[str], pull_object_fn: Callable[[str], bytes], **options: Any) -> dict[str, bytes]:
        """Fetch an answer's objects and put it together, if it is not too large."""
        taken, lock = 0, threading.Lock()

        def fetch(object_id: str) -> bytes:
            nonlocal taken
            content = pull_object_fn(object_id)
            with lock:
                taken += len(content)
                self._check(taken, object_id)
            return content

        message_id = object_ids[-1]  # children come before what they belong to
        if len(object_ids) > MOST_OBJECTS + self._most() // (1 << 20):
            raise _refused(message_id, f"refused: it has {len(object_ids)} pieces")
        contents = self._pull(object_ids, fetch, **options)
        self._check(unfolded(contents), message_id)
        try:
            self._inflated[message_id] = self._inflate(message_id, contents)
        except Exception as error:  # whatever a site made of it, the others' answers must not be lost with it
            raise _refused(message_id, f"refused: it is no message ({type(error).__name__})") from error
        return {}

    def inflate(self, object_id: str, contents: dict[str, bytes], **_: Any) -> Any:
        return self._inflated.pop(object_id)

    def _check(self, size: int, object_id: str) -> None:
        most = self._most() + SPARE
        if size > most:
            raise _refused(object_id, f"{TOO_LARGE} {most} bytes")


def unfolded(contents: Mapping[str, bytes]) -> int:
    """Bytes of all arrays once their pieces are put together; pieces may be named more than once."""
    from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content as head_of

    total = 0
    for content in contents.values():
        kind, children, length = head_of(content)
        if kind == "Array":
            try:
                pieces = json.loads(content[len(content) - length :])["arraychunk_ids"]
                total += sum(len(contents[children[piece]]) for piece in pieces)
            except (ValueError, LookupError, TypeError, RecursionError):
                continue  # it cannot be put together either, which is found out there
    return total


def reason_in(text: str) -> str | None:
    """What this file said, if these are the words that Flower made of it."""
    _, mark, reason = text.partition(MARK)
    return reason if mark else None


def _refused(object_id: str, reason: str) -> Exception:
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

    error: Exception = ObjectPullError(object_id, f"{MARK}{reason}")
    return error
