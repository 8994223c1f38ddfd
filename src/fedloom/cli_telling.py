"""What the command says of a finished run."""

import json
from collections.abc import Mapping
from typing import Any


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def tell(finished: Any, as_json: bool) -> None:
    """Print the summary of a run, for people or as one line of JSON."""
    from fedloom.report import human_bytes, human_seconds

    if as_json:
        print(json.dumps(finished.summary))
        return
    summary = finished.summary
    loss = "–" if summary["loss"] is None else f"{summary['loss']:.4f}"
    lines = [
        ("accuracy", f"{percent(summary['accuracy'])} on test data after round {summary['rounds']} (loss {loss})"),
        ("clients", f"{percent(summary['client_accuracy_mean'])} on average, "
                    f"{percent(summary['client_accuracy_worst10'])} for the worst tenth"),
        ("sent", f"{human_bytes(summary['bytes_down'])} down, {human_bytes(summary['bytes_up'])} up"),
        ("time", human_seconds(summary["seconds"])),
        ("run", summary["run"]),
        ("report", str(finished.path / "report.html")),
        ("digest", summary["digest"]),
    ]  # fmt: skip
    if summary["client_accuracy_mean"] is None:
        del lines[1]
    if "epsilon" in summary:
        lines.insert(-3, ("privacy", _privacy(summary, finished.config.noise_source)))
    if summary["lost"]:
        lines.insert(3, ("lost", f"{summary['lost']} answers of clients, see the report"))
    if summary.get("personal_accuracy_mean") is not None:
        own, worst = percent(summary["personal_accuracy_mean"]), percent(summary["personal_accuracy_worst10"])
        lines.insert(1, ("own", f"{own} on average with the clients' own models, {worst} for the worst tenth"))
    for name, text in lines:
        print(f"{name:<10}{text}")


def _privacy(summary: Mapping[str, Any], source: str) -> str:
    """What was spent, or that nothing is guaranteed."""
    if summary["epsilon"] is None:
        return "none guaranteed: updates were clipped, but no noise was added"
    spent = f"epsilon {summary['epsilon']:.2f} at delta {summary['delta']:.2g}, for one client more or less"
    return f"{spent} (simulated: the noise is the seed's)" if source == "seed" else spent
