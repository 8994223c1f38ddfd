"""The protocol of runs: what a result means."""

from collections.abc import Sequence
from typing import Any

from fedloom.report.records import RunRecord
from fedloom.report.statistics import GroupStatistics
from fedloom.utils.formatting import format_list, format_plural
from fedloom.utils.result_window import select_evaluations

TITLES = {
    "model": "model",
    "data": "test data",
    "rounds": "rounds",
    "selection": "chosen on",
    "held_out": "held-out clients",
    "new_client": "new clients",
}
"""The entries of a protocol, and their titles."""


def describe_protocol(record: RunRecord, window: int | None = None) -> dict[str, str]:
    """Say in a few words what the results of a run mean.

    Args:
        record: The run, which may be unfinished.
        window: How many of the last evaluations are averaged; by default the setting of the run.

    Returns:
        One text for each of `TITLES`; the last two only if clients were held out.
    """
    return {
        "model": _describe_model(record),
        "data": _describe_data(record),
        "rounds": _describe_rounds(record, window),
        "selection": "nothing: the last rounds count, whatever their results",
        **_describe_held_out(record),
    }


def _has(record: RunRecord, key: str) -> bool:
    return any(key in row for row in record.history)


def _describe_model(record: RunRecord) -> str:
    personal = "; “own models”: the personal model of each client" if _has(record, "personal_accuracy_mean") else ""
    return f"the global model{personal}"


def _describe_data(record: RunRecord) -> str:
    share = record.config.get("client_test")
    if record.config.get("client_test_samples"):
        part = f", {100 * share:g} % of each client's samples" if isinstance(share, float) and share else ""
        return f"the clients' own test samples{part}; no client trains on them"
    if not (_has(record, "accuracy") or _has(record, "loss")):
        return "none"
    weighted = "; a client's accuracy weights its classes by the client's training samples"
    return f"the common test set{weighted if _has(record, 'client_accuracy_mean') else ''}"


def _describe_rounds(record: RunRecord, window: int | None) -> str:
    rounds = [int(row["round"]) for row in select_evaluations(record.history)[-record.window(window) :]]
    if not rounds:
        return "none has been evaluated"
    planned = record.config.get("rounds", record.last_round)
    if len(rounds) == 1:
        return f"the last evaluation, after round {rounds[0]} of {planned}"
    return f"mean of the last {len(rounds)} evaluations, after rounds {rounds[0]} to {rounds[-1]} of {planned}"


def _describe_held_out(record: RunRecord) -> dict[str, str]:
    """Say which clients never trained, how they are scored, and which model they get; nothing if there are none."""
    ids = record.config.get("held_out_client_ids")
    if not isinstance(ids, list) or not ids:
        return {}
    scored = record.history[-1].get("held_out_scored", len(ids)) if record.history else len(ids)
    some = "" if scored == len(ids) else f"; {scored} of them are scored"
    whose = "its own test samples" if record.config.get("client_test_samples") else "all its samples"
    counted = f"{len(ids)} of {format_plural(record.config.get('clients', len(ids)), 'client')} never trained"
    return {
        "held_out": f"{counted}{some}; each is scored on {whose}",
        "new_client": str(record.config.get("new_client", "")),
    }


def protocol_rows(groups: Sequence[GroupStatistics]) -> list[tuple[str, str]]:
    """Return title and text of each entry, once for all groups with the same text."""
    rows = []
    described = [(group, _describe_group(group)) for group in groups]
    for key, title in TITLES.items():
        texts: dict[str, list[str]] = {}
        for group, protocol in described:
            texts.setdefault(protocol.get(key, ""), []).append(group.label)
        several = len(texts) > 1
        rows += [
            (f"{title} ({format_list(names)})" if several else title, text) for text, names in texts.items() if text
        ]
    return rows


def collect_protocols(groups: Sequence[GroupStatistics]) -> list[dict[str, Any]]:
    """Return each protocol of a comparison with the names of its methods, for JSON."""
    found: list[dict[str, Any]] = []
    for group in groups:
        protocol = _describe_group(group)
        same = next((one for one in found if {**one, "methods": 0} == {**protocol, "methods": 0}), None)
        if same is None:
            found.append({"methods": [group.label], **protocol})
        else:
            same["methods"].append(group.label)
    return found


def _describe_group(group: GroupStatistics) -> dict[str, str]:
    return describe_protocol(group.runs[0], group.windows[0] if len(group.windows) == 1 else None)
