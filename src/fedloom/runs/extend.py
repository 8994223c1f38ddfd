"""Extend a finished run, if its result is then that of a longer run."""

from typing import Any

from fedloom.config import replace_config
from fedloom.errors import InputError
from fedloom.runs.directory import RunDirectory
from fedloom.utils.run_files import CONFIG_FILE


def extend_run(directory: RunDirectory, rounds: Any) -> RunDirectory:
    """Set the number of rounds of a finished run to `rounds`, and return the run, which is then unfinished.

    Raise an InputError if a part of the method has read the number of rounds: its earlier rounds would have been other
    ones.
    """
    config, path = directory.config, directory.path
    total = replace_config(config, rounds=rounds).rounds
    if total == config.rounds:
        return directory
    summary = directory.summary()
    if total < config.rounds:
        raise InputError(f"rounds is {total}, but {path} has {config.rounds} rounds; a larger number extends it.")
    if summary is None:
        raise InputError(
            f"{path} has not finished, so it cannot be extended yet; finish it with: fedloom resume {path}"
        )
    if "diverged" in summary:
        raise InputError(f"{path} cannot be extended: {summary['diverged']}.")
    if summary["rounds"] < config.rounds:
        raise InputError(f"{path} cannot be extended: max_epsilon allows no more than {summary['rounds']} rounds.")
    again = f"start a new run with: fedloom run --config {path / CONFIG_FILE} --rounds {total}"
    if config.engine == "flower":
        raise InputError(f"a run over sites cannot be extended, because sites know its number of rounds; {again}")
    if directory.depends_on_rounds():
        raise InputError(
            f"{path} cannot be extended: {config.label} depends on the number of rounds, so a run of {total} rounds "
            f"has other bits from the start; {again}"
        )
    return directory.extend(total)
