"""The order of the runs of a comparison and its command, kept in its folder."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.errors import InputError
from fedloom.report.file_names import hide_setting_folders
from fedloom.report.markup import SectionHtml, join_section_html, render_section_tag
from fedloom.utils.storage import read_json, write_json

FILE = "comparison.json"


@dataclass(frozen=True)
class ComparisonRecord:
    """What a comparison wrote about itself, for reports that are written later."""

    runs: tuple[str, ...] = ()
    """The folders of the runs in their order; the first method is the reference."""
    command: str | None = None
    """The command that repeats it; None if it was given Python objects."""

    def write(self, folder: Path) -> None:
        """Write the record into the folder of the comparison."""
        write_json(folder / FILE, {"command": self.command, "runs": self.runs})

    @classmethod
    def read(cls, folder: Path) -> "ComparisonRecord":
        """Read the record in `folder`; an empty one if it holds no comparison."""
        path = Path(folder) / FILE
        if not path.exists():
            return cls()
        table: Any = read_json(path)
        try:
            runs, command = tuple(map(str, table["runs"])), table["command"]
        except (KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged: it does not hold a comparison ({error}).") from None
        return cls(runs, None if command is None else str(command))

    def sort_runs(self, folders: Iterable[Path]) -> list[Path]:
        """Return run folders in the order of the comparison, others behind them by name."""
        place = {name: at for at, name in enumerate(self.runs)}
        return sorted(folders, key=lambda folder: (place.get(folder.name, len(place)), folder))


def render_comparison_command(commands: list[str]) -> SectionHtml:
    """Return commands in a box with a button that copies them. Paths are shown without their folders."""
    shown = [_hide_folders(command) for command in commands]
    code = render_section_tag("pre", render_section_tag("code", "\n".join(shown)), tabindex="0")
    box = render_section_tag("div", code, class_="command")
    if shown == commands:
        return box
    return join_section_html(
        box,
        render_section_tag("p", "Files are named without their folders; add yours before you run it.", class_="hint"),
    )


def _hide_folders(command: str) -> str:
    try:
        return shlex.join(hide_setting_folders(word) for word in shlex.split(command))
    except ValueError:  # no command of a shell
        return hide_setting_folders(command)
