"""All patches of Flower, for what its settings do not offer.

No other file changes Flower's internals.

    python -m fedloom.flower.flwr_patches supernode ARGUMENTS...    instead of  flower-supernode ARGUMENTS...

- The SuperNode polls faster. Flower's own SuperNode polls for messages every 3 s, starts a new interpreter for each,
  which imports Flower for over a second, and polls for its reply every half second. Here polling intervals start short
  and grow while nothing happens, and a message gets a fork of a process that has imported Flower already.
- The SuperNode says why it is rejected, and retries (`_patch_node_activation`).
- The SuperLink serves the APIs that authenticate nobody on loopback only (`_fleet_only_except_at`).
- The server checks the size of what sites send before it is in memory (`GridSizeLimitPatch`).

Other releases of Flower may lack what is patched here, so fedloom refuses to run with them.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from fedloom.errors import InputError
from fedloom.flower.message import MOST_BLOCKS, MOST_HEADER
from fedloom.utils.system import die_with_parent

TESTED = "1.41"
"""The release of Flower that the patches fit; pyproject.toml requires the same."""

WITH_PARENT = "FEDLOOM_ENDS_WITH_PARENT"
"""Environment variable of a process that must end with the process that started it."""

SHORTEST, LONGEST, GROWTH = 0.05, 3.0, 1.25
"""Shortest and longest polling interval in seconds, and the factor by which it grows."""
REST = 1.0
"""If so many seconds more than the interval pass between two sleeps, the second one is short again."""

LOG = logging.getLogger("flwr.fedloom")
NOT_LET_IN = 2004
"""Flower's error code for a node that may not connect."""
MINUTE_SECONDS = 100.0
"""Seconds to keep retrying: a node counts as connected for a minute after its last heartbeat."""
AGAIN_SECONDS = 3.0

FLEET = "/v1/fleet/"
"""Path of the Fleet API, which SuperNodes call. It is the only API of a SuperLink that authenticates its callers."""

TOO_LARGE = "rejected: it has more than"
MARK = "fedloom: "
"""Prefix of fedloom's reasons in Flower's error texts."""
SPARE = 8 * MOST_HEADER
"""Bytes of a reply besides its arrays: the header, and Flower's own records."""
MOST_OBJECTS = 4 * MOST_BLOCKS


def require_supported_flwr() -> None:
    """Raise an InputError unless the tested release of Flower is installed."""
    for name in ("flwr", "flwr-nightly"):
        with suppress(metadata.PackageNotFoundError):
            found = metadata.version(name)
            break
    else:
        raise InputError("this needs Flower; install fedloom[flower].")
    if not f"{found}.".startswith(f"{TESTED}."):
        raise InputError(
            f"Flower {found} is installed, but fedloom patches internals of Flower and works with {TESTED} only; "
            "install fedloom[flower]."
        )


class _PatchedTime:
    """Replacement for the module `time`: sleeps of `replaced_seconds` start short and grow instead."""

    def __init__(self, replaced_seconds: Sequence[float]) -> None:
        self._replaced_seconds = set(replaced_seconds)
        self._next = SHORTEST
        self._last = 0.0

    def sleep(self, seconds: float) -> None:
        if seconds not in self._replaced_seconds:
            time.sleep(seconds)
            return
        now = time.monotonic()
        if now - self._last > self._next + REST:
            self._next = SHORTEST
        time.sleep(min(self._next, seconds))
        self._last = time.monotonic()
        self._next = min(LONGEST, self._next * GROWTH)

    def reset(self) -> None:
        """Make the next sleep short again, because something happened."""
        self._next = SHORTEST

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class _PatchedSubprocess:
    """Replacement for the module `subprocess` that starts the patched SuperExec instead of Flower's."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def Popen(self, command: Sequence[str], *arguments: Any, **options: Any) -> Any:
        if command and command[0] == "flower-superexec":
            command = [sys.executable, "-m", "fedloom.flower.flwr_patches", "superexec", *command[1:]]
        return self._module.Popen(command, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _run_patched_supernode() -> None:
    """Run Flower's SuperNode with faster polling and retries."""
    from flwr.supernode.cli.flower_supernode import flower_supernode

    module: Any = import_module("flwr.supernode.start_client_internal")
    waits = _PatchedTime([3, 0.5])
    module.time = waits
    module.subprocess = _PatchedSubprocess(module.subprocess)
    module._push_messages = _followed_by(module._push_messages, waits.reset)
    fleet: Any = import_module("flwr.supernode.fleet_http_client")
    fleet.FleetHttpClient.ActivateNode = _patch_node_activation(fleet.FleetHttpClient.ActivateNode)
    flower_supernode()


def _run_patched_superexec() -> None:
    """Run Flower's SuperExec. It polls faster, forks for each message, and ends with its SuperNode or SuperLink."""
    die_with_parent()
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor

    for name in ("flwr.supernode.cli.flwr_clientapp", "fedloom.flower.site.client_app", "fedloom.flower.records"):
        import_module(name)  # before the forks, which then need not import them
    module: Any = import_module("flwr.supercore.superexec.run_superexec")
    waits = _PatchedTime([module._get_task_poll_interval()])
    module.time = waits
    launch = SubprocessExecutor.launch
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks

    def fork(executor: SubprocessExecutor, spec: Any) -> Any:
        waits.reset()
        return _fork_for(spec) or launch(executor, spec)

    SubprocessExecutor.launch = fork
    flower_superexec()


def _fork_for(spec: Any) -> Any:
    """Run Flower's process for one message, or for the ServerApp, as a fork; return None for other tasks."""
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor.types import LaunchResult

    place = {
        TaskType.CLIENT_APP: "flwr.supernode.cli.flwr_clientapp:flwr_clientapp",
        TaskType.SERVER_APP: "flwr.superlink.cli.flwr_serverapp:flwr_serverapp",
    }.get(spec.task_type)
    if place is None:
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        return LaunchResult.accepted()
    code = 1
    try:
        code = _be(place, spec)
    finally:
        os._exit(code)


def _be(place: str, spec: Any) -> int:
    """Run Flower's command at `place` in this process, and return its exit code."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    file, _, name = place.partition(":")
    words = [name.replace("_", "-"), "--runtime-api-address", spec.runtime_api_address, "--token", spec.token]
    words += ["--insecure"] if spec.insecure else []
    words += ["--root-certificates", spec.root_certificates_path] if spec.root_certificates_path else []
    sys.argv = [*words, "--parent-pid", str(spec.parent_pid)]
    try:
        getattr(import_module(file), name)()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 0


def _followed_by(work: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
    def both(*arguments: Any, **options: Any) -> Any:
        then()
        try:
            return work(*arguments, **options)
        finally:
            then()

    return both


def _patch_node_activation(
    activate: Callable[..., Any], sleep: Callable[[float], None] = time.sleep
) -> Callable[..., Any]:
    """Return the call that connects a SuperNode, with retries and with the reason in the log.

    A SuperLink counts a crashed node as connected until its heartbeat has been missing for a minute, and rejects its
    key meanwhile. Flower's SuperNode then ends with the same text as for an unknown key. It also says nothing while it
    tries to reach a server whose certificate it does not trust.
    """
    said: set[str] = set()

    def tell(text: str) -> None:
        if text not in said:
            said.add(text)
            LOG.warning("%s", text)

    def activate_patiently(client: Any, request: Any) -> Any:
        import httpx
        from flwr.supercore.error import FlowerError

        waited = 0.0
        while True:
            try:
                return activate(client, request)
            except httpx.TransportError as error:
                tell(f"cannot reach the SuperLink yet: {_reason(error)}")
                raise  # Flower retries by itself
            except httpx.HTTPStatusError as error:
                refusal = FlowerError.from_json(error.response.text)
                if refusal is None or refusal.code != NOT_LET_IN or waited >= MINUTE_SECONDS:
                    raise
            tell(
                "the SuperLink rejects this node: its key is not registered there, or another node is"
                f" connected with it (this one, before a crash?); retrying for {MINUTE_SECONDS:g} s"
            )
            sleep(AGAIN_SECONDS)
            waited += AGAIN_SECONDS

    return activate_patiently


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"its certificate is not one of the authority that this site trusts ({text[:200]})"
    return text[:300]


def _run_patched_superlink() -> None:
    """Run Flower's SuperLink at two addresses; the processes that it starts end with it.

    Flower serves all its APIs at one address, and two of them authenticate nobody: the Control API, which starts runs
    (code at every site), and the Runtime API, which acts as a run's ServerApp. Here Flower's own address (`--host` and
    `--port`) serves all of them. The address in front of Flower's arguments serves only the Fleet API.
    """
    host, port = sys.argv.pop(1), int(sys.argv.pop(1))
    module: Any = import_module("flwr.superlink.cli.flower_superlink")
    module.subprocess = _PatchedSubprocess(module.subprocess)
    module.uvicorn = _TwoAddresses(host, port)
    module.flower_superlink()


class _TwoAddresses:
    """Replacement for the module `uvicorn` that also serves the app's Fleet API at a second address."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    def run(self, app: Any, host: str, port: int, **options: Any) -> None:
        from uvicorn import Config, Server

        guarded = _fleet_only_except_at(port, app)
        places = (host, port), (self._host, self._port)
        configs = [Config(guarded, host=where, port=number, **options) for where, number in places]
        server = Server(configs[0])
        sockets = [config.bind_socket() for config in configs]
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown
            server.run(sockets)
        if not server.started:
            sys.exit(1)


def _fleet_only_except_at(port: int, app: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ASGI app, but only with its Fleet API for requests at another port than `port`."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        own = scope["type"] == "lifespan" or (scope.get("server") or (None, None))[1] == port
        if own or (scope["type"] == "http" and scope["path"].startswith(FLEET)):
            await app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b"only the Fleet API is served at this address\n"})
        else:
            await send({"type": "websocket.close"})

    return serve


class GridSizeLimitPatch:
    """Limits the size of the replies that Flower's Grid fetches.

    Flower stores a message as a tree of small objects and joins them in the server's process. A site may send any
    number of them. Equal pieces of an array are stored once, so a few pieces may unfold to any size. This patch stops
    fetching when a reply has more bytes than any expected one, computes the size of its arrays before they are joined,
    and reports a reply that cannot be joined as an error.
    """

    def __init__(self, max_bytes: Callable[[], int]) -> None:
        self._max_bytes = max_bytes
        self._inflated: dict[str, Any] = {}

    def install(self, grid: Any) -> None:
        """Let the Grid fetch through this patch. Other Grids, such as that of the simulation, stay as they are."""
        module: Any = import_module("flwr.superlink.grid.http_grid")
        if not isinstance(grid, module.HttpGrid):
            return
        self._pull, self._inflate = module.pull_objects, module.inflate_object_from_contents
        module.pull_objects, module.inflate_object_from_contents = self.pull, self.inflate
        client = grid._runtime_client._client
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks["response"], self.check_response]}

    def check_response(self, response: Any) -> None:
        """Refuse an object that is too large before it is read, if its length is known."""
        length = response.headers.get("content-length", "")
        if response.request.url.path.endswith("/pull-object") and length.isdecimal():
            self._check(int(length), "")

    def pull(self, object_ids: list[str], pull_object_fn: Callable[[str], bytes], **options: Any) -> dict[str, bytes]:
        """Fetch the objects of a reply and join them, unless they are too large."""
        taken, lock = 0, threading.Lock()

        def fetch(object_id: str) -> bytes:
            nonlocal taken
            content = pull_object_fn(object_id)
            with lock:
                taken += len(content)
                self._check(taken, object_id)
            return content

        message_id = object_ids[-1]  # children come before their parents
        if len(object_ids) > MOST_OBJECTS + self._max_bytes() // (1 << 20):
            raise _refused(message_id, f"rejected: it has {len(object_ids)} pieces")
        contents = self._pull(object_ids, fetch, **options)
        self._check(_unfolded_size(contents), message_id)
        try:
            self._inflated[message_id] = self._inflate(message_id, contents)
        except Exception as error:  # one site's broken reply must not cost the replies of the others
            raise _refused(message_id, f"rejected: it is not a message ({type(error).__name__})") from error
        return {}

    def inflate(self, object_id: str, contents: dict[str, bytes], **_: Any) -> Any:
        return self._inflated.pop(object_id)

    def _check(self, size: int, object_id: str) -> None:
        max_bytes = self._max_bytes() + SPARE
        if size > max_bytes:
            raise _refused(object_id, f"{TOO_LARGE} {max_bytes} bytes")


def _unfolded_size(contents: Mapping[str, bytes]) -> int:
    """Return the bytes of all arrays after joining; an array may name a piece more than once."""
    from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content as head_of

    total = 0
    for content in contents.values():
        kind, children, length = head_of(content)
        if kind == "Array":
            try:
                pieces = json.loads(content[len(content) - length :])["arraychunk_ids"]
                total += sum(len(contents[children[piece]]) for piece in pieces)
            except (ValueError, LookupError, TypeError, RecursionError):
                continue  # it cannot be joined either; `pull` reports that
    return total


def patched_error_reason(error_text: str) -> str | None:
    """Return the patch's reason in an error text of Flower, or None if there is none."""
    _, mark, reason = error_text.partition(MARK)
    return reason if mark else None


def _refused(object_id: str, reason: str) -> Exception:
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

    error: Exception = ObjectPullError(object_id, f"{MARK}{reason}")
    return error


def _main() -> None:
    try:
        require_supported_flwr()
    except InputError as error:
        print(f"fedloom: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    if os.environ.pop(WITH_PARENT, ""):
        die_with_parent()
    what = sys.argv.pop(1)
    {"supernode": _run_patched_supernode, "superexec": _run_patched_superexec, "superlink": _run_patched_superlink}[
        what
    ]()


if __name__ == "__main__":
    _main()
