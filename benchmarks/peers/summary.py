"""The summary of all turns: seconds, ratios to fedloom, the same work."""

import json
from pathlib import Path
from statistics import mean, median
from typing import Any

BASE = "fedloom"
ACCURACY_BAND = 8.0
"""Largest difference of mean accuracies to the loop in points; two seeds of one contestant differ by up to 9."""
MODEL_TOLERANCE = 1e-4
"""Largest distance of a model to the loop's where nothing is drawn, as a share of what training changed."""

Turn = dict[str, Any]
Results = dict[str, Any]


def read_results(path: Path) -> Results:
    """Return the results of an earlier call; empty if there are none."""
    found: Results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def summarize_turns(turns: list[Turn]) -> dict[str, dict[str, Any]]:
    """Return for each contestant the medians over turns: seconds a round, ratio to fedloom, end of the first round.

    A ratio compares the median rounds of one turn. A contestant that failed in every turn has only its failures.
    """
    summary: dict[str, dict[str, Any]] = {}
    for name in turns[0]["contestants"]:
        made = [turn["contestants"][name] for turn in turns]
        found = [one for one in made if "failure" not in one]
        summary[name] = {"failures": [one["failure"] for one in made if "failure" in one]}
        if not found:
            continue
        ratios = [
            median(one["rounds"]) / median(turn["contestants"][BASE]["rounds"])
            for one, turn in zip(made, turns, strict=True)
            if "failure" not in one
        ]
        summary[name] |= {
            "seconds a round": round(median(median(one["rounds"]) for one in found), 3),
            "ratio to fedloom": round(median(ratios), 2),
            "all ratios to fedloom": sorted(round(ratio, 2) for ratio in ratios),
            "seconds to the end of the first round": round(median(one["first round"] for one in found), 1),
            "steps a round": sorted({one["steps"] / (1 + len(one["rounds"])) for one in found}),
            "mean accuracy": round(mean(one["accuracy"] for one in found), 2),
            "versions": found[0]["versions"],
        }
    return summary


def find_differences(summary: dict[str, dict[str, Any]], distances: dict[str, Any], steps: int) -> list[str]:
    """Return in which way contestants did not do the same work as the loop.

    Args:
        summary: The result of `summarize_turns`.
        distances: The distance of each model to the loop's in the job in which nothing is drawn.
        steps: The expected number of steps of a round.
    """
    found = []
    for name, one in summary.items():
        if "versions" not in one:  # it failed in every turn
            continue
        if one["steps a round"] != [steps]:
            found.append(f"{name} made {one['steps a round']} steps a round; expected {steps}.")
        gap = one["mean accuracy"] - summary["loop"]["mean accuracy"]
        if abs(gap) > ACCURACY_BAND:
            found.append(f"{name}'s mean accuracy differs from the loop's by {gap:.1f} points.")
        distance = distances.get(name)
        if not (isinstance(distance, float) and distance <= MODEL_TOLERANCE):
            found.append(f"{name}'s model is at distance {distance} from the loop's.")
    return found
