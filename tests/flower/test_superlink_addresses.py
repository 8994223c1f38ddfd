"""Tests of the SuperNodes' port: it cannot start a run or act as the ServerApp."""

import asyncio
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
import psutil
from flwr.proto.control_pb2 import ListRunsRequest
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest

from fedloom.flower.commands import flower_command_environment
from fedloom.flower.flwr_patches import WITH_PARENT, _fleet_only_except_at
from fedloom.utils.system import find_free_ports

pytestmark = pytest.mark.flower

ANOTHER = "127.0.0.2"
"""An address of this machine that is not the one at which the Control API listens."""
QUESTIONS: dict[str, Any] = {
    "/v1/control/list-runs": ListRunsRequest(),
    "/v1/runtime/acquire-task": AcquireTaskRequest(),
    "/v1/fleet/pull-messages": PullMessagesRequest(),
}
CALLER = {"flwr-package-name": "flwr", "flwr-package-version": "1.41.0", "flwr-component-name": "SuperExec"}


@pytest.fixture(scope="module")
def superlink(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int, int]]:
    """The two ports of a SuperLink that listens on all addresses, and its process."""
    (port, control), home = find_free_ports(2), tmp_path_factory.mktemp("superlink")
    words = ["flower", "superlink", "--certificates", str(certificates), "--host", "0.0.0.0"]
    words += ["--port", str(port), "--control-port", str(control)]
    environ = {**flower_command_environment(home), WITH_PARENT: "1", "FLWR_INTERNAL_GRPC_CONTROL_API": "1"}
    with (home / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "fedloom", *words], env=environ, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 120
        while status(certificates, "127.0.0.1", port, "/v1/fleet/pull-messages") is None:
            assert process.poll() is None, (home / "log").read_text()
            assert time.monotonic() < end
            time.sleep(0.1)
        yield port, control, process.pid
    finally:
        process.kill()
        process.wait()


def status(certificates: Path, host: str, port: int, path: str, content: bytes | None = None) -> int | None:
    """How the SuperLink answers a question that nobody signed; None where nobody listens."""
    trusting = ssl.create_default_context(cafile=certificates / "ca.crt")
    trusting.check_hostname = False  # the certificate does not name the other address
    if content is None:
        content = QUESTIONS[path].SerializeToString() if path in QUESTIONS else b""
    headers = {"content-type": "application/protobuf", **CALLER}
    with suppress(httpx.ConnectError):
        return httpx.post(f"https://{host}:{port}{path}", content=content, headers=headers, verify=trusting).status_code
    return None


@pytest.mark.parametrize("host", ["127.0.0.1", ANOTHER])
def test_the_open_port_has_the_fleet_api_alone(certificates: Path, superlink: tuple[int, int, int], host: str) -> None:
    port, *_ = superlink
    assert status(certificates, host, port, "/v1/fleet/pull-messages") == 401
    for path in ("/v1/control/list-runs", "/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/health"):
        assert status(certificates, host, port, path) == 404, path
    for path in ("/v1/fleet/../control/list-runs", "//v1/control/list-runs", "/v1/fleet/%2e%2e/control/list-runs"):
        assert status(certificates, host, port, path, b"") in (404, 405), path


def test_the_control_api_is_on_this_machine_alone(certificates: Path, superlink: tuple[int, int, int]) -> None:
    port, control, pid = superlink
    assert status(certificates, "127.0.0.1", control, "/v1/control/list-runs") == 200
    assert status(certificates, "127.0.0.1", control, "/v1/runtime/acquire-task") == 200
    assert status(certificates, ANOTHER, control, "/v1/control/list-runs") is None
    listening = [each.laddr for each in psutil.Process(pid).net_connections() if each.status == psutil.CONN_LISTEN]
    assert sorted(listening) == [("0.0.0.0", port), ("127.0.0.1", control)]


@pytest.mark.parametrize(
    ("scope", "reaches"),
    [
        ({"type": "http", "server": ("127.0.0.1", 1), "path": "/v1/control/start-run"}, True),
        ({"type": "lifespan"}, True),
        ({"type": "http", "server": ("127.0.0.1", 2), "path": "/v1/fleet/get-run"}, True),
        ({"type": "http", "server": ("127.0.0.1", 2), "path": "/v1/control/start-run"}, False),
        ({"type": "http", "server": None, "path": "/v1/control/start-run"}, False),
        ({"type": "http", "path": "/v1/fleet"}, False),
        ({"type": "websocket", "server": ("127.0.0.1", 2), "path": "/v1/fleet/get-run"}, False),
    ],
)
def test_what_does_not_come_in_at_the_control_port_reaches_the_fleet_api(scope: dict[str, Any], reaches: bool) -> None:
    reached, sent = list[Any](), list[Any]()

    async def app(*given: Any) -> None:
        reached.append(given[0])

    async def send(message: Any) -> None:
        sent.append(message["type"])

    asyncio.run(_fleet_only_except_at(1, app)(scope, None, send))
    assert reached == ([scope] if reaches else [])
    assert bool(sent) is not reaches
