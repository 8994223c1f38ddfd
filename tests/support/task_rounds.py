"""Tasks of one round, as `RoundRunner` sends them to an engine."""

from collections.abc import Iterable
from dataclasses import replace

from fedloom.core.tasks import ClientTask


def in_round(round: int, tasks: Iterable[ClientTask]) -> list[ClientTask]:
    return [replace(task, round=round) for task in tasks]
