"""How a site's own process is reached: over a socket in the site's folder that only its owner can connect to.

The first message starts the process. It ends with the SuperNode it belongs to, or when nobody has asked it for long.
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
"""How long a site's process may take to listen."""
LIVES = 2
"""How often a question may cost the process its life."""
NODE_PID = "FEDLOOM_SUPERNODE_PID"
"""The environment's name for the process that a site's process ends with."""
LONGEST = 100
"""Bytes of a socket's path that every system takes; that of a longer one lies with the temporary files."""


def ask_site_process(folder: Path, setup: Mapping[str, Any], question: SiteMessage) -> SiteMessage:
    """What the process of the site in `folder` answers; it is started where there is none.

    A process that ends while it is asked is started again, once: nothing a client did counts before it has answered.
    """
    for _ in range(LIVES):
        try:
            with _connected(folder) as connection:
                write_message(connection, SiteMessage("setup", dict(setup)))
                write_message(connection, question)
                answer = read_message(connection)
        except ConnectionError:
            answer = None
        if answer is not None:
            return answer
    raise FedloomError(f"the site's process ended {LIVES} times while it was asked; {folder / LOG_FILE} may say why")


def site_socket_path(folder: Path) -> Path:
    """Where the site in `folder` listens."""
    path = folder / SOCKET
    if len(os.fsencode(path)) <= LONGEST:
        return path
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"fedloom-{os.getuid()}-{name}"
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InputError(f"{place} belongs to somebody else; choose a shorter path for the site's folder {folder}.")
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
    raise FedloomError(f"the site's process did not start; {folder / LOG_FILE} may say why")


def _try(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


_started: list["subprocess.Popen[bytes]"] = []
"""Kept, for Python warns of processes that are forgotten while they run; these are meant to."""


def _start(folder: Path) -> "subprocess.Popen[bytes]":
    """Start the process; it stays when this one ends."""
    belongs_to = os.environ.get(NODE_PID, str(os.getppid()))
    with (folder / LOG_FILE).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedloom.flower.site.process", str(folder), belongs_to],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            close_fds=True,
        )
    _started.append(process)
    return process
