"""RunResult: the history, accuracy and model of a finished run."""

from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedloom.config import replace_config
from fedloom.errors import InputError
from fedloom.report import read_run_record, write_report_page
from fedloom.runs.build import build_run
from fedloom.runs.directory import RunDirectory
from fedloom.runs.resolve import UserObjects, resolve_run
from fedloom.utils.storage import MODEL_FILE, read_safetensors

ANYWHERE: dict[str, Any] = {
    "engine": "sequential", "device": "cpu", "precision": "tf32", "channels_last": None,
    "init": None, "init_sha256": None, "new_head": False,
}  # fmt: skip
"""Settings that build the network of any run on any machine; its weights come from a file."""


class RunResult:
    """A finished run.

    Attributes:
        path: The run directory.
        config: The settings.
        summary: The totals in `summary.json`.

    Example:
        run = fedloom.run("fedavg", rounds=5)
        print(run.accuracy, run.history[-1]["train_loss"])
        network = run.model()
    """

    def __init__(self, directory: RunDirectory, user_objects: UserObjects) -> None:
        self._directory = directory
        self._user_objects = user_objects
        self.path = directory.path
        self.config = directory.config
        summary = directory.summary()
        if summary is None:
            raise InputError(f"{directory.path} has not finished; continue with: fedloom resume {directory.path}")
        self.summary = {**summary, "run": str(directory.path)}  # the directory may have moved

    def __repr__(self) -> str:
        accuracy, window = "no accuracy" if self.accuracy is None else f"accuracy {self.accuracy:.4f}", ""
        if self.accuracy is not None and self.summary["window"] > 1:
            window = f" (mean of the last {self.summary['window']} evaluations)"
        ended = f"{accuracy}{window} after round {self.summary['rounds']}"
        return f"<{self.config.label} on {self.config.data}, {ended}: {self.path}>"

    @property
    def history(self) -> list[dict[str, Any]]:
        """Return one record per round, from round 0 (the initial model). `pandas.DataFrame(run.history)` works."""
        return self._directory.history()

    @property
    def accuracy(self) -> float | None:
        """Return the result of the run: the mean test accuracy of the global model over the last evaluations.

        `summary["window"]` says how many. None without classes or test samples, or if one of them is not finite.
        """
        value = self.summary["accuracy"]
        return None if value is None else float(value)

    @property
    def held_out_accuracy(self) -> float | None:
        """Return the mean accuracy for the clients that never trained, over the last evaluations.

        `summary` also has the worst tenth and the number of these clients. None without the setting `held_out_clients`.
        """
        value = self.summary.get("held_out_accuracy_mean")
        return None if value is None else float(value)

    @property
    def last_accuracy(self) -> float | None:
        """Return the test accuracy of the final global model alone; None without classes or test samples."""
        value = self.summary["last_accuracy"]
        return None if value is None else float(value)

    @property
    def diverged(self) -> str | None:
        """Return why the run ended early if its training diverged, else None. A comparison keeps such runs."""
        value = self.summary.get("diverged")
        return None if value is None else str(value)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the global model's row; without one, of the clients' rows in order."""
        return str(self.summary["digest"])

    @property
    def has_global_model(self) -> bool:
        """Return whether the run has a global model; in a run of `local` each client has a model of its own."""
        return bool(self.summary.get("global_model", True))

    def model(self) -> nn.Module:
        """Return the global model.

        Returns:
            An ordinary module with its own memory, on the CPU and in evaluation mode.

        Raises:
            InputError: The model file is missing or damaged, or there is no global model.
        """
        if not self.has_global_model:
            raise InputError(f"{self.path} has no global model: in {self.config.label}, each client has its own.")
        tensors = read_result_model(self.path)
        if isinstance(self._user_objects.model, nn.Module):
            model = self._user_objects.model
        else:
            built_run = build_run(resolve_run(replace_config(self.config, **ANYWHERE), self._user_objects))
            built_run.engine.close()
            model = built_run.model
        # A trained module's tensors are views into a row, so the result gets a copy.
        model = deepcopy(model).cpu()
        model.load_state_dict(tensors)
        return model.eval()

    def report(self, path: Path | str | None = None) -> Path:
        """Write the HTML report.

        Args:
            path: The file; by default `report.html` in the run directory.

        Returns:
            The file.
        """
        target = Path(path) if path is not None else self.path / "report.html"
        write_report_page([read_run_record(self.path)], target)
        return target


def read_result_model(path: Path) -> dict[str, Tensor]:
    """Return the global model as tensors. Raise an InputError if its file is damaged or missing, and what to do."""
    if not (path / MODEL_FILE).exists():
        raise InputError(f"{path / MODEL_FILE} is gone; write it again with: fedloom resume {path}")
    return read_safetensors(path / MODEL_FILE, has_checksum=True)


def count_failures_in_result(path: Path | str) -> int:
    """Return how many updates of clients failed in a run; 0 if it simulates failures."""
    directory = RunDirectory.open(Path(path))
    return 0 if directory.config.failure_rate else sum(int(record.get("failed", 0)) for record in directory.history())
