"""Format numbers, sizes, times and lists for users."""

from collections.abc import Sequence


def format_bytes(count: float | None) -> str:
    """Format `count` bytes in decimal units with three digits: 1.23 MB."""
    if count is None:
        return "–"
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while abs(count) >= 999.5 and len(units) > 1:
        count /= 1000
        del units[0]
    digits = 0 if units[0] == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {units[0]}"


def format_seconds(seconds: float | None) -> str:
    """Format a time span: 0.42 s, 12.3 s, 4 min 10 s, 2 h 05 min, 3 d 4 h."""
    if seconds is None:
        return "–"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def format_signed(value: float, digits: int = 2) -> str:
    """Format `value` with its sign, as a true minus, and without a sign for zero."""
    text = f"{abs(value):.{digits}f}"
    return text if float(text) == 0 else ("+" if value > 0 else "−") + text


def format_plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_list(names: Sequence[str]) -> str:
    """Join names as "one, two and three". A list of more than six names ends with the number of the others."""
    if len(names) > 6:
        names = [*names[:5], f"{len(names) - 5} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def short_repr(value: object) -> str:
    """Return the repr of a value for use in a message, or only its type if the repr is long."""
    text = repr(value)
    return text if len(text) <= 60 and text.isprintable() else f"a {type(value).__name__}"


def format_percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def format_value(value: object) -> str:
    """Format a TOML value for readers."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list):
        return ", ".join(format_value(one) for one in value)
    return str(value)
