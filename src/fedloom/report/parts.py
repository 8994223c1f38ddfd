"""The page's section about a grid: heat maps, what each part did, the best pairs, what was left out."""

from fedloom.report.effects import Effects
from fedloom.report.figures import Data
from fedloom.report.grid import Cell
from fedloom.report.markup import Safe, grid, join, tag
from fedloom.report.sections import section
from fedloom.report.words import plural


def heat_maps(effects: Effects) -> Data:
    """Server x local for each refiner, as the page draws it. Values are None where there is no result."""
    rows, columns, *more = effects.grid.factors
    sheets = more[0].levels if more else (None,)
    scale, digits = effects.scale

    def cell(*levels: str | None) -> Data:
        found = effects.grid.at([level for level in levels if level is not None])
        spread = effects.spread(found)
        return {
            "method": found.method,
            "value": None if spread is None else float(f"{scale * spread.mean:.6g}"),
            "text": "" if spread is None else spread.show(scale, min(digits, 2)),
            "hover": _hover(effects, found),
        }

    return {
        "rows": {"title": rows.name, "names": list(rows.levels)},
        "columns": {"title": columns.name, "names": list(columns.levels)},
        "better": "high" if effects.sign > 0 else "low",
        "maps": [
            {
                "title": f"{more[0].name}: {sheet}" if more else "",
                "cells": [[cell(row, column, sheet) for column in columns.levels] for row in rows.levels],
            }
            for sheet in sheets
        ],
    }


def _hover(effects: Effects, cell: Cell) -> str:
    """What is said of a cell under the pointer."""
    spread, (scale, digits) = effects.spread(cell), effects.scale
    if spread is None:
        return cell.refusal or "has no result yet"
    unit = " %" if effects.metric == "accuracy" else ""
    each = ", ".join(f"{scale * value:.{digits}f}" for value in spread.values)
    return f"{spread.show(scale, digits)}{unit}" + (f", over seeds: {each}" if len(spread.values) > 1 else "")


def parts(effects: Effects) -> Safe:
    """The section."""
    what = "Final test accuracy in percent" if effects.metric == "accuracy" else "Final test loss"
    several = any(len(values) > 1 for values in effects.scores.values())
    hint = f"{what}{', mean ± standard deviation over seeds' if several else ''}."
    if any(effects.spread(cell) is None for cell in effects.grid.cells):
        hint += " Hatched: no result; point at it for the reason."
    content = [tag("p", effects.sentence, class_="lead")] if effects.sentence else []
    if effects.scores:
        label = "Heat maps; the table of results has the numbers."
        content.append(tag("div", id="grid", class_="maps", role="img", aria_label=label))
    else:
        hint = "No combination has a result."
    if effects.effects:
        content += [tag("h3", "What each part did"), grid(*effects.effect_table())]
    if effects.pairs:
        content += [tag("h3", "Pairs of parts, the best first"), grid(*effects.pair_table())]
    if effects.effects:
        content.append(tag("p", effects.footnote(), class_="hint"))
    if refused := effects.grid.refused:
        rows = [[name, reason] for name, reason in refused.items()]
        summary = tag("summary", f"{plural(len(rows), 'combination')} left out, and why")
        content.append(tag("details", summary, grid(["combination", "why"], rows, "text")))
    return section("Which part helped", hint, join(*content))
