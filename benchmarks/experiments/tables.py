"""Write tables of results.md, lss.md and dynafed.md from files in results/.

    python -m benchmarks result-tables

A table stands between `<!-- results: NAME -->` and `<!-- end -->`. Accuracies are in per cent. A window is the mean of
the evaluations in some rounds, computed for each seed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from benchmarks._common import make_parser
from benchmarks._pages import fill_blocks, markdown_table

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("results.md", "lss.md", "dynafed.md")
BEST = "the first member alone and longest, as in the authors' code"
FEDCDA_ROWS = {"fedavg": ", fedavg", "fedcda, `newest`": ", newest", "fedcda": ""}
"""What the name of FedCDA's experiment ends with, for each row."""


@cache
def read_results(file: str) -> dict[str, Any]:
    """Return the content of `results/FILE.json`."""
    found: dict[str, Any] = json.loads((ROOT / "results" / f"{file}.json").read_text(encoding="utf-8"))
    return found


class Curves(NamedTuple):
    """The accuracies of one method's runs, one list for each seed."""

    rounds: list[int]
    seeds: list[list[float]]

    def between(self, first: int, last: int) -> list[list[float]]:
        """Return the accuracies in rounds `first` to `last`."""
        if last > self.rounds[-1]:
            raise ValueError(f"The runs have {self.rounds[-1]} rounds, not {last}.")
        chosen = [index for index, played in enumerate(self.rounds) if first <= played <= last]
        return [[seed[index] for index in chosen] for seed in self.seeds]

    def window(self, first: int, last: int) -> list[float]:
        """Return the mean of each seed's evaluations in these rounds."""
        return [mean(values) for values in self.between(first, last)]

    def variation(self, first: int, last: int) -> list[float]:
        """Return the standard deviation of each seed's evaluations in these rounds."""
        return [stdev(values) for values in self.between(first, last)]

    def ten(self, last: int) -> tuple[int, int]:
        """Return the first and the last round of the ten evaluations that end at a round."""
        end = self.rounds.index(last)
        return self.rounds[end - 9], last


def curves(file: str, experiment: str, method: str) -> Curves:
    """Return the curves of a method in one experiment."""
    stored = read_results(file)[experiment]["methods"][method]
    rounds = [int(number) for number in stored["evaluated after the rounds"].split(",")]
    seeds = [[100 * float(value) for value in seed.split(",")] for seed in stored["accuracy of each seed"]]
    return Curves(rounds, seeds)


def average(values: Sequence[float]) -> str:
    """Return the mean over seeds."""
    return f"{mean(values):.1f} %"


def with_deviation(values: Sequence[float]) -> str:
    """Return mean and standard deviation over seeds."""
    return f"{mean(values):.1f} ± {stdev(values):.1f} %"


def each(values: Sequence[float], unit: str = "%") -> str:
    """Return the value of each seed."""
    return f"{', '.join(f'{value:.1f}' for value in values)} {unit}"


def worst(file: str, experiment: str, method: str, digits: int = 0) -> float:
    """Return the stored accuracy of the worst tenth of the clients after the last round."""
    stored = read_results(file)[experiment]["methods"][method]["worst tenth of clients at the end"]
    return round(100 * float(stored["mean"]), digits)


def digits_table() -> str:
    """Return the table of the digits, whose file has no curves."""
    rows = []
    for name in ("fedavg", "indep", "fedcross", "fedmr", "fedcda"):
        stored = read_results("digits")["methods"][name]
        end, tail = stored["final accuracy"], stored["mean of the last ten evaluations"]
        deviation = 100 * stored["standard deviation within the last ten"]
        rows.append(
            [
                name,
                f"{100 * end['mean']:.1f} ± {100 * end['standard deviation']:.1f} %",
                f"{100 * tail['mean']:.1f} %",
                f"{deviation:.1f} points",
            ]
        )
    return markdown_table(["method", "accuracy at the end", "mean of the last 10 rounds", "variation"], rows)


def levels(file: str, experiment: str, last: int, papers: Mapping[str, str]) -> str:
    """Return the accuracy over the last ten evaluations of all methods, and the papers' numbers if there are any."""
    heads = ["method", "mean of the last 10 evaluations", "each seed", "variation", "worst tenth of clients"]
    rows = []
    for name in ("fedavg", "fedcross", "fedmr", "fedcda"):
        if name not in read_results(file)[experiment]["methods"]:
            continue
        found = curves(file, experiment, name)
        tail = found.ten(last)
        row = [name, average(found.window(*tail)), each(found.window(*tail))]
        row += [f"{mean(found.variation(*tail)):.1f} points", f"{worst(file, experiment, name):.0f} %"]
        rows.append(row + ([papers[name]] if papers else []))
    return markdown_table(heads + (["the papers"] if papers else []), rows)


def by_round(file: str, experiment: str, rounds: Sequence[int]) -> str:
    """Return the mean of the ten evaluations that end at each of some rounds."""
    stored = read_results(file)[experiment]["methods"]
    found = {
        name: curves(file, experiment, name) for name in ("fedavg", "fedcross", "fedmr", "fedcda") if name in stored
    }
    rows = [[str(last), *(average(one.window(*one.ten(last))) for one in found.values())] for last in rounds]
    return markdown_table(["round", *found], rows)


def fedcda_cifar(name: str) -> Curves:
    """Return both seeds of one of FedCDA's experiments on CIFAR-10, which are stored as two."""
    parts = [curves("fedcda", f"cifar10-fedcda{FEDCDA_ROWS[name]}{seed}", "fedcda") for seed in ("", ", seed 1")]
    return Curves(parts[0].rounds, [*parts[0].seeds, *parts[1].seeds])


def fedcda_levels(papers: Mapping[str, str]) -> str:
    """Return FedCDA's last ten rounds on CIFAR-10."""
    rows = []
    for name, ending in FEDCDA_ROWS.items():
        found = fedcda_cifar(name)
        low = [worst("fedcda", f"cifar10-fedcda{ending}{seed}", "fedcda") for seed in ("", ", seed 1")]
        values, deviations = found.window(91, 100), found.variation(91, 100)
        poor = f"{', '.join(f'{value:.0f}' for value in low)} %"
        rows.append([name, each(values), each(deviations, "points"), poor, papers.get(name, "")])
    heads = ["method", "mean of rounds 91 to 100", "variation", "worst tenth of clients", "the paper, after 200 rounds"]
    return markdown_table(heads, rows)


def fedcda_rounds() -> str:
    """Return FedCDA on CIFAR-10 in steps of ten rounds."""
    rows = []
    for first in range(51, 100, 10):
        rows.append([f"{first} to {first + 9}", *(each(fedcda_cifar(n).window(first, first + 9)) for n in FEDCDA_ROWS)])
    return markdown_table(["rounds", *FEDCDA_ROWS], rows)


def fedcda_fashion(first: int, last: int, papers: Mapping[str, str]) -> str:
    """Return FedCDA on Fashion-MNIST in rounds that all runs have."""
    rows = []
    for name, ending in FEDCDA_ROWS.items():
        found = curves("fedcda", f"fashion-fedcda{ending}", "fedcda")
        values, deviations = found.window(first, last), found.variation(first, last)
        rows.append([name, with_deviation(values), each(values), each(deviations, "points"), papers.get(name, "")])
    heads = ["method", f"mean of rounds {first} to {last}", "each seed", "variation", "the paper, after 200 rounds"]
    return markdown_table(heads, rows)


def lss_cifar(papers: Mapping[str, str]) -> str:
    """Return LSS from CIFAR-100 to CIFAR-10."""
    variants = {
        **{name: ("cifar10-lss", name) for name in ("fedavg", "swa", "swad")},
        "lss, the paper's Algorithm 1 (default)": ("cifar10-lss", "lss"),
        "lss, `include_init=false`": ("cifar10-lss, without the received model", "lss"),
        "lss, as in the authors' code": (f"cifar10-lss, {BEST}", "lss"),
    }
    rows = []
    for name, (experiment, method) in variants.items():
        found = curves("lss", experiment, method)
        one, two, three = (found.window(number, number) for number in (1, 2, 3))
        row = [name, f"{average(one)} ({each(one, '').strip()})", average(two)]
        row += [f"{average(three)} ({each(three, '').strip()})", f"{worst('lss', experiment, method):.0f} %"]
        rows.append([*row, papers.get(name, "")])
    heads = ["method", "after round 1 (each seed)", "round 2", "round 3", "worst tenth of clients"]
    return markdown_table([*heads, "the paper (from ImageNet), rounds 1 and 3"], rows)


LSS_FASHION = {
    **{name: ("fashion-lss", name) for name in ("fedavg", "swa", "swad", "soups", "diwa")},
    "lss, the paper's Algorithm 1 (default)": ("fashion-lss", "lss"),
    "lss, `affinity=0`, `diversity=0`": ("fashion-lss, no pull and push", "lss"),
    "lss, `include_init=false`": ("fashion-lss, without the received model", "lss"),
    "lss, as in the authors' code: `include_init=false`, first member 5 epochs alone, others 1": (
        f"fashion-lss, {BEST}", "lss",
    ),
    "lss, 8 epochs for each member: four times the work": (
        "fashion-lss, eight epochs for each member, as in the paper", "lss",
    ),
    "fedavg, 32 epochs: as much work": ("fashion-lss, as many epochs for FedAvg", "fedavg"),
}  # fmt: skip
"""Experiment and method of each row."""


def lss_fashion() -> str:
    """Return LSS from MNIST to Fashion-MNIST."""
    rows = []
    for name, (experiment, method) in LSS_FASHION.items():
        found = curves("lss", experiment, method)
        rows.append([name, *(with_deviation(found.window(number, number)) for number in (1, 2, 3))])
    return markdown_table(["method", "after round 1", "after round 2", "after round 3"], rows)


def dynafed_cifar(experiment: str, papers: Mapping[str, str]) -> str:
    """Return DynaFed on CIFAR-10, and the paper's numbers if there are any."""
    names = ("fedavg", "dynafed")
    found = {name: curves("dynafed", experiment, name) for name in names}

    def cell(name: str, first: int, last: int, show: Callable[[Sequence[float]], str] = average) -> str:
        return show(found[name].window(first, last)) if last <= found[name].rounds[-1] else "not run"

    rows = [
        [f"{last - 9} to {last}", *(cell(n, last - 9, last) for n in names)] for last in (20, 30, 40, 60, 100, 140, 200)
    ]
    if papers:
        rows.append(["196 to 200, mean and each seed", *(cell(n, 196, 200, _mean_and_each) for n in names)])
        rows.append(["196 to 200, the paper", *(papers[name] for name in names)])
    return markdown_table(["rounds", *names], rows)


def _mean_and_each(values: Sequence[float]) -> str:
    return f"{average(values)} ({each(values, '').strip()})"


def dynafed_fashion(papers: Sequence[str]) -> str:
    """Return DynaFed on Fashion-MNIST, evaluated every second round."""
    pairs = [(alpha, name) for alpha in ("0.01", "0.04") for name in ("fedavg", "dynafed")]
    found = [curves("dynafed", f"fashion-dynafed, alpha {alpha}", name) for alpha, name in pairs]

    def cell(one: Curves, first: int, last: int) -> str:
        return with_deviation(one.window(first, last)) if last <= one.rounds[-1] else "not run"

    rows = [
        [f"{last - 18} to {last}", *(cell(one, last - 18, last) for one in found)]
        for last in (20, 40, 44, 60, 80, 100, 140, 200)
    ]
    rows.append(["196 to 200", *(cell(one, 196, 200) for one in found)])
    rows.append(["196 to 200, the paper", *papers])
    return markdown_table(["rounds", *(f"alpha {alpha}: {name}" for alpha, name in pairs)], rows)


LENET_ROUNDS = (100, 200, 300, 400, 500, 700, 1000, 1300, 1600, 2000)
TABLES: dict[str, Callable[[], str]] = {
    "digits": digits_table,
    "cifar10-lenet": partial(
        levels, "cifar10", "cifar10-lenet", 2000,
        {"fedavg": "46.1 % (FedCross's), 50.7 % (FedMR's)", "fedcross": "55.7 %", "fedmr": "54.6 %"},
    ),
    "cifar10-lenet by round": partial(by_round, "cifar10", "cifar10-lenet", LENET_ROUNDS),
    "cifar10-cnn": partial(levels, "cifar10", "cifar10-cnn", 2000, {}),
    "cifar10-cnn by round": partial(by_round, "cifar10", "cifar10-cnn", LENET_ROUNDS),
    "cifar10-fedcda": partial(
        fedcda_levels, {"fedavg": "50.4 %, 1.7 points", "fedcda": "62.5 %, 0.2 points"}
    ),
    "cifar10-fedcda by round": fedcda_rounds,
    "fashion-fedcda": partial(
        fedcda_fashion, 118, 127, {"fedavg": "71.8 %, 5.6 points", "fedcda": "78.6 %, 0.1 points"}
    ),
    "cifar10-lss": partial(
        lss_cifar,
        {
            "fedavg": "58.3, 66.7 %", "swa": "59.1, 67.5 %", "swad": "60.5, 67.7 %",
            "lss, the paper's Algorithm 1 (default)": "66.0, 75.2 %",
        },
    ),
    "fashion-lss": lss_fashion,
    "fashion-lenet": partial(levels, "fashion-lenet-long", "fashion-lenet", 1000, {}),
    "fashion-lenet by round": partial(by_round, "fashion-lenet-long", "fashion-lenet", range(100, 1001, 100)),
    "cifar10-dynafed": partial(dynafed_cifar, "cifar10-dynafed", {"fedavg": "39.3 %", "dynafed": "65.5 %"}),
    "cifar10-dynafed, moments kept": partial(dynafed_cifar, "cifar10-dynafed, moments kept", {}),
    "fashion-dynafed": partial(dynafed_fashion, ["74.5 %", "87.5 %", "81.7 %", "89.5 %"]),
}  # fmt: skip
"""The table of each name. Numbers of the papers are written here, all others come from results/."""


def filled(page: str) -> str:
    """Return the page with new tables."""
    return fill_blocks(page, "results", TABLES)


def main(arguments: Sequence[str]) -> None:
    make_parser("result-tables", __doc__).parse_args(arguments)
    for name in PAGES:
        page = ROOT / "docs" / name
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
