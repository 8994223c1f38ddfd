"""Connection to the site process: a socket in the site's folder.

Only the owner of the folder can connect to it.

The first message starts the process. It ends with its SuperNode, or after a long time without messages.
"""

import fcntl
import hashlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.errors import FedloomError, InputError
from fedloom.flower.message import SiteMessage, read_message, write_message

SOCKET = "site.socket"
LOG_FILE = "site.log"
START_SECONDS = 120.0
"""How long a site process may take until it listens."""
LIVES = 2
"""How often the process may end during one request."""
NODE_PID = "FEDLOOM_SUPERNODE_PID"
"""Environment variable with the ID of the process that the site process ends with."""
LONGEST = 100
"""Bytes of a socket path that every system accepts. A socket with a longer path goes to the temporary directory."""


def request_over_site_socket(folder: Path, setup: Mapping[str, Any], request: SiteMessage) -> SiteMessage:
    """Return the reply of the site process of `folder`, and start the process if none runs.

    If it ends during the request, start it again, once. Before the reply, no work of a client counts.
    """
    for _ in range(LIVES):
        try:
            with _connected(folder) as connection:
                write_message(connection, SiteMessage("setup", dict(setup)))
                write_message(connection, request)
                answer = read_message(connection)
        except ConnectionError:
            answer = None
        if answer is not None:
            return answer
    raise FedloomError(f"the site process ended {LIVES} times during a request; see {folder / LOG_FILE}")


def site_socket_path(folder: Path) -> Path:
    """Return the path of the socket of the site in `folder`."""
    path = folder / SOCKET
    if len(os.fsencode(path)) <= LONGEST:
        return path
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"fedloom-{os.getuid()}-{name}"
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InputError(f"{place} is not private to this user; choose a shorter path for the site's folder {folder}.")
    return place / SOCKET


def _connected(folder: Path) -> socket.socket:
    path = site_socket_path(folder)
    if (there := _try(path)) is not None:
        return there
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    with (folder / ".start").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two messages at a time must not start two processes
        if (there := _try(path)) is not None:
            return there
        process = _start(folder)
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if (there := _try(path)) is not None:
                return there
            if process.poll() is not None:
                break
            time.sleep(0.02)
    raise FedloomError(f"the site process did not start; see {folder / LOG_FILE}")


def _try(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


_started: list["subprocess.Popen[bytes]"] = []
"""Keeps references, because Python warns of a running process without one. These are meant to keep running."""


def _start(folder: Path) -> "subprocess.Popen[bytes]":
    """Start the process; it keeps running when this one ends."""
    parent_pid = os.environ.get(NODE_PID, str(os.getppid()))
    with (folder / LOG_FILE).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedloom.flower.site.process", str(folder), parent_pid],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            close_fds=True,
        )
    _started.append(process)
    return process
