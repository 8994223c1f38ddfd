"""A run that has finished: its records, its numbers, and the model that came of it."""

from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.config import replace_config
from fedloom.errors import InputError
from fedloom.report import read_run_record, write_report_page
from fedloom.runs.build import build_run
from fedloom.runs.directory import RunDirectory
from fedloom.runs.resolve import UserObjects
from fedloom.utils.storage import MODEL_FILE, read_safetensors

ANYWHERE: dict[str, Any] = {
    "engine": "plain", "device": "cpu", "precision": "tf32", "channels_last": None,
    "init": None, "init_sha256": None, "new_head": False,
}  # fmt: skip
"""Settings with which the network of any run can be built on any machine; a file gives it its weights."""


class RunResult:
    """A finished run."""

    def __init__(self, folder: RunDirectory, own: UserObjects) -> None:
        self._folder = folder
        self._own = own
        self.path = folder.path
        self.config = folder.config
        summary = folder.summary()
        if summary is None:
            raise InputError(f"{folder.path} has not finished; go on with: fedloom resume {folder.path}")
        self.summary = {**summary, "run": str(folder.path)}  # it may have been moved since

    def __repr__(self) -> str:
        accuracy = "no accuracy" if self.accuracy is None else f"accuracy {self.accuracy:.4f}"
        ended = f"{accuracy} after round {self.summary['rounds']}"
        return f"<{self.config.method} on {self.config.data}, {ended}: {self.path}>"

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record a round, from round 0, the initial model, on."""
        return self._folder.history()

    @property
    def accuracy(self) -> float | None:
        """Test accuracy of the deployed model."""
        value = self.summary["accuracy"]
        return None if value is None else float(value)

    @property
    def digest(self) -> str:
        """SHA-256 of the deployed model's row."""
        return str(self.summary["digest"])

    def model(self) -> nn.Module:
        """The deployed model as an ordinary module, in evaluation mode."""
        check_model_file(self.path)
        tensors = read_safetensors(self.path / MODEL_FILE)
        if isinstance(self._own.model, nn.Module):
            module = self._own.model
        else:
            experiment = build_run(replace_config(self.config, **ANYWHERE), self._own)
            experiment.engine.close()
            module = experiment.module
        # The tensors of a module that has trained are views into some row: give the result memory of its own.
        module = deepcopy(module).cpu()
        module.load_state_dict(tensors)
        return module.eval()

    def report(self, path: Path | str | None = None) -> Path:
        """Write the HTML report; by default into the run's folder."""
        target = Path(path) if path is not None else self.path / "report.html"
        write_report_page([read_run_record(self.path)], target)
        return target


def check_model_file(path: Path) -> None:
    """Say how a finished run gets its model's file back, where it is gone."""
    if not (path / MODEL_FILE).exists():
        raise InputError(f"{path / MODEL_FILE} is gone; write it again with: fedloom resume {path}")


def count_failed_clients(path: Path | str) -> int:
    """How many answers of clients a run has lost, not counting those that it was asked to lose."""
    folder = RunDirectory.open(Path(path))
    return 0 if folder.config.lost else sum(int(record.get("lost", 0)) for record in folder.history())
