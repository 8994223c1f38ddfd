"""Change the config.toml of a run as if the run had written it so."""

from pathlib import Path
from typing import Any

from fedloom.runs.directory import RunDirectory
from fedloom.utils.run_files import read_run_config


def rewrite_config(path: Path, **values: Any) -> None:
    """Replace values in the config of a run, with its checksum."""
    run = RunDirectory.open(path)
    run._write_config({**read_run_config(path), **values}, run.inputs())
