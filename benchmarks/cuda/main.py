"""Measure the CUDA engine on this GPU: agreement, speed, overhead, kernels, seeds.

Parts (default: all). Each part may take `--minutes`, and the results file holds what it has measured so far.

  agreement  one round of each network against a plain PyTorch loop in float32 and float64, and how far the loop itself
             moves if its start changes by one part in ten million
  methods    two rounds of every method against the sequential engine, in float64
  speed      whole rounds and a plain PyTorch loop in turn, in the same process: 100 clients (dirichlet:0.1), 10 in each
             round, 5 epochs, batch size 50, SGD with momentum 0.5; medians, the same clients for both
  cost       runs of `--methods` with evaluation every ten rounds and checkpoints: the share of time besides training
  kernels    alternative implementations of parts of a training step, alone and with eight clients at once
  seeds      the accuracy of five runs on the GPU and of the same five runs on the CPU
  profile    one steady round of each network in nvidia-smi and in the profiler, against the measured peak of the GPU;
             comes late, because kernel launches cost more time after profiling
  together   steady rounds of several runs that share the GPU in one process, in the profiler

In `speed`, `profile` and `together`, each network and precision has its own process, as in `fedloom run`: cuDNN decides
once in a process how it chooses its kernels.

The loop keeps float samples on the GPU and has one network of torch's own layers, `load_state_dict` for each client,
`torch.optim.SGD` and a weighted sum. Simulators do the same, and load data as well. Without CIFAR-10 the benchmark
makes random images of the same shape, which take the same time. `--device cpu --tiny` tries all parts without a GPU;
its figures mean nothing.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence

from benchmarks._common import add_out, command_of, make_parser
from benchmarks.cuda.agreement import agreement, every_method
from benchmarks.cuda.kernels import kernels
from benchmarks.cuda.speed import together, whole_rounds
from benchmarks.cuda.table import ResultTable, TimeLimit
from benchmarks.cuda.whole_runs import cost, seeds

PARTS = ("agreement", "methods", "speed", "cost", "kernels", "seeds", "profile", "together")

IN_ONE: dict[str, Callable[[argparse.Namespace, ResultTable, TimeLimit], None]] = {
    "agreement": agreement,
    "methods": every_method,
    "cost": cost,
    "kernels": kernels,
    "seeds": seeds,
}
"""Parts that run in this process."""

APART: dict[str, Callable[[argparse.Namespace, ResultTable, str, str], None]] = {
    "speed": whole_rounds,
    "profile": whole_rounds,
    "together": together,
}
"""Parts with a process for each network and precision; parts with the same function share it."""


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("cuda", __doc__)
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=f"{', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet20", "vgg16", "resnet18"], help="networks")
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedcross", "fedmr"], help="methods of `cost`")
    parser.add_argument(
        "--precisions", nargs="+", default=["tf32", "bf16"], choices=["fp32", "tf32", "bf16"], help="precisions"
    )
    parser.add_argument("--data", default="cifar10", help="data set")
    parser.add_argument("--fast", action="store_true", help="allow non-deterministic algorithms")
    parser.add_argument(
        "--channels-last", action=argparse.BooleanOptionalAction, help="memory format; default: the faster one"
    )
    parser.add_argument(
        "--loop-in-bf16", action="store_true", help="with bf16, also time the loop in bf16, which is slower"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds to time")
    parser.add_argument("--warm", type=int, default=2, help="passes over these rounds before, to capture CUDA graphs")
    parser.add_argument("--concurrent-runs", type=int, default=3, help="runs that share the GPU in `together`")
    parser.add_argument("--minutes", type=float, default=5.0, help="time limit of each part")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="device of the engine")
    parser.add_argument("--tiny", action="store_true", help="use the smallest sizes, to try the benchmark")
    add_out(parser)
    options = parser.parse_args(arguments)
    options.command = command_of("cuda", arguments)
    asked = [(model, precision) for precision in options.precisions for model in options.models]
    options.parts = [part for part in PARTS if part in (options.parts or PARTS)]
    if len(asked) == 1 and options.parts[0] in APART and len({APART.get(part) for part in options.parts}) == 1:
        APART[options.parts[0]](options, ResultTable(options), *asked[0])
        return
    for part in options.parts:
        if part in IN_ONE:
            print(f"{part}, at most {options.minutes:g} minutes", flush=True)
            IN_ONE[part](options, ResultTable(options), TimeLimit(options.minutes))
    for work in dict.fromkeys(APART.values()):
        parts = [part for part in options.parts if APART.get(part) is work]
        minutes = options.minutes * len(parts)
        if parts:
            print(f"{' and '.join(parts)}, at most {minutes:g} minutes", flush=True)
        for model, precision in TimeLimit(minutes).until_over(asked):
            words = [*parts, "--models", model, "--precisions", precision, *other_options(parser, options)]
            subprocess.run([sys.executable, "-m", "benchmarks", "cuda", *words], check=True)


def other_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """Return the options for the process of one network and precision."""
    words = []
    for name, value in vars(options).items():
        if name not in ("parts", "models", "methods", "precisions", "command") and value != parser.get_default(name):
            no = "no-" if value is False else ""
            words += [f"--{no}{name.replace('_', '-')}", *([] if isinstance(value, bool) else [str(value)])]
    return words
