"""The tables that README and docs show of `results/peers.json`."""

import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks._pages import fill_blocks, markdown_table
from benchmarks.peers.contestant import CONTESTANTS
from benchmarks.peers.summary import BASE, Results

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "engines.md")
PEERS_ON_GPU = ("plain PyTorch loop", "pfl-research")


def cpu_table(results: Results) -> str:
    """Return every contestant on the CPU with its seconds and its ratio to fedloom."""
    rows = []
    for name, one in results["summary"].items():
        label = CONTESTANTS[name].label + _version(results, name)
        if "versions" not in one:
            rows.append([label, f"did not run: {one['failures'][0]}", "", "", "", ""])
            continue
        ratios = one["all ratios to fedloom"]
        times = ["", ""] if name == BASE else [_digits(one["ratio to fedloom"]), f"{ratios[0]:.2f} to {ratios[-1]:.2f}"]
        if failures := len(one["failures"]):
            label += f" (failed in {failures} of {len(results['turns'])} turns)"
        first = f"{one['seconds to the end of the first round']:.1f}"
        rows.append([label, CONTESTANTS[name].about, f"{one['seconds a round']:.2f}", *times, first])
    heads = ["simulator", "how", "seconds a round", "times fedloom's", "in single turns", "end of the first round, s"]
    return markdown_table(heads, rows)


def setting(results: Results) -> str:
    """Return the sentences that describe the measurement on the CPU."""
    job, machine, same = results["settings"], results["machine"], results["same work"]
    accuracies = [one["mean accuracy"] for one in results["summary"].values() if "versions" in one]
    distance = max(same["distance to the loop's model"].values(), key=lambda one: one if isinstance(one, float) else 0)
    turns = results["turns"]
    measured = _wrap(
        f"{job['clients']} clients with {job['samples_per_client']} pictures each ({_title(job['data'])}, IID), "
        f"{job['clients_per_round']} a round, McMahan's CNN, one local epoch, batches of {job['batch_size']}, SGD "
        f"with learning rate {job['lr']}. {machine['cores']} cores ({machine['cpu']}), "
        f"PyTorch {machine['torch'].partition('+')[0]}, Python {machine['python']}. {len(turns)} turns, in each "
        f"{job['rounds']} timed rounds after a warm-up round. The load average before a turn was at most "
        f"{max(turn['load before'] for turn in turns):.1f}, with the benchmark's own processes."
    )
    checked = _wrap(
        f"All do the same work. They make {same['steps a round']} steps a round. After {job['rounds'] + 1} rounds "
        f"their mean accuracies are {min(accuracies):.1f} to {max(accuracies):.1f} %. In a job in which nothing is "
        "drawn (full batches, all clients in each round, tanh and mean pooling), their models differ from the "
        f"loop's by at most {distance:.0e} of what training changed."
    )
    return f"{measured}\n{checked}"


def gpu_table(results: Results) -> str:
    """Return the rounds on a GPU, which were entered by hand, and their source."""
    rows = []
    for one in results["gpu"]["jobs"]:
        own = one["ms a round"][BASE]
        peers = [one["ms a round"][peer] for peer in PEERS_ON_GPU]
        rows.append([one["job"], *(f"{ms:g}" for ms in (*peers, own)), *(_digits(peer / own) for peer in peers)])
    heads = ["job", "loop, ms a round", "pfl-research, ms", "fedloom, ms", "loop / fedloom", "pfl-research / fedloom"]
    return f"{markdown_table(heads, rows)}\n{_wrap(results['gpu']['source'])}"


def overview(results: Results) -> str:
    """Return one row per job: how many times as long as fedloom each peer takes."""
    summary, job = results["summary"], results["settings"]

    def ratio(*names: str) -> str:
        known = [summary[name]["ratio to fedloom"] for name in names if "versions" in summary[name]]
        return _digits(min(known)) if known else "did not run"

    where = f"CPU, {results['machine']['cores']} cores: {_title(job['data'])}, McMahan's CNN"
    fedloom = f"{summary[BASE]['seconds a round']:.2f} s"
    rows = [[where, ratio("loop"), ratio("pfl", "pfl-torchrun"), ratio("flower"), fedloom]]
    for one in results["gpu"]["jobs"]:
        times = one["ms a round"]
        ratios = [_digits(times[peer] / times[BASE]) for peer in PEERS_ON_GPU]
        rows.append([f"{results['gpu']['device']}: {one['short']}", *ratios, "not measured", f"{times[BASE]:g} ms"])
    heads = ["job", "plain loop / fedloom", "pfl-research / fedloom", "Flower / fedloom", "fedloom, one round"]
    return markdown_table(heads, rows)


def blocks(results: Results) -> Mapping[str, Callable[[], str]]:
    """Return every text by its name in a page."""
    makers = {"overview": overview, "setting": setting, "cpu": cpu_table, "gpu": gpu_table}
    return {name: partial(make, results) for name, make in makers.items()}


def fill_page(page: str, results: Results) -> str:
    """Return the page with new tables between its marks `<!-- peers: NAME -->` and `<!-- end -->`."""
    return fill_blocks(page, "peers", blocks(results))


def write_pages(results: Results) -> None:
    """Write the tables into README and docs."""
    for page in PAGES:
        page.write_text(fill_page(page.read_text(encoding="utf-8"), results), encoding="utf-8")


def _version(results: Results, name: str) -> str:
    versions = results["summary"][name].get("versions", {})
    package = CONTESTANTS[name].packages[0] if CONTESTANTS[name].peer else ""
    return f" ({versions[package]})" if package in versions else ""


def _digits(value: float) -> str:
    """Return a number with at least two digits, and no more than one after the point from 2 on."""
    if value < 2:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _wrap(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_on_hyphens=False) + "\n"


def _title(name: str) -> str:
    return "Fashion-MNIST" if name == "fashion-mnist" else name
