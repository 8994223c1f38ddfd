"""Tests of the site process: one for all messages, ends with its SuperNode."""

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from fedloom.flower.app import make_app_run_config
from fedloom.flower.flwr_patches import LONGEST, SHORTEST, _PatchedSubprocess, _PatchedTime
from fedloom.flower.message import SiteMessage
from fedloom.flower.site import socket
from fedloom.flower.site.handlers import SiteHandler
from fedloom.flower.site.socket import NODE_PID, request_over_site_socket, site_socket_path
from fedloom.flower.tensors import encode_tensor
from tests.support.fake_transport import flat, make_run


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that stands for a SuperNode."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    monkeypatch.setenv(NODE_PID, str(process.pid))
    yield process
    process.kill()
    process.wait()
    for site in socket._started:
        site.wait(60)  # a site's process ends with its node
    socket._started.clear()


def question(kind: str, client: int = 0, **more: Any) -> SiteMessage:
    address = {"run": "ab" * 16, "round": 0, "client_id": client, "nonce": token_hex(16)}
    return SiteMessage(kind, {**address, **more})


def setup_of(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "run_config": flat(make_app_run_config(make_run(**more), [])),
        "node_config": {"client": 0},
        "app_folder": str(folder),
    }


def sites_in(folder: Path) -> list[int]:
    """The processes of the site in `folder`."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "fedloom.flower.site.process" in words and str(folder) in words:
            found.append(int(place.name))
    return found


def wait_until(holds: Any, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_one_process_answers_all_messages_and_ends_with_its_node(
    tmp_path: Path, node: "subprocess.Popen[bytes]"
) -> None:
    folder, setup = tmp_path / "site", setup_of(tmp_path)
    answers: list[SiteMessage] = []
    asking = [
        threading.Thread(target=lambda: answers.append(request_over_site_socket(folder, setup, question("hello"))))
        for _ in range(3)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert [answer.kind for answer in answers] == ["hello"] * 3
    assert len(sites_in(folder)) == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    assert stat.S_IMODE(site_socket_path(folder).stat().st_mode) == 0o600

    here = SiteHandler(setup["run_config"], setup["node_config"], tmp_path, tmp_path / "other")
    here.build()
    asked = question("train")
    asked = SiteMessage("train", asked.header, {"model": encode_tensor(here.initial)})
    there, same = request_over_site_socket(folder, setup, asked), here.handle(asked)
    assert there.kind == same.kind == "trained"
    assert there.header == same.header
    assert bytes(there.arrays["model"].data) == bytes(same.arrays["model"].data)

    wrong = request_over_site_socket(folder, {**setup, "run_config": {"rounds": -1}}, question("hello"))
    assert wrong.kind == "failed"
    assert "rounds must be" in wrong.header["reason"]
    assert request_over_site_socket(folder, setup, question("hello")).kind == "hello"  # and it goes on

    node.kill()
    node.wait()
    assert wait_until(lambda: not sites_in(folder))
    assert not site_socket_path(folder).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_process_is_started_again_by_the_next_message(tmp_path: Path, node: "subprocess.Popen[bytes]") -> None:
    folder = tmp_path / ("long-" * 25)  # too long for the path of a socket
    setup = setup_of(tmp_path)
    assert not site_socket_path(folder).is_relative_to(folder)
    first = request_over_site_socket(folder, setup, question("hello"))
    (pid,) = sites_in(folder)
    os.kill(pid, 9)
    assert wait_until(lambda: not sites_in(folder))
    second = request_over_site_socket(folder, setup, question("hello"))
    assert first.header["site"] == second.header["site"]
    assert sites_in(folder) != [pid]


def test_a_process_that_cannot_start_is_said(
    tmp_path: Path, node: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("raise RuntimeError('broken')")
    with pytest.raises(Exception, match=r"the site process did not start; see .*site.log"):
        request_over_site_socket(tmp_path / "site", setup_of(tmp_path), question("hello"))
    assert "broken" in (tmp_path / "site" / "site.log").read_text()


def test_a_question_that_kills_the_process_is_given_up(tmp_path: Path, node: "subprocess.Popen[bytes]") -> None:
    (tmp_path / "site_data.py").write_text("import os\nos._exit(3)")
    with pytest.raises(Exception, match=r"the site process ended 2 times during a request; see .*site.log"):
        request_over_site_socket(tmp_path / "site", setup_of(tmp_path), question("hello"))


def test_the_process_of_a_message_imports_no_torch() -> None:
    code = (
        "import sys; import fedloom.flower.site.client_app; import fedloom.flower.site.socket; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_waits_begin_short_and_grow_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 100.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    monkeypatch.setattr("fedloom.flower.flwr_patches.time.sleep", sleep)
    monkeypatch.setattr("fedloom.flower.flwr_patches.time.monotonic", lambda: now)
    waits = _PatchedTime([3, 0.5])
    for _ in range(40):
        waits.sleep(3)
    assert slept[0] == SHORTEST
    assert slept == sorted(slept)
    assert slept[-1] == LONGEST == 3
    waits.reset()
    waits.sleep(3)
    assert slept[-1] == SHORTEST
    for _ in range(40):
        waits.sleep(0.5)
    assert slept[-1] == 0.5  # never longer than Flower itself would wait
    waits.sleep(7)
    assert slept[-1] == 7  # other waits are left alone
    now += 10  # something was done in between
    waits.sleep(3)
    assert slept[-1] == SHORTEST
    assert waits.time() > 0


def test_only_flowers_superexec_is_started_in_another_way() -> None:
    started: list[Any] = []

    class Module:
        DEVNULL = 3

        @staticmethod
        def Popen(command: Any, **options: Any) -> None:
            started.append((command, options))

    starts = _PatchedSubprocess(Module)  # type: ignore[arg-type]
    starts.Popen(["flower-superexec", "--insecure"], stdin=1)
    starts.Popen(["other"])
    assert starts.DEVNULL == 3
    assert started[0][0][1:] == ["-m", "fedloom.flower.flwr_patches", "superexec", "--insecure"]
    assert started[0][1] == {"stdin": 1}
    assert started[1] == (["other"], {})
