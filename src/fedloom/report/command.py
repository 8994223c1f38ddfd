"""The command that repeats a comparison, in its folder and its report."""

import shlex
from pathlib import Path

from fedloom.errors import InputError
from fedloom.report.file_names import hide_setting_folders
from fedloom.report.markup import SectionHtml, join_section_html, render_section_tag
from fedloom.utils.storage import write_atomically

FILE = "command.txt"


def write_comparison_command(folder: Path, command: str) -> None:
    """Keep the command of the comparison in `folder`, for reports that are written later."""
    write_atomically(folder / FILE, f"{command}\n".encode())


def read_comparison_command(folder: Path) -> str | None:
    """Read the command of the comparison in `folder`; None if it was made in Python, or is no comparison."""
    path = Path(folder) / FILE
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)!r} cannot be read: {error}.") from None


def render_command(commands: list[str]) -> SectionHtml:
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
