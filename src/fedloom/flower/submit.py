"""Register node keys at a SuperLink and run an app there, in one process.

    python -m fedloom.flower.submit APP CONNECTION MARK KEY.pub...

The file MARK appears when all keys are registered, because a SuperLink rejects SuperNodes with unknown keys. Each of
Flower's commands takes more than a second to start: separate processes would take ten seconds for five sites.
"""

import sys
from pathlib import Path


def _submit_app(app: str, connection: str, registered_file: Path, keys: list[str]) -> None:
    """Register the keys, then run the app and show its log until it ends."""
    from flwr.cli.app import app as flwr

    for key in keys:
        flwr(["supernode", "register", key, connection], standalone_mode=False)
    registered_file.touch()
    flwr(["run", app, connection, "--stream"], standalone_mode=False)


if __name__ == "__main__":
    _submit_app(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
