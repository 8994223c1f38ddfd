"""The process of one site: keeps torch, data and network between messages.

    python -m fedloom.flower.site.process FOLDER PID

It listens on a socket in FOLDER and ends together with the process PID, its SuperNode.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedloom.flower.message import MessageRejected, SiteMessage, make_failure_message, read_message, write_message
from fedloom.flower.site.handlers import SiteHandler
from fedloom.flower.site.socket import site_socket_path
from fedloom.utils.system import keep_freed_memory, make_private_directory

IDLE_SECONDS = 24 * 3600.0
"""A site process without messages for this long ends; the next message starts it again."""


def _run_site_process(folder: Path, parent_pid: int) -> None:
    """Answer messages one after the other."""
    make_private_directory(folder)
    path = site_socket_path(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the SuperNode, and this process ends with it
    threading.Thread(target=_end_with, args=(parent_pid, path), daemon=True).start()
    keep_freed_memory()
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        path.chmod(0o600)
        server.listen(16)
        server.settimeout(IDLE_SECONDS)
        while True:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                path.unlink(missing_ok=True)
                return
            with connection:
                connection.settimeout(None)
                _serve(connection, folder)


@lru_cache(maxsize=1)
def _find_site(setup: str, folder: Path) -> SiteHandler:
    """Return the site of this process, built again when the app or the node configuration changes."""
    header: dict[str, Any] = json.loads(setup)
    return SiteHandler(header["run_config"], header["node_config"], Path(header["app_folder"]), folder)


def _serve(connection: socket.socket, folder: Path) -> None:
    """Answer one message."""
    request: SiteMessage | None = None
    try:
        setup, request = read_message(connection), read_message(connection)
        if setup is None or request is None:
            return
        write_message(connection, _find_site(json.dumps(dict(setup.header), sort_keys=True), folder).handle(request))
    except (MessageRejected, OSError) as error:
        print(f"a message was cut off: {error}", file=sys.stderr, flush=True)
    except Exception as error:  # settings or data from which no site can be built
        traceback.print_exc()
        if request is not None:
            write_message(connection, make_failure_message(request, str(error)))


def _end_with(pid: int, path: Path) -> None:
    """End this process as soon as the process `pid` has ended."""
    try:
        handle = os.pidfd_open(pid)
    except (AttributeError, OSError):  # an older system, or it has ended already
        while _is_there(pid):
            time.sleep(0.5)
    else:
        select.select([handle], [], [])
    path.unlink(missing_ok=True)
    os._exit(0)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    _run_site_process(Path(sys.argv[1]), int(sys.argv[2]))
