"""A data set's name with what a person says beside it: `table:people.csv,label=income,owner=site`."""

import math
from dataclasses import dataclass
from pathlib import Path

from fedloom.errors import InputError, unknown


@dataclass
class Spec:
    """`name:PATH,option=value,...`, or `name:option=value,...` where the data set takes no path.

    Each option is taken once, by one of the methods, and `done` refuses those that nobody took.
    """

    name: str
    path: Path | None
    options: dict[str, str]
    asked: list[str]

    def text(self, key: str, default: str = "") -> str:
        """An option as it was written."""
        self.asked.append(key)
        return self.options.pop(key, default)

    def whole(self, key: str, default: int, least: int) -> int:
        """A whole number."""
        text = self.text(key, str(default))
        if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < least:
            raise InputError(f"{key} of {self.name!r} is {text!r}; expected a whole number of at least {least}.")
        return int(text)

    def share(self, key: str, default: float) -> float:
        """A part of the whole, above 0 and below 1."""
        text = self.text(key, str(default))
        share = number(text)
        if not 0 < share < 1:
            raise InputError(f"{key} of {self.name!r} is {text!r}; expected a share above 0 and below 1.")
        return share

    def yes(self, key: str) -> bool:
        """Whether the option says yes; it is no by default."""
        text = self.text(key, "no").lower()
        if text not in ("yes", "no"):
            raise InputError(f"{key} of {self.name!r} is {text!r}; expected yes or no.")
        return text == "yes"

    def done(self) -> None:
        """Complain about what is left."""
        if self.options:
            raise unknown(f"option of {self.name!r}", next(iter(self.options)), self.asked)


def home_path(text: str) -> Path:
    """A path in which ~ is the user's folder; of a user who does not exist it stays as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def number(text: str) -> float:
    """The number that a text says; NaN where it says none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def parse(text: str, takes_path: bool) -> Spec:
    """The parts of a data set's name."""
    name, _, rest = text.partition(":")
    if "\0" in rest:
        raise InputError(f"the data set {text!r} has a zero byte, which no path or name has.")
    pieces = rest.split(",") if rest else []
    path = None
    if takes_path:
        if not pieces or not pieces[0].strip():
            raise InputError(f"{name!r} wants a path, as in {name}:PATH; {text!r} has none.")
        path = home_path(pieces.pop(0).strip())
    options: dict[str, str] = {}
    for piece in pieces:
        key, mark, value = (part.strip() for part in piece.partition("="))
        if not (key and mark and value):
            raise InputError(f"cannot read {piece!r} in the data set {text!r}; expected KEY=VALUE.")
        if key in options:
            raise InputError(f"the data set {text!r} says {key} twice.")
        options[key] = value
    return Spec(name, path, options, [])
