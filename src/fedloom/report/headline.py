"""What came out, in a sentence that claims no more than the runs show, and what must be said with it."""

from collections.abc import Sequence

from fedloom.report.groups import TASK, differing, once, settings
from fedloom.report.measure import ENOUGH, Difference, Group, final, last_evaluation, paired
from fedloom.report.records import Record
from fedloom.report.words import listed, plural, signed

NO_CAUSE = frozenset({"method", "engine", "device", *TASK})
"""Settings that may differ between methods without another explanation for a difference in result."""

HOLD = "\N{NO-BREAK SPACE}"


def headlines(groups: Sequence[Group]) -> list[str]:
    """One sentence or two for each task."""
    tasks = dict.fromkeys(group.task for group in groups)
    said = {task: _outcome([group for group in groups if group.task == task]) for task in tasks}
    return [f"On {task}: {text}" if len(said) > 1 else text for task, text in said.items()]


def _outcome(groups: Sequence[Group]) -> str:
    """What came out of one task. The winner is whoever ended best; whether it won is for the seeds to say."""
    metric = groups[0].metric
    means = {group.label: group.result.mean for group in groups if group.result and group.metric == metric}
    if not means:
        return "No round has been evaluated yet."
    higher, lower = ("higher", "lower") if metric == "accuracy" else ("lower", "higher")
    sign = 1 if metric == "accuracy" else -1
    judged = [group for group in groups if group.label in means]
    best, *rest = sorted(judged, key=lambda group: -sign * means[group.label])
    finished = all(group.finished for group in judged)
    lead = f"{best.short} ended" if finished else f"So far, {best.short} stands"
    lead += f" {'highest' if sign > 0 else 'lowest'}, at {value(best)}" if rest else f" at {value(best)}"
    seeds = len(best.result.values) if best.result else 0
    lead += f" over {seeds} seeds" if seeds > 1 else ""
    if not rest:
        return f"{lead} after {plural(last_evaluation(best.runs[0]), 'round')}."
    gaps = {group.label: gap for group in rest if (gap := paired(best, group)) and gap.seeds >= ENOUGH}
    if not gaps:
        return f"{lead}. That is too few common seeds to tell a difference between methods from noise."
    apart = [group for group in rest if group.label in gaps and gaps[group.label].clear]
    level = [group for group in rest if group.label in gaps and group not in apart]
    unsure = [group for group in rest if group.label not in gaps]
    if level:
        said = f"{lead}, but {_named(level)} {_is(level)} within noise of it"
        said += f"; {_named(apart)} {_is(apart)} clearly {lower}." if apart else "."
    else:
        nearest = " from the nearest" if len(apart) > 1 else ""
        names = listed([group.short for group in apart])
        said = f"{lead}, clearly {higher} than {names}: {span(gaps[apart[0].label], metric)}{nearest}."
    if unsure:
        said += f" {_named(unsure)} cannot be judged: too few seeds in common."
    # A winner that scatters much hides what is certain: others may be clearly ahead of the reference.
    first = groups[0]
    ahead = [group for group in rest if (gap := paired(group, first)) and gap.clear and sign * gap.mean > 0]
    if first in level and ahead:
        names = listed([group.short for group in ahead])
        said += f" But {names} {_is(ahead)} clearly {higher} than {first.short}."
    return said


def _named(groups: Sequence[Group]) -> str:
    return listed([f"{group.short} ({value(group, unit=False)})" for group in groups])


def _is(groups: Sequence[Group]) -> str:
    return "is" if len(groups) == 1 else "are"


def value(group: Group, unit: bool = True) -> str:
    """A group's result in prose."""
    if group.result is None:
        return "no result"
    if group.metric == "accuracy":
        return f"{group.result.show(100, 1)} %".replace(" ", HOLD) + (" test accuracy" if unit else "")
    return ("test loss " if unit else "") + group.result.show(1, 3).replace(" ", HOLD)


def span(gap: Difference, metric: str) -> str:
    """A difference with its interval, in percentage points for accuracy."""
    scale, digits, unit = (100.0, 1, " points") if metric == "accuracy" else (1.0, 3, "")
    text = f"{signed(scale * gap.mean, digits)}{unit}"
    if gap.low is None or gap.high is None:
        return text
    return f"{text} (95 % interval {signed(scale * gap.low, digits)} to {signed(scale * gap.high, digits)})"


def notes(groups: Sequence[Group]) -> list[str]:
    """What would mislead if it were not said."""
    said = [note for group in groups for note in _about(group)]
    said += _server_data([group.runs[0] for group in groups])
    causes: dict[str, None] = {}
    for name in dict.fromkeys(group.task for group in groups):
        tables = [settings(group.runs[0].config) for group in groups if group.task == name]
        methods = {part for group in groups for part in group.runs[0].method.split("+")}
        keys = (key for key in differing(tables) if key not in NO_CAUSE)
        causes |= dict.fromkeys(key for key in keys if key.partition(".")[0] not in methods)
    several = len({group.runs[0].method for group in groups}) > 1
    if causes and several:
        said.append(f"The runs also differ in {listed(list(causes))}: not every difference is the method's.")
    return said


def _about(group: Group) -> list[str]:
    """Runs of one group that are missing, repeated or without a result."""
    said, unique = [], once(group.members)
    left = [run for run in unique if run not in group.runs]
    if left:
        said.append(f"{group.label}: left out, because unfinished: {listed([_where(run) for run in left])}.")
    elif not group.finished:
        open_runs = [run for run in group.runs if not run.finished]
        said.append(f"{group.label} has not finished: {listed([_where(run) for run in open_runs])}.")
    if len(unique) < len(group.members):
        said.append(f"{group.label}: a seed was given more than once and is counted once.")
    void = [run.seed for run in group.runs if final(run, group.metric) is None]
    if void and group.result:
        said.append(f"{group.label}: no final {group.metric} with seed {listed(void)}; left out of its mean.")
    lost, asked = (int(sum(run.total(key) or 0 for run in group.runs)) for key in ("lost", "clients"))
    if 2 * lost > asked:
        said.append(f"{group.label} went without {lost} of {asked} answers of clients; the reasons are below.")
    return said


def _server_data(runs: Sequence[Record]) -> list[str]:
    """Which methods saw data that others do without, where some did."""
    users: dict[str, dict[str, None]] = {}
    for run in runs:
        names = run.config.get("server_data_used_by")
        if isinstance(names, list) and names:
            users.setdefault(str(run.config.get("server_data", "?")), {}).update(dict.fromkeys(map(str, names)))
    said = {source: " (samples that no client holds)" if source.startswith("split:") else "" for source in users}
    return [
        f"{listed(list(names))} used data on the server, {source}{said[source]}; other methods do without."
        for source, names in users.items()
    ]


def _where(run: Record) -> str:
    planned = run.config.get("rounds")
    return f"seed {run.seed} at round {run.last_round}" + (f" of {planned}" if planned else "")
