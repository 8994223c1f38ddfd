"""Errors with a message for the user, and helpers to phrase them."""

import difflib
from collections.abc import Iterable


class FedloomError(Exception):
    """Base of all errors that the user can act on. The command prints only the message, without a traceback."""

    exit_code = 1


class InputError(FedloomError):
    """The input is wrong: an invalid option, a damaged file, an impossible partition."""

    exit_code = 2


class InsufficientMemoryError(FedloomError):
    """Out of memory, on a GPU or on this machine."""

    def __init__(self, text: str, concurrency: int = 1) -> None:
        super().__init__(text)
        self.concurrency = concurrency
        """How many clients trained at once; with fewer the memory may be enough."""


def unknown_name_error(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Return the error for an unknown `name`, with the most similar known name as a hint."""
    names = sorted(known)
    # Half of a short name is one letter (nu, mu). Long names agree in half by chance (learning_rate, clip_update).
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5 if len(name) < 4 else 0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}." if names else "there is none."
    return InputError(f"unknown {kind} {name!r}; {hint}")


def shorten_error_message(error: BaseException) -> str:
    """Return the message of another library's error in one line of at most 160 characters, to end a sentence."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."


def first_line_of_error(error: BaseException) -> str:
    """Return the first line of another library's message, to end a sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def describe_error(error: BaseException) -> str:
    """Return an error's type and message in one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


class TrainingDivergedError(FedloomError):
    """The updates of a run were no longer finite, so it ended before its last round."""


class RunStopped(FedloomError):
    """The run was stopped on request; it can be resumed."""

    exit_code = 130
