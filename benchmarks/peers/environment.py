"""The virtual environment of the peers, with pinned versions."""

import re
import subprocess
import sys
import venv
from pathlib import Path

import torch

from benchmarks.peers.contestant import CONTESTANTS, Contestant

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
FOLDER = ROOT / ".venv-peers"
PACKAGES = ("torch", "pfl[pytorch]", "flwr[simulation]")


def prepare_environment() -> Path:
    """Create the environment if it is missing or older than its constraints, and return its Python."""
    pinned = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if pinned is None or torch.__version__.partition("+")[0] != pinned[1]:
        raise SystemExit(
            f"This Python has torch {torch.__version__}; the peers need the version in {CONSTRAINTS.name}."
        )
    python, ready = FOLDER / "bin" / "python", FOLDER / "ready"
    if not ready.exists() or ready.stat().st_mtime < CONSTRAINTS.stat().st_mtime:
        print(f"Installing pfl-research and Flower into {FOLDER.name} (some minutes)", flush=True)
        venv.create(FOLDER, with_pip=True, clear=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*install, "--constraint", CONSTRAINTS, *PACKAGES], check=False)
        if done.returncode:
            raise SystemExit(f"pip could not install {', '.join(PACKAGES)} into {FOLDER.name}; its message is above.")
        ready.touch()
    return python


def command_of_contestant(name: str, python: Path, cores: int) -> list[str]:
    """Return the command that runs a contestant, without the folder of the job. `python` is that of the peers."""
    contestant: Contestant = CONTESTANTS[name]
    words = [str(python) if contestant.peer else sys.executable]
    if contestant.torchrun:
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cores)]
    return [*words, "-m", "benchmarks.peers.contestant", name]
