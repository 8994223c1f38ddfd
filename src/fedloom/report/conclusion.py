"""The conclusion of a comparison: which methods differ from the reference, and which differences the seeds confirm.

The tests of one task are one family: each other method against the reference (the first method), corrected by Holm's
method. The methods are not tested against each other, so the sentences rank nothing but the means.
"""

from collections.abc import Sequence
from typing import Literal

from fedloom.report.significance import ENOUGH, LEVEL, format_p_value
from fedloom.report.statistics import GroupStatistics, PairedDifference
from fedloom.utils.formatting import format_list, format_plural, format_signed

HOLD = "\N{NO-BREAK SPACE}"

Verdict = Literal["higher", "lower", "level", "scattered", "untested"]
"""How a method compares with the reference: a significant difference (higher, lower), none (level), none although a
method that is closer to the reference differs significantly (scattered), or too few common seeds (untested)."""


def conclude_comparison(groups: Sequence[GroupStatistics]) -> list[str]:
    """Return the conclusion of each task. The first group of a task is its reference."""
    tasks = dict.fromkeys(group.task for group in groups)
    said = {task: _conclude_task([group for group in groups if group.task == task]) for task in tasks}
    return [f"On {task}: {text}" if len(said) > 1 else text for task, text in said.items()]


def _judge_groups(groups: Sequence[GroupStatistics]) -> list[Verdict]:
    """Return how each group compares with its reference, by its corrected p-value.

    A method of which the seeds vary a lot may be further from the reference than a method with a significant
    difference, and yet show none itself. Calling it level would contradict the other verdict, so it is "scattered".
    """
    verdicts: list[Verdict] = []
    for group in groups:
        gap = group.difference
        if gap is None or gap.p is None:
            verdicts.append("untested")
        elif gap.p >= LEVEL:
            verdicts.append("level")
        else:
            verdicts.append("higher" if gap.mean > 0 else "lower")
    certain = [(group, 1 if verdict == "higher" else -1) for group, verdict in zip(groups, verdicts, strict=True)
               if verdict in ("higher", "lower")]  # fmt: skip
    for at, group in enumerate(groups):
        if verdicts[at] == "level" and any(_is_beyond(group, other, sign) for other, sign in certain):
            verdicts[at] = "scattered"
    return verdicts


def _is_beyond(group: GroupStatistics, other: GroupStatistics, sign: int) -> bool:
    """Return whether `group` is at least as far as `other` in the direction `sign`, in either way of looking at it."""
    return sign * (_gap(group) - _gap(other)) >= 0 or sign * (_mean(group) - _mean(other)) >= 0


def _gap(group: GroupStatistics) -> float:
    return group.difference.mean if group.difference else 0.0


def _mean(group: GroupStatistics) -> float:
    return group.result.mean if group.result else 0.0


def _conclude_task(groups: Sequence[GroupStatistics]) -> str:
    """Return the conclusion of one task."""
    metric = next((group.metric for group in groups if group.result), None)
    if metric is None:
        return "No round has been evaluated yet."
    judged = [group for group in groups if group.result and group.metric == metric]
    best = (max if metric == "accuracy" else min)(judged, key=_mean)
    started = "" if all(group.finished for group in judged) else "So far, "
    if len(groups) == 1:
        return f"{started}{best.short} has a test {metric} of {_format_result(best)} ({_format_basis(best)})."
    highest = "highest accuracy:" if metric == "accuracy" else "lowest error: test loss"
    sentences = [f"{started}{best.short} has the {highest} {_format_result(best)} ({_format_basis(best)})."]
    if judged[0] is not groups[0]:
        return f"{sentences[0]} {groups[0].short} has no result, so no method is compared with it."
    return " ".join([*sentences, *_compare_with(judged[0], judged[1:], metric)])


TOO_FEW = f"With fewer than {ENOUGH} common seeds, differences between methods cannot be judged."


def _compare_with(reference: GroupStatistics, others: Sequence[GroupStatistics], metric: str) -> list[str]:
    """Return a sentence for each verdict that occurs."""
    verdicts = _judge_groups(others)
    found = {
        verdict: [group for group, other in zip(others, verdicts, strict=True) if other == verdict]
        for verdict in dict.fromkeys(verdicts)
    }
    if set(found) == {"untested"}:
        return [TOO_FEW]
    said, name = [], f"{reference.short} ({_format_result(reference)})"
    for verdict in ("higher", "lower"):
        if verdict in found:
            said.append(
                f"{_list_gaps(found[verdict], metric)} {_is(found[verdict])} significantly {verdict} than {name}."
            )
            name = reference.short
    if level := found.get("level"):
        verb = "shows" if len(level) == 1 else "show"
        said.append(f"{_list_gaps(level, metric)} {verb} no significant difference from {name}.")
    if scattered := found.get("scattered"):
        verb = "varies" if len(scattered) == 1 else "vary"
        said.append(f"{_list_gaps(scattered, metric)} {verb} too much over seeds to be judged.")
    if untested := found.get("untested"):
        names = format_list([f"{group.short} ({_format_result(group)})" for group in untested])
        said.append(f"{names} cannot be judged: fewer than {ENOUGH} common seeds.")
    return said


def _list_gaps(groups: Sequence[GroupStatistics], metric: str) -> str:
    return format_list([f"{group.short} ({_format_gap(group.difference, metric)})" for group in groups])


def _is(groups: Sequence[GroupStatistics]) -> str:
    return "is" if len(groups) == 1 else "are"


def _format_result(group: GroupStatistics) -> str:
    """Format the result of a group for a sentence."""
    if group.result is None:
        return "no result"
    if group.metric == "accuracy":
        return f"{group.result.show(100, 1)} %".replace(" ", HOLD)
    return group.result.show(1, 3).replace(" ", HOLD)


def _format_basis(group: GroupStatistics) -> str:
    """Say what a result is the mean of."""
    seeds = len(group.result.values) if group.result else 0
    return describe_windows(group.windows) + (f", {format_plural(seeds, 'seed')}" if seeds > 1 else "")


def describe_windows(windows: Sequence[int]) -> str:
    """Say which evaluations a result averages."""
    if list(windows) == [1]:
        return "last evaluation"
    counts = f"{windows[0]}" if len(windows) == 1 else f"{windows[0]} to {windows[-1]}"
    return f"mean of the last {counts} evaluations"


def _format_gap(difference: PairedDifference | None, metric: str) -> str:
    """Format a difference with its p-value, in percentage points for accuracy."""
    if difference is None:
        return "no common seed"
    scale, digits, unit = (100.0, 1, " points") if metric == "accuracy" else (1.0, 3, "")
    text = f"{format_signed(scale * difference.mean, digits)}{unit}"
    return text if difference.p is None else f"{text}, {format_p_value(difference.p)}"
