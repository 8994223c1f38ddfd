"""Complete the name of a data set: `mine.csv` is `table:mine.csv`.

Paths become absolute. Loads no torch."""

import re
from pathlib import Path

PATHS = {
    "table": ("", "test"),
    "arrays": ("",),
    "hf": ("", "vocabulary"),
    "folder": ("",),
    "domains": ("",),
    "sent140": ("vocabulary",),
}
"""Data sets whose names contain paths: after the colon (written '' here), or in the options listed."""

KIND_OF_SUFFIX = {
    **dict.fromkeys((".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet"), "table"),
    ".npz": "arrays",
}
"""The kind of a file that is named by its path alone."""


def complete_data_name(data: str) -> str:
    """Return the name with its kind and absolute paths: `table:/data/people.csv,label=income` for `people.csv,...`.

    A path alone is a table or arrays by its suffix, and a folder of images if it contains a slash. Names of data sets
    have neither.
    """
    kind, colon, rest = data.partition(":")
    if not colon or "," in kind:
        path = data.partition(",")[0].strip()
        suffix = next((suffix for suffix in KIND_OF_SUFFIX if path.lower().endswith(suffix)), None)
        kind, rest = (KIND_OF_SUFFIX[suffix], data) if suffix else ("folder", data) if "/" in path else (data, "")
    if kind not in PATHS or not rest or "\0" in rest:
        return data
    pieces = rest.split(",")
    for number, piece in enumerate(pieces):
        key, equals, value = piece.partition("=") if number or "" not in PATHS[kind] else ("", "", piece)
        share = re.fullmatch(r"[\d.eE+-]+", value.strip()) and key.strip() == "test"
        if key.strip() in PATHS[kind] and value.strip() and not share:
            path = value.strip()
            home = Path.home() / path[2:] if path.startswith("~/") else Path(path)
            pieces[number] = f"{key}{equals}{home.absolute()}"
    return f"{kind}:{','.join(pieces)}"
