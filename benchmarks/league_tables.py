"""The tables of the league (league.py), from its results alone."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Record = dict[str, Any]
Results = dict[str, Any]
Setting = tuple[str, str]

BASELINE = "fedavg"
LAST = 3
"""Evaluations at the end of a run whose mean is its accuracy."""
ENOUGH = 3
"""Seeds without which nothing is marked."""
SHARE = 0.8
"""Of the baseline's accuracy: how soon others reach it is told."""


def level(record: Record, what: str = "accuracy") -> float:
    """The mean of the last evaluations, in per cent."""
    return 100 * float(mean(record[what][-LAST:]))


def rounds_to(record: Record, target: float) -> int | None:
    """The first evaluated round with at least this accuracy, in per cent; None if there is none."""
    pairs = zip(record["rounds"], record["accuracy"], strict=True)
    return next((played for played, accuracy in pairs if 100 * accuracy >= target), None)


class Line:
    """One method in one setting, over its seeds, and the baseline's runs with the same seeds."""

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
        """By how many points it is ahead of the baseline, seed by seed: data, clients and batches are the same."""
        return [level(run) - level(other) for run, other in self.pairs]

    @property
    def verdict(self) -> str:
        """▲ or ▼ where the mean gain of three seeds or more is above twice the standard deviation of the gains."""
        gains = self.gains
        if self.name == BASELINE or len(gains) < ENOUGH or abs(mean(gains)) <= 2 * stdev(gains):
            return ""
        return " ▲" if mean(gains) > 0 else " ▼"

    def speed(self) -> str:
        """Rounds until a share of the baseline's accuracy, mean over seeds; the last round stands for 'not at all'."""
        found = [rounds_to(run, SHARE * level(other)) for run, other in self.pairs]
        if not found:
            return "–"
        reached = [each for each in found if each is not None]
        if len(reached) == len(found):
            return f"{mean(reached):.0f}"
        return "never" if not reached else f"{mean(reached):.0f}, {len(reached)} of {len(found)} seeds"

    def own(self) -> str:
        """Accuracies of the clients' own models, where the method is personalised."""
        scores = [run["personal"] for run in self.runs if "personal" in run]
        return " / ".join(f"{100 * mean(each):.1f}" for each in zip(*scores, strict=True)) if scores else ""

    def cell(self) -> str:
        """Accuracy over seeds, and of how many it is where it is not of all."""
        if not self.runs:
            return "failed"
        of = f" ({len(self.runs)} of {self.seeds} seeds)" if len(self.runs) < self.seeds else ""
        return spread([level(run) for run in self.runs]) + of

    def details(self) -> list[str]:
        gains = self.gains
        against = "" if self.name == BASELINE or not gains else f"{mean(gains):+.1f}{self.verdict}"
        return [
            self.name,
            self.cell(),
            against,
            f"{100 * mean(run['clients'] for run in self.runs):.1f}",
            f"{mean(level(run, 'worst') for run in self.runs):.1f}",
            self.own(),
            self.speed(),
            f"{mean(run['bytes_down'] + run['bytes_up'] for run in self.runs) / 1e6:.0f}",
            f"{mean(run['seconds'] for run in self.runs):.1f}",
        ]


def spread(values: list[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def lines_of(results: Results) -> dict[Setting, list[Line]]:
    """By setting, in the order of the runs."""
    found: dict[Setting, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in results["runs"]:
        found[record["data"], record["partition"]][record["row"]].append(record)
    seeds = len({record["seed"] for record in results["runs"]})
    return {
        setting: [Line(name, records, rows.get(BASELINE, []), seeds) for name, records in rows.items()]
        for setting, rows in found.items()
    }


def table(heads: list[str], rows: list[list[str]]) -> str:
    bars = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in bars)


def choices(results: Results) -> str:
    """Where each line's hyper-parameters are from."""
    return table(["line", "hyper-parameters"], [[name, source] for name, source in results["sources"].items()])


def overview(results: Results) -> str:
    """Accuracy of every line in every setting, best first by the mean gain over all settings."""
    lines = lines_of(results)
    cells: dict[str, dict[Setting, Line]] = defaultdict(dict)
    for setting, those in lines.items():
        for line in those:
            cells[line.name][setting] = line

    def gain(name: str) -> float:
        gains = [mean(line.gains) for line in cells[name].values() if line.gains]
        return mean(gains) if gains else float("-inf")

    body = []
    for name in sorted(cells, key=gain, reverse=True):
        found = [cells[name].get(setting) for setting in lines]
        shown = ["not run" if line is None else line.cell() + line.verdict for line in found]
        body.append([name, *shown, "" if name == BASELINE or not gain(name) > float("-inf") else f"{gain(name):+.1f}"])
    heads = ["line", *(f"{data}, {partition}" for data, partition in lines), "mean gain"]
    missing = results["planned"] - len(results["runs"])
    said = f"{len(results['runs'])} runs; {missing} of the plan are still to be made.\n\n" if missing else ""
    return said + table(heads, body)


def verdicts(results: Results) -> str:
    """Which lines got which marks, and in how many of the settings in which there are seeds enough."""
    marks: dict[str, list[str]] = defaultdict(list)
    for those in lines_of(results).values():
        for line in those:
            if line.name != BASELINE and len(line.gains) >= ENOUGH:
                marks[line.name].append(line.verdict.strip())

    def told(mark: str) -> str:
        found = [(each.count(mark), len(each), name) for name, each in marks.items() if mark in each]
        ordered = sorted(found, key=lambda one: (-one[0], one[2]))
        return ", ".join(f"{name} ({count} of {total})" for count, total, name in ordered) or "none"

    neither = sorted(name for name, each in marks.items() if not any(each))
    ahead, behind = f"- ▲ **Ahead of FedAvg**: {told('▲')}.\n", f"- ▼ **Behind it**: {told('▼')}.\n"
    return ahead + behind + f"- **No mark**: {', '.join(neither) or 'none'}.\n"


def details(those: list[Line]) -> str:
    """All that was measured in one setting, best first; then the failures with their reasons."""
    heads = ["line", "accuracy", "against fedavg", "mean client", "worst tenth", "own models", "rounds to 80 %"]
    ran = sorted((line for line in those if line.runs), key=lambda line: line.accuracy, reverse=True)
    text = table([*heads, "MB sent", "CPU s"], [line.details() for line in ran])
    lost = [f"{line.name} {sum(run['lost'] for run in line.runs)}" for line in ran if any(r["lost"] for r in line.runs)]
    if lost:
        text += f"\nAnswers of clients that were refused, because they were not finite: {', '.join(lost)}.\n"
    failures = [f"- {line.name}, seed {each['seed']}: {each['failure']}\n" for line in those for each in line.failures]
    return text + ("\nFailed:\n\n" + "".join(failures) if failures else "")


def blocks(results: Results) -> Mapping[str, Callable[[], str]]:
    """Every table by the name under which a page calls for it."""
    made = {name: partial(make, results) for name, make in (("choices", choices), ("overview", overview))}
    made["verdicts"] = partial(verdicts, results)
    return made | {f"{data} {on}": partial(details, those) for (data, on), those in lines_of(results).items()}


def text(results: Results) -> str:
    """All tables, one below the other."""
    return "\n".join(f"## {name}\n\n{make()}" for name, make in blocks(results).items())


def filled(page: str, results: Results) -> str:
    """The page with every block `<!-- league: NAME -->` to `<!-- end -->` made anew."""
    made = blocks(results)

    def fill(found: re.Match[str]) -> str:
        table = made[found[1]]() if found[1] in made else "Not run yet.\n"
        return f"<!-- league: {found[1]} -->\n\n{table}\n<!-- end -->"

    return re.sub(r"<!-- league: (.+?) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


def into(page: Path, results: Results) -> None:
    """Put the tables into a page."""
    page.write_text(filled(page.read_text(encoding="utf-8"), results), encoding="utf-8")


def dump(results: Results) -> str:
    """The results as JSON, one run on a line."""
    head = json.dumps({key: value for key, value in results.items() if key != "runs"}, indent=1)
    runs = ",\n".join(f"  {json.dumps(each)}" for each in results["runs"])
    return f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n'
