"""Flower's SuperNode with shorter waits: the one place that reaches into Flower.

As Flower ships, a SuperNode looks for messages every 3 s, starts a new interpreter for each, which imports Flower for
over a second, and looks for its answer every half second. None of this can be set. Here the same commands run with
waits that begin short and grow while nothing happens, and the process of a message is forked from one that has
imported Flower already.

    python -m fedloom.flower.hasty supernode ARGUMENTS...      instead of  flower-supernode ARGUMENTS...

It is done only for the versions of Flower it was written for; with any other, Flower's own commands run as they are.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from fedloom.flower.entrance import patient
from fedloom.processes import die_with_parent

TESTED = ("1.41.",)
"""Versions of Flower that have what is changed here."""
SHORTEST, LONGEST, GROWTH = 0.05, 3.0, 1.25
"""Seconds of the first wait, of the longest, and how much longer each is than the one before."""
WITH_PARENT = "FEDLOOM_ENDS_WITH_PARENT"
"""Set in the environment of a process that must not outlive the one that started it."""
REST = 1.0
"""A wait this long after the last one began a new stretch of waiting: something was done in between."""


class Waits:
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


class Starts:
    """Stands in for the module `subprocess`: Flower's SuperExec is started by this file."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def Popen(self, command: Sequence[str], *arguments: Any, **options: Any) -> Any:
        if command and command[0] == "flower-superexec":
            command = [sys.executable, "-m", "fedloom.flower.hasty", "superexec", *command[1:]]
        return self._module.Popen(command, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def is_tested() -> bool:
    """Whether this is a version of Flower that may be changed."""
    from flwr.supercore.version import package_version

    return str(package_version).startswith(TESTED)


def supernode() -> None:
    """Flower's SuperNode, in a hurry."""
    from flwr.supernode.cli.flower_supernode import flower_supernode

    if is_tested():
        module: Any = import_module("flwr.supernode.start_client_internal")
        waits = Waits([3, 0.5])
        module.time = waits
        module.subprocess = Starts(module.subprocess)
        module._push_messages = _followed_by(module._push_messages, waits.begin)
        fleet: Any = import_module("flwr.supernode.fleet_http_client")
        fleet.FleetHttpClient.ActivateNode = patient(fleet.FleetHttpClient.ActivateNode)
    flower_supernode()


def superexec() -> None:
    """Flower's SuperExec, in a hurry: it forks itself for each message, and ends with its SuperNode or SuperLink."""
    die_with_parent()
    from flwr.supercore.cli import flower_superexec

    if is_tested():
        from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor

        for name in ("flwr.supernode.cli.flwr_clientapp", "fedloom.flower.door", "fedloom.flower.records"):
            import_module(name)  # so that its children have them
        module: Any = import_module("flwr.supercore.superexec.run_superexec")
        waits = Waits([module._get_task_poll_interval()])
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


FLEET = "/v1/fleet/"
"""The paths of the Fleet API, by which SuperNodes call. Of a SuperLink's APIs it is the one that checks who calls."""


def superlink() -> None:
    """Flower's SuperLink, which listens at two addresses; what it starts ends with it.

    Flower serves all its APIs at one address, and two of them authenticate nobody: the Control API, which starts runs
    (code at every site), and the Runtime API, which acts as a run's ServerApp. Here Flower's own address (`--host` and
    `--port`) has all of them, and the address in front of Flower's arguments has the Fleet API alone.
    """
    host, port = sys.argv.pop(1), int(sys.argv.pop(1))
    module: Any = import_module("flwr.superlink.cli.flower_superlink")
    if is_tested():
        module.subprocess = Starts(module.subprocess)
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


def main() -> None:
    if os.environ.pop(WITH_PARENT, ""):
        die_with_parent()
    what = sys.argv.pop(1)
    {"supernode": supernode, "superexec": superexec, "superlink": superlink}[what]()


if __name__ == "__main__":
    main()
