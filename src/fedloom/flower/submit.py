"""Register node keys at a SuperLink and run an app there: several of Flower's commands in one process.

    python -m fedloom.flower.submit APP CONNECTION MARK KEY.pub...

The file MARK is made as soon as all keys are registered: a SuperNode that comes before its key is sent away. Each of
these commands takes more than a second to start, and five sites would take ten.
"""

import sys
from pathlib import Path


def _submit_app(app: str, connection: str, mark: Path, keys: list[str]) -> None:
    """Register the keys, then run the app and show its log until it has ended."""
    from flwr.cli.app import app as flwr

    for key in keys:
        flwr(["supernode", "register", key, connection], standalone_mode=False)
    mark.touch()
    flwr(["run", app, connection, "--stream"], standalone_mode=False)


if __name__ == "__main__":
    _submit_app(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
