"""Make the tables of the league from its results."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks._pages import fill_blocks, markdown_table

Record = dict[str, Any]
Results = dict[str, Any]
Setting = tuple[str, str]

BASELINE = "fedavg"
LAST = 3
"""Number of last evaluations whose mean is the accuracy of a run."""
ENOUGH = 3
"""Number of seeds that a mark needs."""
SHARE = 0.8
"""Share of the baseline's accuracy that defines the speed of a method."""


def level(record: Record, what: str = "accuracy") -> float:
    """Return the mean of the last evaluations, in per cent."""
    return 100 * float(mean(record[what][-LAST:]))


def rounds_to(record: Record, target: float) -> int | None:
    """Return the first evaluated round with at least this accuracy, in per cent, or None."""
    pairs = zip(record["rounds"], record["accuracy"], strict=True)
    return next((played for played, accuracy in pairs if 100 * accuracy >= target), None)


class TableRow:
    """One method in one setting over its seeds, with the baseline's runs of the same seeds."""

    def __init__(self, name: str, records: list[Record], baseline: list[Record], seeds: int) -> None:
        self.name, self.seeds = name, seeds
        self.runs = sorted((each for each in records if "failure" not in each), key=lambda each: int(each["seed"]))
        self.failures = [each for each in records if "failure" in each]
        by_seed = {each["seed"]: each for each in baseline if "failure" not in each}
        self.pairs = [(run, by_seed[run["seed"]]) for run in self.runs if run["seed"] in by_seed]

    @property
    def accuracy(self) -> float:
        return mean(level(run) for run in self.runs)

    @property
    def gains(self) -> list[float]:
        """The difference to the baseline in points, for each seed: data, clients and batches are the same."""
        return [level(run) - level(other) for run, other in self.pairs]

    @property
    def mark(self) -> str:
        """▲ or ▼ if the mean gain over at least three seeds exceeds twice the standard deviation of the gains."""
        gains = self.gains
        if self.name == BASELINE or len(gains) < ENOUGH or abs(mean(gains)) <= 2 * stdev(gains):
            return ""
        return " ▲" if mean(gains) > 0 else " ▼"

    def speed(self) -> str:
        """Return the mean number of rounds until `SHARE` of the baseline's accuracy."""
        found = [rounds_to(run, SHARE * level(other)) for run, other in self.pairs]
        if not found:
            return "–"
        reached = [each for each in found if each is not None]
        if len(reached) == len(found):
            return f"{mean(reached):.0f}"
        return "never" if not reached else f"{mean(reached):.0f}, {len(reached)} of {len(found)} seeds"

    def personal(self) -> str:
        """Return the accuracies of personal models, if the method has them."""
        scores = [run["personal"] for run in self.runs if "personal" in run]
        return " / ".join(f"{100 * mean(each):.1f}" for each in zip(*scores, strict=True)) if scores else ""

    def cell(self) -> str:
        """Return the accuracy over seeds, and the number of seeds if some failed."""
        if not self.runs:
            return "failed"
        of = f" ({len(self.runs)} of {self.seeds} seeds)" if len(self.runs) < self.seeds else ""
        return spread([level(run) for run in self.runs]) + of

    def details(self) -> list[str]:
        """Return the cells of the table of one setting."""
        gains = self.gains
        against = "" if self.name == BASELINE or not gains else f"{mean(gains):+.1f}{self.mark}"
        return [
            self.name,
            self.cell(),
            against,
            f"{100 * mean(run['clients'] for run in self.runs):.1f}",
            f"{mean(level(run, 'worst') for run in self.runs):.1f}",
            self.personal(),
            self.speed(),
            f"{mean(run['bytes_down'] + run['bytes_up'] for run in self.runs) / 1e6:.0f}",
            f"{mean(run['seconds'] for run in self.runs):.1f}",
        ]


def spread(values: list[float]) -> str:
    """Return mean and standard deviation."""
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def rows_of(results: Results) -> dict[Setting, list[TableRow]]:
    """Return the rows by setting, in the order of the runs."""
    found: dict[Setting, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in results["runs"]:
        found[record["data"], record["partition"]][record["row"]].append(record)
    seeds = len({record["seed"] for record in results["runs"]})
    return {
        setting: [TableRow(name, records, methods.get(BASELINE, []), seeds) for name, records in methods.items()]
        for setting, methods in found.items()
    }


def choices(results: Results) -> str:
    """Return the source of the hyperparameters of each method."""
    return markdown_table(
        ["method", "hyperparameters"], [[name, source] for name, source in results["sources"].items()]
    )


def overview(results: Results) -> str:
    """Return the accuracy of every method in every setting, sorted by the mean gain over all settings."""
    rows = rows_of(results)
    cells: dict[str, dict[Setting, TableRow]] = defaultdict(dict)
    for setting, of_setting in rows.items():
        for row in of_setting:
            cells[row.name][setting] = row

    def gain(name: str) -> float:
        gains = [mean(row.gains) for row in cells[name].values() if row.gains]
        return mean(gains) if gains else float("-inf")

    body = []
    for name in sorted(cells, key=gain, reverse=True):
        found = [cells[name].get(setting) for setting in rows]
        shown = ["not run" if row is None else row.cell() + row.mark for row in found]
        body.append([name, *shown, "" if name == BASELINE or not gain(name) > float("-inf") else f"{gain(name):+.1f}"])
    heads = ["method", *(f"{data}, {partition}" for data, partition in rows), "mean gain"]
    missing = results["planned"] - len(results["runs"])
    missing_runs = f"{len(results['runs'])} runs; {missing} planned runs are missing.\n\n" if missing else ""
    return missing_runs + markdown_table(heads, body)


def marks(results: Results) -> str:
    """Return which methods have which marks, and in how many of the settings with enough seeds."""
    given: dict[str, list[str]] = defaultdict(list)
    for of_setting in rows_of(results).values():
        for row in of_setting:
            if row.name != BASELINE and len(row.gains) >= ENOUGH:
                given[row.name].append(row.mark.strip())

    def methods_with(mark: str) -> str:
        found = [(each.count(mark), len(each), name) for name, each in given.items() if mark in each]
        ordered = sorted(found, key=lambda one: (-one[0], one[2]))
        return ", ".join(f"{name} ({count} of {total})" for count, total, name in ordered) or "none"

    neither = sorted(name for name, each in given.items() if not any(each))
    ahead, behind = f"- ▲ **Ahead of FedAvg**: {methods_with('▲')}.\n", f"- ▼ **Behind FedAvg**: {methods_with('▼')}.\n"
    return ahead + behind + f"- **No mark**: {', '.join(neither) or 'none'}.\n"


def details(rows: list[TableRow]) -> str:
    """Return all figures of one setting, best first, and the failures with their reasons."""
    heads = ["method", "accuracy", "against fedavg", "mean client", "worst tenth", "personal models", "rounds to 80 %"]
    ran = sorted((row for row in rows if row.runs), key=lambda row: row.accuracy, reverse=True)
    text = markdown_table([*heads, "MB sent", "CPU s"], [row.details() for row in ran])
    failed = [(row.name, sum(run["failed"] for run in row.runs)) for row in ran]
    if any(count for _, count in failed):
        counts = ", ".join(f"{name} {count}" for name, count in failed if count)
        text += f"\nRejected client updates with numbers that are not finite: {counts}.\n"
    failures = [f"- {row.name}, seed {each['seed']}: {each['failure']}\n" for row in rows for each in row.failures]
    return text + ("\nFailed:\n\n" + "".join(failures) if failures else "")


def blocks(results: Results) -> Mapping[str, Callable[[], str]]:
    """Return every table by its name in the page."""
    made = {name: partial(make, results) for name, make in (("choices", choices), ("overview", overview))}
    made["verdicts"] = partial(marks, results)
    return made | {f"{data} {on}": partial(details, rows) for (data, on), rows in rows_of(results).items()}


def text(results: Results) -> str:
    """Return all tables."""
    return "\n".join(f"## {name}\n\n{make()}" for name, make in blocks(results).items())


def filled(page: str, results: Results) -> str:
    """Return the page with new tables from each `<!-- league: NAME -->` to `<!-- end -->`."""
    return fill_blocks(page, "league", blocks(results))


def write_into(page: Path, results: Results) -> None:
    """Write the tables into a page."""
    page.write_text(filled(page.read_text(encoding="utf-8"), results), encoding="utf-8")


def dump(results: Results) -> str:
    """Return the results as JSON with one run on a line."""
    head = json.dumps({key: value for key, value in results.items() if key != "runs"}, indent=1)
    runs = ",\n".join(f"  {json.dumps(each)}" for each in results["runs"])
    return f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n'
