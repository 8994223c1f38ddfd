"""HTML sections of a report. All text is escaped unless it is `SectionHtml`."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import PurePath

from fedloom.report.comparison_record import render_comparison_command
from fedloom.report.comparison_table import ComparisonTable, Part
from fedloom.report.effects import GridEffects
from fedloom.report.figures import MOST_DIAGNOSTICS, MOST_PARTITIONS, Data
from fedloom.report.markup import (
    SectionHtml,
    group_hue,
    join_section_html,
    render_colored_label,
    render_section,
    render_section_table,
    render_section_tag,
)
from fedloom.report.protocol import protocol_rows
from fedloom.report.records import find_record_differences, flatten_record_config
from fedloom.report.statistics import GroupStatistics
from fedloom.utils.formatting import format_list, format_plural, format_seconds, format_value

PARTS = ("train", "evaluate", "refine", "aggregate", "dispatch", "sample_clients", "checkpoint")
"""The phases of a round, largest first. The colors follow this order."""


def render_results_section(comparison: ComparisonTable) -> SectionHtml:
    """Return the result table, with a strip of one dot for each seed."""
    titles, rows = _colored(comparison, "result")
    strips = _strips(comparison.groups)
    if strips and "seeds" in titles:
        place = titles.index("seeds") + 2
        titles.insert(place, "each seed")
        for row, strip in zip(rows, strips, strict=True):
            row.insert(place, strip)
    return render_section(
        "Results", "", render_section_table(titles, rows), render_section_tag("p", comparison.footnote(), class_="hint")
    )


def render_protocol_section(groups: Sequence[GroupStatistics]) -> SectionHtml:
    """Return what the results mean: model, test data, rounds and selection."""
    entries = [
        render_section_tag("div", render_section_tag("dt", title), render_section_tag("dd", text))
        for title, text in protocol_rows(groups)
    ]
    hint = "What the results above mean. Copy it together with a number."
    return render_section("Protocol", hint, render_section_tag("dl", *entries, class_="protocol"))


def render_curves_section(figure_data: Data) -> SectionHtml:
    """Return the section that the script fills with learning curves; empty without evaluations."""
    if not figure_data["curves"]:
        return SectionHtml("")
    several = any(seeds > 1 for axis in figure_data["axes"] for seeds in axis["seeds"])
    hint = "Line: mean over seeds. Band: lowest to highest seed." if several else "One seed, so there is no band."
    return render_section(
        "Learning curves",
        hint,
        render_section_tag("div", *(_choice(f"choose-{what}") for what in ("y", "x", "task")), class_="choices"),
        render_section_tag("div", id="legend", class_="legend"),
        render_section_tag(
            "div", id="curves", role="img", aria_label="Learning curves; the table above has the numbers."
        ),
    )


def render_costs_section(comparison: ComparisonTable) -> SectionHtml:
    """Return the table of costs: rounds, bytes, time and failed clients."""
    titles, rows = _colored(comparison, "cost")
    if len(titles) < 2:
        return SectionHtml("")
    hint = "Cost of one run, mean over seeds."
    if any(group.accuracy and group.target for group in comparison.groups):
        hint += " Rounds: median over seeds of the first round with that accuracy."
    return render_section("Cost", hint, render_section_table(titles, rows))


def _colored(comparison: ComparisonTable, part: Part) -> tuple[list[str], list[list[str]]]:
    titles, rows = comparison.table(part)
    return titles, [[render_colored_label(group), *row[1:]] for group, row in zip(comparison.groups, rows, strict=True)]


def _strips(groups: Sequence[GroupStatistics]) -> list[SectionHtml]:
    """Return a strip for each group: seeds as dots, the mean as a line, one scale per task; empty for one number."""
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
        *seeds, mean = (5 + 74 * (one - low) / wide for one in (*group.result.values, group.result.mean))
        marks = [f'<circle cx="{x:.1f}" cy="9" r="4" fill-opacity=".55"/>' for x in seeds]
        marks.append(f'<line x1="{mean:.1f}" x2="{mean:.1f}" y1="2" y2="16" stroke="var(--ink)"/>')
        axis = SectionHtml('<line x1="0" x2="84" y1="9" y2="9" stroke="var(--line)"/>')
        inner = render_section_tag("g", axis, SectionHtml("".join(marks)), fill=group_hue(group))
        return render_section_tag("svg", inner, width="84", height="18", aria_hidden="true")

    return [strip(group) for group in groups]


def render_durations_section(groups: Sequence[GroupStatistics]) -> SectionHtml:
    """Return a bar for each group: its mean time, split by phase."""
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
    hint = "Sum over all rounds, mean over seeds."
    return render_section("Time by phase", hint, *bars, render_section_tag("ul", *key, class_="key"))


def _paint(name: str) -> str:
    order = ("#4c78a8", "#e0a458", "#b07aa1", "#5fa08a", "#c9675c", "#8f9fb5", "#9c8b73", "#8a8f98")
    return order[PARTS.index(name)] if name in PARTS else order[-1]


def _parts(group: GroupStatistics) -> dict[str, float]:
    """Return seconds by phase, mean over seeds; `other` is the rest."""
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
    """Return the table of failed clients and rejected updates, with the reasons."""
    rows = []
    for group in groups:
        if not group.failed:
            continue
        reasons: Counter[str] = Counter()
        for run in group.runs:
            for row in run.history:
                told = row.get("failed_clients")
                reasons.update(str(reason) for reason in (told.values() if isinstance(told, dict) else ()))
        why = format_list([f"{reason} ({count})" for reason, count in reasons.most_common()]) or "not recorded"
        share = f"{group.failed / group.asked:.1%}" if group.asked else "–"
        rows.append([render_colored_label(group), str(group.failed), str(group.asked), share, why])
    if not rows:
        return SectionHtml("")
    hint = "Client updates that did not arrive, arrived too late or were rejected; sum over all seeds."
    table = render_section_table(["method", "failed", "tasks", "share", "reasons"], rows, "text")
    return render_section("Failed clients", hint, table)


MAIN = ("method", "data", "partition", "clients", "clients_per_round", "model", "rounds", "epochs", "batch_size", "lr")
"""Settings that a reader looks for, shown even if they are defaults."""


def render_settings_section(groups: Sequence[GroupStatistics]) -> SectionHtml:
    """Return the settings that all runs share, and a table of those that differ. Defaults are folded away."""
    tables = [flatten_record_config(group.runs[0].config) for group in groups]
    odd = [key for key in find_record_differences(tables) if key != "method"]
    shared = {key: value for key, value in tables[0].items() if key not in odd}
    if len(groups) > 1:
        shared.pop("method", None)
    commands = [group.runs[0].config.get("command") for group in groups]
    given = {key for command in commands if isinstance(command, str) for key in _given_settings(command)}
    rest = {key: value for key, value in shared.items() if key not in MAIN and key not in given}
    known = all(isinstance(command, str) for command in commands)  # else Python objects were given
    title = f"{format_plural(len(rest), 'setting')} at default" if known else format_plural(len(rest), "more setting")
    table: str = ""
    if odd:
        parts = {part for group in groups for part in group.runs[0].method.split("+")}
        options = [key for key in odd if key.partition(".")[0] in parts]
        others = [key for key in odd if key not in options]
        rows = [
            [render_colored_label(group), *(table.get(key, "–") for key in others)]
            + ([", ".join(f"{key} {table[key]}" for key in options if key in table) or "–"] if options else [])
            for group, table in zip(groups, tables, strict=True)
        ]
        titles = ["method", *others, *(["options"] if options else [])]
        table = render_section_table(titles, rows, "text wrap")
    folded = render_section_tag("details", render_section_tag("summary", title), _render_pairs(rest)) if rest else ""
    hint = "Settings of all runs" + (", then those that differ." if odd else ".") if len(groups) > 1 else ""
    shown = {key: value for key, value in shared.items() if key not in rest}
    return render_section("Settings", hint, _render_pairs(shown), table, folded)


def _render_pairs(settings: dict[str, str]) -> SectionHtml:
    pairs = [
        render_section_tag("div", render_section_tag("dt", key), render_section_tag("dd", value))
        for key, value in settings.items()
    ]
    return render_section_tag("dl", *pairs)


def _given_settings(command: str) -> set[str]:
    """Return the settings in the command of a run. It holds each one that is not a default."""
    flags = {name.replace("-", "_") for name in re.findall(r"(?<!\S)--([a-z][a-z0-9-]*)", command)}
    options = set(re.findall(r"--set '?([\w.-]+)=", command))
    return flags | {flag.removeprefix("no_") for flag in flags} | options


def render_initial_weights_section(groups: Sequence[GroupStatistics]) -> SectionHtml:
    """Return what the runs loaded from files with initial weights, each file once."""
    rows: dict[tuple[str, ...], None] = {}
    for run in (run for group in groups for run in group.records):
        if run.initial_weights is not None:
            lists = [run.initial_weights.get(key) for key in ("matched", "replaced", "missing", "unexpected")]
            taken, *others = (list(map(str, names)) if isinstance(names, list) else [] for names in lists)
            rows[
                (
                    PurePath(format_value(run.initial_weights.get("file", "?"))).name,
                    str(len(taken)),
                    *(format_list(one) or "none" for one in others),
                )
            ] = None
    if not rows:
        return SectionHtml("")
    titles = ["file", "loaded tensors", "new classifier", "missing in the file", "unexpected in the file"]
    return render_section("Initial weights", "", render_section_table(titles, [list(row) for row in rows], "text"))


def render_runs_section(groups: Sequence[GroupStatistics]) -> SectionHtml:
    """Return the table of runs, with the commands that repeat them."""
    rows: list[list[str]] = []
    commands: dict[str, None] = {}
    made: dict[str, None] = {}
    for group in groups:
        if isinstance(first := group.records[0].config.get("command"), str):
            commands[first] = None
        for run in group.records:
            state = "finished" if run.finished else "unfinished"
            state += "" if run in group.runs else ", not counted"
            digest = str((run.summary or {}).get("digest") or "–")
            short = render_section_tag("code", digest if len(digest) < 24 else digest[:23] + "…", title=digest)
            rows.append([render_colored_label(group), run.seed, run.folder.name, str(run.last_round), state, short])
            versions = run.config.get("versions")
            if isinstance(versions, dict):
                made[", ".join(f"{name} {format_value(version)}" for name, version in versions.items())] = None
    table = render_section_table(["method", "seed", "folder", "rounds", "state", "digest"], rows, "text")
    again: str = ""
    if commands:
        title = format_plural(len(commands), "command") + " to repeat single runs, with the first seed"
        again = render_section_tag(
            "details", render_section_tag("summary", title), render_comparison_command(list(commands))
        )
    hint = f"Versions: {'; '.join(made)}." if made else ""
    return render_section(format_plural(len(rows), "run").capitalize(), hint, table, again)


def render_effects_section(effects: GridEffects, basis: str) -> SectionHtml:
    """Return the section of a grid: heat maps, effects, pairs and refused combinations.

    `basis` says what a result is the mean of.
    """
    what = "Test accuracy in percent" if effects.metric == "accuracy" else "Test loss"
    several = any(len(values) > 1 for values in effects.scores.values())
    hint = f"{what}: {basis}{', ± standard deviation over seeds' if several else ''}."
    if any(effects.spread(cell) is None for cell in effects.grid.cells):
        hint += " Hatched cells have no result; their tooltips give the reason."
    content = [render_section_tag("p", effects.sentence, class_="lead")] if effects.sentence else []
    if effects.scores:
        label = "Heat maps; the result table has the numbers."
        content.append(render_section_tag("div", id="grid", class_="maps", role="group", aria_label=label))
    else:
        hint = "No combination has a result."
    if effects.effects:
        content += [render_section_tag("h3", "Effect of each part"), render_section_table(*effects.effect_table())]
    if effects.pairs:
        content += [
            render_section_tag("h3", "Pairs of parts, best first"),
            render_section_table(*effects.pair_table()),
        ]
    if effects.effects:
        content.append(render_section_tag("p", effects.footnote(), class_="hint"))
    if refused := effects.grid.refused:
        rows = [[name, reason] for name, reason in refused.items()]
        summary = render_section_tag("summary", f"{format_plural(len(rows), 'combination')} left out, with reasons")
        content.append(
            render_section_tag("details", summary, render_section_table(["combination", "reason"], rows, "text"))
        )
    return render_section("Effects in the grid", hint, join_section_html(*content))


def render_partition_section(figure_data: Data) -> SectionHtml:
    """Return the section that the script fills with a partition; empty if none is known."""
    if not figure_data["partitions"]:
        return SectionHtml("")
    hint = "The area of a circle is the number of samples that a client has of a class."
    cut = len(figure_data["partitions"]) == MOST_PARTITIONS
    return render_section(
        "Samples by client and class",
        hint + (f" Only the first {MOST_PARTITIONS} partitions are shown." if cut else ""),
        render_section_tag("div", _choice("choose-partition"), class_="choices"),
        render_section_tag("div", render_section_tag("div", id="partition"), class_="scroll", tabindex="0"),
        render_section_tag("p", id="partition-note", class_="hint"),
    )


def render_diagnostics_section(figure_data: Data) -> SectionHtml:
    """Return the section that the script fills with diagnostics; empty if there are none."""
    if not figure_data["diagnostics"]:
        return SectionHtml("")
    cut = len(figure_data["diagnostics"]) == MOST_DIAGNOSTICS
    hint = "By round, mean over seeds." + (f" Only the first {MOST_DIAGNOSTICS} are shown." if cut else "")
    return render_section("Diagnostics", hint, render_section_tag("div", id="diagnostics", class_="smalls"))


def _choice(name: str) -> SectionHtml:
    return render_section_tag("div", id=name, class_="choice", role="group")
