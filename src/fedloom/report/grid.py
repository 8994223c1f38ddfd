"""A grid of methods as it was asked for: its factors, their levels, and what became of each combination."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.errors import InputError

FILE = "grid.json"


@dataclass(frozen=True)
class Factor:
    """One of the things that vary: the server, the local or the refiner."""

    name: str
    levels: tuple[str, ...]
    """The first one is the baseline, which the others are held against."""

    @property
    def baseline(self) -> str:
        return self.levels[0]


@dataclass(frozen=True)
class Cell:
    """One level of each factor, together."""

    levels: tuple[str, ...]
    method: str
    """The combination as a method, such as `fedcross+fedprox`; two cells may stand for the same one."""
    refusal: str | None = None
    """Why it cannot be run, in a sentence, if it cannot."""


@dataclass(frozen=True)
class Grid:
    """All combinations of the levels, with the first factor varying slowest."""

    factors: tuple[Factor, ...]
    cells: tuple[Cell, ...]

    @property
    def methods(self) -> list[str]:
        """The methods that can be run, each once."""
        return list(dict.fromkeys(cell.method for cell in self.cells if cell.refusal is None))

    @property
    def refused(self) -> dict[str, str]:
        """The combinations that are left out, by name, and why."""
        return {cell.method: cell.refusal for cell in self.cells if cell.refusal is not None}

    def at(self, levels: Sequence[str]) -> Cell:
        """The cell with these levels."""
        return next(cell for cell in self.cells if cell.levels == tuple(levels))

    def to_json(self) -> str:
        factors = [{"name": factor.name, "levels": factor.levels} for factor in self.factors]
        cells = [{"levels": cell.levels, "method": cell.method, "refused": cell.refusal} for cell in self.cells]
        return json.dumps({"factors": factors, "cells": cells}, indent=1) + "\n"


def read_grid(folder: Path) -> Grid | None:
    """The grid that the comparison in `folder` was made from; None if it was made from a list of methods."""
    path = Path(folder) / FILE
    try:
        table: Any = json.loads(path.read_text(encoding="utf-8"))
        factors = tuple(Factor(str(one["name"]), tuple(map(str, one["levels"]))) for one in table["factors"])
        cells = tuple(
            Cell(tuple(map(str, one["levels"])), str(one["method"]), None if one["refused"] is None else one["refused"])
            for one in table["cells"]
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{str(path)!r} is damaged: it is not the grid that was written ({error}).") from None
    whole = all(
        len(cell.levels) == len(factors)
        and all(level in factor.levels for level, factor in zip(cell.levels, factors, strict=True))
        for cell in cells
    )
    if not factors or not whole or not all(factor.levels for factor in factors):
        raise InputError(f"{str(path)!r} is damaged: its cells are not those of its factors.")
    return Grid(factors, cells)
