"""The parts of the page that need no script: tables, bars, settings.

The page's section about a grid: heat maps, what each part did, the best pairs, what was left out.

HTML that is escaped unless it was made here.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from html import escape

from fedloom.report.comparison_table import ComparisonTable, Part
from fedloom.report.effects import GridEffects
from fedloom.report.figures import MOST_PARTITIONS, Data
from fedloom.report.records import find_record_differences, flatten_record_config
from fedloom.report.statistics import GroupStatistics
from fedloom.utils.formatting import format_list, format_plural, format_seconds, format_value


class SectionHtml(str):
    """Text that is already HTML."""

    __slots__ = ()


def render_section_tag(name: str, *content: str, **attributes: str | bool | None) -> SectionHtml:
    """An element. Plain text inside it is escaped; `class_` is written `class`, `data_x` is `data-x`."""
    given = ""
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            given += f" {key}" if value is True else f' {key}="{escape(value)}"'
    return SectionHtml(f"<{name}{given}>{join_section_html(*content)}</{name}>")


def join_section_html(*content: str) -> SectionHtml:
    """Pieces of HTML one after the other."""
    return SectionHtml("".join(one if isinstance(one, SectionHtml) else escape(one) for one in content))


def render_section_table(titles: list[str], rows: list[list[str]], class_: str | None = None) -> SectionHtml:
    """A table whose first column names its rows, in a box that scrolls by itself on a narrow screen."""
    head = render_section_tag("tr", *[render_section_tag("th", title, scope="col") for title in titles])
    body = [
        render_section_tag(
            "tr", render_section_tag("th", row[0], scope="row"), *[render_section_tag("td", cell) for cell in row[1:]]
        )
        for row in rows
    ]
    table = render_section_tag(
        "table", render_section_tag("thead", head), render_section_tag("tbody", *body), class_=class_
    )
    return render_section_tag("div", table, class_="scroll", tabindex="0")


HUES = 8
PARTS = ("train", "evaluate", "refine", "collect", "dispatch", "select", "checkpoint")
"""Where a round's time goes, the large parts first; the colours follow this order."""


def render_section(title: str, hint: str, *content: str) -> SectionHtml:
    return render_section_tag(
        "section",
        render_section_tag("h2", title),
        render_section_tag("p", hint, class_="hint") if hint else "",
        *content,
    )


def _colored_label(group: GroupStatistics) -> SectionHtml:
    """A group's label after its colour."""
    return join_section_html(
        render_section_tag("span", class_="swatch", style=f"background:{_hue(group)}"), group.label
    )


def _hue(group: GroupStatistics) -> str:
    return f"var(--c{group.name.kind % HUES})"


def render_results_section(comparison: ComparisonTable) -> SectionHtml:
    """The table, with a strip of dots beside the result: one dot a seed."""
    titles, rows = _coloured(comparison, "result")
    strips = _strips(comparison.groups)
    if strips and "seeds" in titles:
        place = titles.index("seeds") + 2
        titles.insert(place, "each seed")
        for row, strip in zip(rows, strips, strict=True):
            row.insert(place, strip)
    return render_section(
        "Results", "", render_section_table(titles, rows), render_section_tag("p", comparison.footnote(), class_="hint")
    )


def render_costs_section(comparison: ComparisonTable) -> SectionHtml:
    """What the results took: rounds, bytes, time and clients that did not answer."""
    titles, rows = _coloured(comparison, "cost")
    if len(titles) < 2:
        return SectionHtml("")
    hint = "Of one run, mean over seeds."
    if any(group.accuracy and group.target for group in comparison.groups):
        hint += " Rounds: the median over seeds until that accuracy was first measured."
    return render_section("What it took", hint, render_section_table(titles, rows))


def _coloured(comparison: ComparisonTable, part: Part) -> tuple[list[str], list[list[str]]]:
    titles, rows = comparison.table(part)
    return titles, [[_colored_label(group), *row[1:]] for group, row in zip(comparison.groups, rows, strict=True)]


def _strips(groups: Sequence[GroupStatistics]) -> list[SectionHtml]:
    """Every seed's result on the scale of its task, the mean as a line; nothing if there is one number."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for group in groups:
        values[group.task, group.metric] += group.result.values if group.result else ()
    if max(map(len, values.values())) < 2:
        return []

    def strip(group: GroupStatistics) -> SectionHtml:
        if group.result is None:
            return SectionHtml("")
        scale = values[group.task, group.metric]
        low, wide = min(scale), (max(scale) - min(scale)) or 1.0
        *seeds, mean = (6 + 108 * (one - low) / wide for one in (*group.result.values, group.result.mean))
        marks = [f'<circle cx="{x:.1f}" cy="9" r="4" fill-opacity=".55"/>' for x in seeds]
        marks.append(f'<line x1="{mean:.1f}" x2="{mean:.1f}" y1="2" y2="16" stroke="var(--ink)"/>')
        axis = SectionHtml('<line x1="0" x2="120" y1="9" y2="9" stroke="var(--line)"/>')
        inner = render_section_tag("g", axis, SectionHtml("".join(marks)), fill=_hue(group))
        return render_section_tag("svg", inner, width="120", height="18", aria_hidden="true")

    return [strip(group) for group in groups]


def render_durations_section(groups: Sequence[GroupStatistics]) -> SectionHtml:
    """A bar for each group, as long as its mean time and split by what the time went into."""
    split = [_parts(group) for group in groups]
    longest = max((sum(parts.values()) for parts in split), default=0.0)
    if not longest:
        return SectionHtml("")
    names = [*PARTS, *dict.fromkeys(name for parts in split for name in parts if name not in PARTS)]
    names = [name for name in names if any(parts.get(name, 0) > 0 for parts in split)]
    bars = []
    for group, parts in zip(groups, split, strict=True):
        total = sum(parts.values())
        pieces = [
            render_section_tag(
                "span",
                style=f"width:{100 * parts[name] / longest:.3f}%;background:{_paint(name)}",
                title=f"{name}: {format_seconds(parts[name])}, {parts[name] / total:.1%}",
            )
            for name in names
            if parts.get(name, 0) > 0
        ]
        bar = render_section_tag("div", *pieces, class_="bar")
        bars.append(
            render_section_tag(
                "div",
                render_section_tag("b", group.label),
                bar,
                render_section_tag("i", format_seconds(total)),
                class_="row",
            )
        )
    everything = sum(sum(parts.values()) for parts in split)
    key = [
        render_section_tag(
            "li", render_section_tag("span", class_="swatch", style=f"background:{_paint(name)}"), f"{name} {share:.0%}"
        )
        for name in names
        if (share := sum(parts.get(name, 0) for parts in split) / everything) >= 0.005
    ]
    hint = "Mean over seeds, all rounds."
    return render_section("Where the time goes", hint, *bars, render_section_tag("ul", *key, class_="key"))


def _paint(name: str) -> str:
    order = ("#4c78a8", "#e0a458", "#b07aa1", "#5fa08a", "#c9675c", "#8f9fb5", "#9c8b73", "#8a8f98")
    return order[PARTS.index(name)] if name in PARTS else order[-1]


def _parts(group: GroupStatistics) -> dict[str, float]:
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


def render_failures_section(groups: Sequence[GroupStatistics]) -> SectionHtml:
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
        why = format_list([f"{reason} ({count})" for reason, count in reasons.most_common()]) or "not recorded"
        share = f"{group.lost / group.asked:.1%}" if group.asked else "–"
        rows.append([_colored_label(group), str(group.lost), str(group.asked), share, why])
    if not rows:
        return SectionHtml("")
    hint = "Answers that did not come, came too late, or were refused; over all seeds."
    table = render_section_table(["method", "lost", "asked", "share", "why"], rows, "text")
    return render_section("Clients lost", hint, table)


def render_settings_section(groups: Sequence[GroupStatistics]) -> SectionHtml:
    """What all runs share, said once; and a table of what they do not."""
    tables = [flatten_record_config(group.runs[0].config) for group in groups]
    odd = [key for key in find_record_differences(tables) if key != "method"]
    shared = {key: value for key, value in tables[0].items() if key not in odd}
    if len(groups) > 1:
        shared.pop("method", None)
    pairs = [
        render_section_tag("div", render_section_tag("dt", key), render_section_tag("dd", value))
        for key, value in shared.items()
    ]
    table: str = ""
    if odd:
        rows = [
            [_colored_label(group), *(table.get(key, "–") for key in odd)]
            for group, table in zip(groups, tables, strict=True)
        ]
        table = render_section_table(["method", *odd], rows, "text")
    hint = "Common to all runs" + (", then what differs." if odd else ".") if len(groups) > 1 else ""
    return render_section("Settings", hint, render_section_tag("dl", *pairs), table)


def render_initial_weights_section(groups: Sequence[GroupStatistics]) -> SectionHtml:
    """What was taken from the files that runs started from; each start once."""
    rows: dict[tuple[str, ...], None] = {}
    for run in (run for group in groups for run in group.members):
        if run.beginning is not None:
            lists = [run.beginning.get(key) for key in ("matched", "replaced", "missing", "unexpected")]
            taken, *others = (list(map(str, names)) if isinstance(names, list) else [] for names in lists)
            rows[
                (
                    format_value(run.beginning.get("file", "?")),
                    str(len(taken)),
                    *(format_list(one) or "none" for one in others),
                )
            ] = None
    if not rows:
        return SectionHtml("")
    titles = ["start", "tensors taken", "new classifier", "missing in the file", "unexpected in it"]
    return render_section("Starting models", "", render_section_table(titles, [list(row) for row in rows], "text"))


def render_runs_section(groups: Sequence[GroupStatistics]) -> SectionHtml:
    """Every run by itself: where it is, how far it came, what it left, and how to make it again."""
    rows: list[list[str]] = []
    commands: dict[str, None] = {}
    made: dict[str, None] = {}
    for group in groups:
        for run in group.members:
            state = "finished" if run.finished else "unfinished"
            state += "" if run in group.runs else ", not counted"
            digest = str((run.summary or {}).get("digest") or "–")
            short = render_section_tag("code", digest if len(digest) < 24 else digest[:23] + "…", title=digest)
            rows.append([_colored_label(group), run.seed, run.folder.name, str(run.last_round), state, short])
            if isinstance(run.config.get("command"), str):
                commands[run.config["command"]] = None
            versions = run.config.get("made_with")
            if isinstance(versions, dict):
                made[", ".join(f"{name} {format_value(version)}" for name, version in versions.items())] = None
    table = render_section_table(["method", "seed", "folder", "rounds", "state", "digest"], rows, "text")
    again: str = ""
    if commands:
        title = render_section_tag("h3", "To run it again" if len(commands) == 1 else "To run them again")
        again = join_section_html(title, render_section_tag("pre", render_section_tag("code", "\n".join(commands))))
    hint = f"Made with {'; '.join(made)}." if made else ""
    return render_section(format_plural(len(rows), "run").capitalize(), hint, table, again)


def render_effects_section(effects: GridEffects) -> SectionHtml:
    """The section."""
    what = "Final test accuracy in percent" if effects.metric == "accuracy" else "Final test loss"
    several = any(len(values) > 1 for values in effects.scores.values())
    hint = f"{what}{', mean ± standard deviation over seeds' if several else ''}."
    if any(effects.spread(cell) is None for cell in effects.grid.cells):
        hint += " Hatched: no result; point at it for the reason."
    content = [render_section_tag("p", effects.sentence, class_="lead")] if effects.sentence else []
    if effects.scores:
        label = "Heat maps; the table of results has the numbers."
        content.append(render_section_tag("div", id="grid", class_="maps", role="img", aria_label=label))
    else:
        hint = "No combination has a result."
    if effects.effects:
        content += [render_section_tag("h3", "What each part did"), render_section_table(*effects.effect_table())]
    if effects.pairs:
        content += [
            render_section_tag("h3", "Pairs of parts, the best first"),
            render_section_table(*effects.pair_table()),
        ]
    if effects.effects:
        content.append(render_section_tag("p", effects.footnote(), class_="hint"))
    if refused := effects.grid.refused:
        rows = [[name, reason] for name, reason in refused.items()]
        summary = render_section_tag("summary", f"{format_plural(len(rows), 'combination')} left out, and why")
        content.append(
            render_section_tag("details", summary, render_section_table(["combination", "why"], rows, "text"))
        )
    return render_section("Which part helped", hint, join_section_html(*content))


def render_partition_section(data: Data) -> SectionHtml:
    """The section with the circles; nothing if no partition is known."""
    if not data["partitions"]:
        return SectionHtml("")
    hint = "The area of a circle is the number of examples of a class that a client holds."
    cut = len(data["partitions"]) == MOST_PARTITIONS
    return render_section(
        "Who holds what",
        hint + (f" The first {MOST_PARTITIONS} partitions." if cut else ""),
        render_section_tag("div", _choice("choose-partition"), class_="choices"),
        render_section_tag("div", render_section_tag("div", id="partition"), class_="scroll", tabindex="0"),
        render_section_tag("p", id="partition-note", class_="hint"),
    )


def _choice(name: str) -> SectionHtml:
    return render_section_tag("div", id=name, class_="choice", role="group")
