"""The parts of the page that need no script: tables, bars, settings."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from fedloom.report.groups import differing, settings, text
from fedloom.report.markup import Safe, grid, join, tag
from fedloom.report.measure import Group
from fedloom.report.table import Comparison, Part
from fedloom.report.words import human_seconds, listed, plural

HUES = 8
PARTS = ("train", "evaluate", "refine", "collect", "dispatch", "select", "checkpoint")
"""Where a round's time goes, the large parts first; the colours follow this order."""


def section(title: str, hint: str, *content: str) -> Safe:
    return tag("section", tag("h2", title), tag("p", hint, class_="hint") if hint else "", *content)


def named(group: Group) -> Safe:
    """A group's label after its colour."""
    return join(tag("span", class_="swatch", style=f"background:{_hue(group)}"), group.label)


def _hue(group: Group) -> str:
    return f"var(--c{group.name.kind % HUES})"


def results(comparison: Comparison) -> Safe:
    """The table, with a strip of dots beside the result: one dot a seed."""
    titles, rows = _coloured(comparison, "result")
    strips = _strips(comparison.groups)
    if strips and "seeds" in titles:
        place = titles.index("seeds") + 2
        titles.insert(place, "each seed")
        for row, strip in zip(rows, strips, strict=True):
            row.insert(place, strip)
    return section("Results", "", grid(titles, rows), tag("p", comparison.footnote(), class_="hint"))


def costs(comparison: Comparison) -> Safe:
    """What the results took: rounds, bytes, time and clients that did not answer."""
    titles, rows = _coloured(comparison, "cost")
    if len(titles) < 2:
        return Safe("")
    hint = "Of one run, mean over seeds."
    if any(group.accuracy and group.target for group in comparison.groups):
        hint += " Rounds: the median over seeds until that accuracy was first measured."
    return section("What it took", hint, grid(titles, rows))


def _coloured(comparison: Comparison, part: Part) -> tuple[list[str], list[list[str]]]:
    titles, rows = comparison.table(part)
    return titles, [[named(group), *row[1:]] for group, row in zip(comparison.groups, rows, strict=True)]


def _strips(groups: Sequence[Group]) -> list[Safe]:
    """Every seed's result on the scale of its task, the mean as a line; nothing if there is one number."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for group in groups:
        values[group.task, group.metric] += group.result.values if group.result else ()
    if max(map(len, values.values())) < 2:
        return []

    def strip(group: Group) -> Safe:
        if group.result is None:
            return Safe("")
        scale = values[group.task, group.metric]
        low, wide = min(scale), (max(scale) - min(scale)) or 1.0
        *seeds, mean = (6 + 108 * (one - low) / wide for one in (*group.result.values, group.result.mean))
        marks = [f'<circle cx="{x:.1f}" cy="9" r="4" fill-opacity=".55"/>' for x in seeds]
        marks.append(f'<line x1="{mean:.1f}" x2="{mean:.1f}" y1="2" y2="16" stroke="var(--ink)"/>')
        axis = Safe('<line x1="0" x2="120" y1="9" y2="9" stroke="var(--line)"/>')
        inner = tag("g", axis, Safe("".join(marks)), fill=_hue(group))
        return tag("svg", inner, width="120", height="18", aria_hidden="true")

    return [strip(group) for group in groups]


def durations(groups: Sequence[Group]) -> Safe:
    """A bar for each group, as long as its mean time and split by what the time went into."""
    split = [_parts(group) for group in groups]
    longest = max((sum(parts.values()) for parts in split), default=0.0)
    if not longest:
        return Safe("")
    names = [*PARTS, *dict.fromkeys(name for parts in split for name in parts if name not in PARTS)]
    names = [name for name in names if any(parts.get(name, 0) > 0 for parts in split)]
    bars = []
    for group, parts in zip(groups, split, strict=True):
        total = sum(parts.values())
        pieces = [
            tag(
                "span",
                style=f"width:{100 * parts[name] / longest:.3f}%;background:{_paint(name)}",
                title=f"{name}: {human_seconds(parts[name])}, {parts[name] / total:.1%}",
            )
            for name in names
            if parts.get(name, 0) > 0
        ]
        bar = tag("div", *pieces, class_="bar")
        bars.append(tag("div", tag("b", group.label), bar, tag("i", human_seconds(total)), class_="row"))
    everything = sum(sum(parts.values()) for parts in split)
    key = [
        tag("li", tag("span", class_="swatch", style=f"background:{_paint(name)}"), f"{name} {share:.0%}")
        for name in names
        if (share := sum(parts.get(name, 0) for parts in split) / everything) >= 0.005
    ]
    hint = "Mean over seeds, all rounds."
    return section("Where the time goes", hint, *bars, tag("ul", *key, class_="key"))


def _paint(name: str) -> str:
    order = ("#4c78a8", "#e0a458", "#b07aa1", "#5fa08a", "#c9675c", "#8f9fb5", "#9c8b73", "#8a8f98")
    return order[PARTS.index(name)] if name in PARTS else order[-1]


def _parts(group: Group) -> dict[str, float]:
    """Seconds by part, mean over seeds; what no part accounts for is `other`."""
    names = {
        name: None
        for run in group.runs
        for row in run.history
        if isinstance(row.get("seconds"), dict)
        for name in row["seconds"]
    }
    sums = {name: sum(run.total(f"seconds.{name}") or 0.0 for run in group.runs) for name in names}
    total = sums.pop("total", 0.0)
    rest = total - sum(sums.values())
    if rest > 0:
        sums["other"] = sums.get("other", 0.0) + rest
    return {name: max(value, 0.0) / len(group.runs) for name, value in sums.items()}


def losses(groups: Sequence[Group]) -> Safe:
    """Clients that were asked and whose answer never counted, with the reasons they gave."""
    rows = []
    for group in groups:
        if not group.lost:
            continue
        reasons: Counter[str] = Counter()
        for run in group.runs:
            for row in run.history:
                told = row.get("lost_clients")
                reasons.update(str(reason) for reason in (told.values() if isinstance(told, dict) else ()))
        why = listed([f"{reason} ({count})" for reason, count in reasons.most_common()]) or "not recorded"
        share = f"{group.lost / group.asked:.1%}" if group.asked else "–"
        rows.append([named(group), str(group.lost), str(group.asked), share, why])
    if not rows:
        return Safe("")
    hint = "Answers that did not come, came too late, or were refused; over all seeds."
    table = grid(["method", "lost", "asked", "share", "why"], rows, "text")
    return section("Clients lost", hint, table)


def setup(groups: Sequence[Group]) -> Safe:
    """What all runs share, said once; and a table of what they do not."""
    tables = [settings(group.runs[0].config) for group in groups]
    odd = [key for key in differing(tables) if key != "method"]
    shared = {key: value for key, value in tables[0].items() if key not in odd}
    if len(groups) > 1:
        shared.pop("method", None)
    pairs = [tag("div", tag("dt", key), tag("dd", value)) for key, value in shared.items()]
    table: str = ""
    if odd:
        rows = [
            [named(group), *(table.get(key, "–") for key in odd)] for group, table in zip(groups, tables, strict=True)
        ]
        table = grid(["method", *odd], rows, "text")
    hint = "Common to all runs" + (", then what differs." if odd else ".") if len(groups) > 1 else ""
    return section("Settings", hint, tag("dl", *pairs), table)


def starts(groups: Sequence[Group]) -> Safe:
    """What was taken from the files that runs started from; each start once."""
    rows: dict[tuple[str, ...], None] = {}
    for run in (run for group in groups for run in group.members):
        if run.beginning is not None:
            lists = [run.beginning.get(key) for key in ("matched", "replaced", "missing", "unexpected")]
            taken, *others = (list(map(str, names)) if isinstance(names, list) else [] for names in lists)
            rows[
                (text(run.beginning.get("file", "?")), str(len(taken)), *(listed(one) or "none" for one in others))
            ] = None
    if not rows:
        return Safe("")
    titles = ["start", "tensors taken", "new classifier", "missing in the file", "unexpected in it"]
    return section("Starting models", "", grid(titles, [list(row) for row in rows], "text"))


def runs(groups: Sequence[Group]) -> Safe:
    """Every run by itself: where it is, how far it came, what it left, and how to make it again."""
    rows: list[list[str]] = []
    commands: dict[str, None] = {}
    made: dict[str, None] = {}
    for group in groups:
        for run in group.members:
            state = "finished" if run.finished else "unfinished"
            state += "" if run in group.runs else ", not counted"
            digest = str((run.summary or {}).get("digest") or "–")
            short = tag("code", digest if len(digest) < 24 else digest[:23] + "…", title=digest)
            rows.append([named(group), run.seed, run.folder.name, str(run.last_round), state, short])
            if isinstance(run.config.get("command"), str):
                commands[run.config["command"]] = None
            versions = run.config.get("made_with")
            if isinstance(versions, dict):
                made[", ".join(f"{name} {text(version)}" for name, version in versions.items())] = None
    table = grid(["method", "seed", "folder", "rounds", "state", "digest"], rows, "text")
    again: str = ""
    if commands:
        title = tag("h3", "To run it again" if len(commands) == 1 else "To run them again")
        again = join(title, tag("pre", tag("code", "\n".join(commands))))
    hint = f"Made with {'; '.join(made)}." if made else ""
    return section(plural(len(rows), "run").capitalize(), hint, table, again)
