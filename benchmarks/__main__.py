"""Run one benchmark: `python -m benchmarks NAME [options]`, or `--list` them."""

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = {
    "rounds": "engines.rounds",
    "peers": "peers.main",
    "clients": "engines.clients",
    "choices": "engines.choices",
    "memory": "engines.memory",
    "kills": "engines.kills",
    "cuda": "cuda.main",
    "servers": "methods.servers",
    "synthesis": "methods.synthesis",
    "lss-scale": "methods.lss_scale",
    "fedcda-cache": "methods.fedcda_cache",
    "fedcda-disk-cache": "methods.fedcda_disk_cache",
    "fedcross-acceleration": "methods.fedcross_acceleration",
    "experiments": "experiments.main",
    "curves": "experiments.curves",
    "result-tables": "experiments.tables",
    "league": "league.main",
    "flower": "flower.main",
    "flower-faults": "flower.faults",
    "secure-exchange": "flower.secure_exchange",
    "privacy": "privacy.main",
    "hard-digits": "pictures",
    "demo": "demo",
}
"""The module in this package of each benchmark."""


def summary_of(module: str) -> str:
    """Return the first line of a module's docstring without importing the module: PyTorch takes seconds to load."""
    path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def list_benchmarks() -> str:
    """Return one line for each benchmark: its name and what it measures."""
    width = max(map(len, BENCHMARKS))
    return "\n".join(f"{name:<{width}}  {summary_of(module)}" for name, module in BENCHMARKS.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Run one benchmark. `python -m benchmarks NAME --help` shows its options.",
    )
    parser.add_argument("--list", action="store_true", help="list the benchmarks and what they measure")
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of a benchmark")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the benchmark")
    given = parser.parse_args(arguments)
    if given.list:
        print(list_benchmarks())
        return
    if given.name is None:
        parser.error("name a benchmark; `python -m benchmarks --list` shows all of them.")
    if given.name not in BENCHMARKS:
        sys.stderr.write(f"There is no benchmark {given.name!r}; the names are {', '.join(BENCHMARKS)}.\n")
        raise SystemExit(2)
    importlib.import_module(f"benchmarks.{BENCHMARKS[given.name]}").main(given.options)


if __name__ == "__main__":
    main()
