"""Errors that reach a person, as one sentence that names the value and what was expected."""

import difflib
from collections.abc import Iterable


class FedloomError(Exception):
    """Something a person can act on; the command prints its text alone, without a traceback."""

    exit_code = 1


class InputError(FedloomError):
    """What was asked for cannot be done: a wrong option, a broken file, an impossible partition."""

    exit_code = 2


class InsufficientMemoryError(FedloomError):
    """There is not enough memory, on a GPU or on this machine."""

    def __init__(self, text: str, at_once: int = 1) -> None:
        super().__init__(text)
        self.at_once = at_once
        """Clients that were trained at once: with fewer there may be enough."""


def unknown_name_error(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a `name` that no `kind` has, with the nearest known name suggested."""
    names = sorted(known)
    # One letter of nu and mu is half of them; of long names half is chance, as in learning_rate and clip_update.
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5 if len(name) < 4 else 0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}." if names else "there is none."
    return InputError(f"unknown {kind} {name!r}; {hint}")


def shorten_error_message(error: BaseException) -> str:
    """What another library says is wrong, as the end of a sentence: in one line, and not a page of it."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."


def describe_error(error: BaseException) -> str:
    """A client's failure in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


class RunStopped(FedloomError):
    """The run was stopped on request and can be resumed."""

    exit_code = 130
