"""All that fedloom changes in Flower, which has no settings for it. The one place that reaches into Flower's insides.

    python -m fedloom.flower.flwr_patches supernode ARGUMENTS...    instead of  flower-supernode ARGUMENTS...

- A SuperNode waits less. As Flower ships, it looks for messages every 3 s, starts a new interpreter for each, which
  imports Flower for over a second, and looks for its answer every half second. Here waits begin short and grow while
  nothing happens, and the process of a message is forked from one that has imported Flower already.
- A SuperNode says why it is not let in, and asks again (`patient`).
- A SuperLink serves the APIs that authenticate nobody on this machine alone (`superlink`).
- The server measures what sites send before it has it in memory (`Guard`).

Other releases of Flower than the tested one may lack what is changed here, so fedloom refuses to run with them.
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
"""The release of Flower that has what is changed here; pyproject.toml asks for the same."""

WITH_PARENT = "FEDLOOM_ENDS_WITH_PARENT"
"""Set in the environment of a process that must not outlive the one that started it."""

SHORTEST, LONGEST, GROWTH = 0.05, 3.0, 1.25
"""Seconds of the first wait, of the longest, and how much longer each is than the one before."""
REST = 1.0
"""A wait this long after the last one began a new stretch of waiting: something was done in between."""

LOG = logging.getLogger("flwr.fedloom")
NOT_LET_IN = 2004
"""Flower's code for a node that may not connect."""
MINUTE_SECONDS = 100.0
"""How long to go on asking: a node counts as connected for a minute after it was heard last."""
AGAIN_SECONDS = 3.0

FLEET = "/v1/fleet/"
"""The paths of the Fleet API, by which SuperNodes call. Of a SuperLink's APIs it is the one that checks who calls."""

TOO_LARGE = "refused: it has more than"
MARK = "fedloom: "
"""Before what the guard says, among Flower's own words."""
SPARE = 8 * MOST_HEADER
"""Bytes of an answer beside its arrays: the header, and Flower's own records."""
MOST_OBJECTS = 4 * MOST_BLOCKS


def require_flower() -> None:
    """Refuse to go on without the release of Flower that fedloom was tested with."""
    for name in ("flwr", "flwr-nightly"):
        with suppress(metadata.PackageNotFoundError):
            found = metadata.version(name)
            break
    else:
        raise InputError("this needs Flower; install fedloom[flower].")
    if not f"{found}.".startswith(f"{TESTED}."):
        raise InputError(
            f"Flower {found} is installed, but fedloom changes Flower's insides and is tested with {TESTED} alone; "
            "install fedloom[flower]."
        )


class PatchedTime:
    """Stands in for the module `time`: repeated sleeps begin short and grow, whatever length is asked for."""

    def __init__(self, replaced: Sequence[float]) -> None:
        self._replaced = set(replaced)
        self._next = SHORTEST
        self._last = 0.0

    def sleep(self, seconds: float) -> None:
        if seconds not in self._replaced:
            time.sleep(seconds)
            return
        now = time.monotonic()
        if now - self._last > self._next + REST:
            self._next = SHORTEST
        time.sleep(min(self._next, seconds))
        self._last = time.monotonic()
        self._next = min(LONGEST, self._next * GROWTH)

    def begin(self) -> None:
        """Something has happened: the next wait is short again."""
        self._next = SHORTEST

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class PatchedSubprocess:
    """Stands in for the module `subprocess`: Flower's SuperExec is started by this file."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def Popen(self, command: Sequence[str], *arguments: Any, **options: Any) -> Any:
        if command and command[0] == "flower-superexec":
            command = [sys.executable, "-m", "fedloom.flower.flwr_patches", "superexec", *command[1:]]
        return self._module.Popen(command, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _run_patched_supernode() -> None:
    """Flower's SuperNode, in a hurry."""
    from flwr.supernode.cli.flower_supernode import flower_supernode

    module: Any = import_module("flwr.supernode.start_client_internal")
    waits = PatchedTime([3, 0.5])
    module.time = waits
    module.subprocess = PatchedSubprocess(module.subprocess)
    module._push_messages = _followed_by(module._push_messages, waits.begin)
    fleet: Any = import_module("flwr.supernode.fleet_http_client")
    fleet.FleetHttpClient.ActivateNode = patch_node_activation(fleet.FleetHttpClient.ActivateNode)
    flower_supernode()


def _run_patched_superexec() -> None:
    """Flower's SuperExec, in a hurry: it forks itself for each message, and ends with its SuperNode or SuperLink."""
    die_with_parent()
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor

    for name in ("flwr.supernode.cli.flwr_clientapp", "fedloom.flower.site.client_app", "fedloom.flower.records"):
        import_module(name)  # so that its children have them
    module: Any = import_module("flwr.supercore.superexec.run_superexec")
    waits = PatchedTime([module._get_task_poll_interval()])
    module.time = waits
    launch = SubprocessExecutor.launch
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children

    def fork(executor: SubprocessExecutor, spec: Any) -> Any:
        waits.begin()
        return _fork_for(spec) or launch(executor, spec)

    SubprocessExecutor.launch = fork
    flower_superexec()


def _fork_for(spec: Any) -> Any:
    """Run Flower's process for one message, or for the server, as a fork of this one; None for other kinds."""
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
    """What Flower's command at `place` does, in this process."""
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


def patch_node_activation(
    activate: Callable[..., Any], sleep: Callable[[float], None] = time.sleep
) -> Callable[..., Any]:
    """The call by which a SuperNode connects, which asks again for a while and says why it must.

    A SuperLink takes a node that crashed for connected until its heartbeat has been missing for a minute, and lets
    nobody in with its key meanwhile. Flower's SuperNode ends then, with the words it also has for an unknown key; and
    it says nothing at all while it tries to reach a server whose certificate it does not trust.
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
                raise  # Flower asks again by itself
            except httpx.HTTPStatusError as error:
                refusal = FlowerError.from_json(error.response.text)
                if refusal is None or refusal.code != NOT_LET_IN or waited >= MINUTE_SECONDS:
                    raise
            tell(
                "the SuperLink does not let this node in: its key is not registered there, or another node is"
                f" connected with it (this one, before a crash?); asking again for {MINUTE_SECONDS:g} s"
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
    """Flower's SuperLink, which listens at two addresses; what it starts ends with it.

    Flower serves all its APIs at one address, and two of them authenticate nobody: the Control API, which starts runs
    (code at every site), and the Runtime API, which acts as a run's ServerApp. Here Flower's own address (`--host` and
    `--port`) has all of them, and the address in front of Flower's arguments has the Fleet API alone.
    """
    host, port = sys.argv.pop(1), int(sys.argv.pop(1))
    module: Any = import_module("flwr.superlink.cli.flower_superlink")
    module.subprocess = PatchedSubprocess(module.subprocess)
    module.uvicorn = TwoAddresses(host, port)
    module.flower_superlink()


class TwoAddresses:
    """Stands in for the module `uvicorn`: the app is served at one more address, but there its Fleet API alone."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    def run(self, app: Any, host: str, port: int, **options: Any) -> None:
        from uvicorn import Config, Server

        guarded = fleet_only_except_at(port, app)
        places = (host, port), (self._host, self._port)
        configs = [Config(guarded, host=where, port=number, **options) for where, number in places]
        server = Server(configs[0])
        sockets = [config.bind_socket() for config in configs]
        with suppress(KeyboardInterrupt):  # raised again after the orderly end
            server.run(sockets)
        if not server.started:
            sys.exit(1)


def fleet_only_except_at(port: int, app: Callable[..., Any]) -> Callable[..., Any]:
    """The app (ASGI), of which only the Fleet API is there for what comes in at another port than this one."""

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
    """Stands between Flower's Grid and what it fetches.

    Flower stores a message as a tree of small objects and puts it together in the server's process. A site may send as
    many as it likes; and since equal pieces of an array are stored once, a few of them may unfold to any size. The
    guard stops fetching as soon as an answer has more bytes than any it could expect, looks at how large its arrays
    would become before they do, and takes what cannot be put together for no answer at all.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._inflated: dict[str, Any] = {}

    def install(self, grid: Any) -> None:
        """Let the Grid fetch through this guard. Other kinds, such as that of the simulation, are left alone."""
        module: Any = import_module("flwr.superlink.grid.http_grid")
        if not isinstance(grid, module.HttpGrid):
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
        self._check(_unfolded_size(contents), message_id)
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


def _unfolded_size(contents: Mapping[str, bytes]) -> int:
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


def patched_error_reason(text: str) -> str | None:
    """What the guard said, if these are the words that Flower made of it."""
    _, mark, reason = text.partition(MARK)
    return reason if mark else None


def _refused(object_id: str, reason: str) -> Exception:
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

    error: Exception = ObjectPullError(object_id, f"{MARK}{reason}")
    return error


def _main() -> None:
    try:
        require_flower()
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
