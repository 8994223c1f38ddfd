"""The CUDA engine on this GPU: agreement, speed, how busy the GPU is, what bounds the rest, and what the engine costs.

    python benchmarks/gpu.py [PARTS] [--models cnn resnet20] [--precisions tf32 bf16] [--minutes 5] \
        --out results/gpu.json

Parts, all by default, each of which may take `--minutes` and is written as soon as a piece of it is there. Networks and
precisions whose rounds are looked at each have a process of their own, as a command has: by which rule cuDNN chooses
its kernels is decided once in a process.

  agreement  one round of each network against a plain PyTorch loop in float32 and float64, and how far a change of one
             part in ten million carries that loop itself
  methods    two rounds of every method against the plain engine, in float64
  speed      whole rounds against a plain sequential PyTorch loop in the same process, in turn: 100 clients by
             class-wise Dirichlet 0.1, 10 a round, 5 epochs, batch 50, SGD with momentum 0.5; medians, the same clients
             for both
  cost       runs of `--methods` with evaluation every ten rounds and checkpoints: the share of time besides training
  kernels    pieces of a step in the ways in which they can be computed, alone and with eight clients at once
  seeds      the accuracy of five runs here and of the same five on the CPU
  profile    a steady round of each network as the driver and the profiler see it, held against what the chip can do,
             measured here too; after the profiler whatever is launched takes the processor longer, so it comes last
  together   steady rounds of `--at-once` runs that share the GPU in one process, as the profiler sees them

The loop has the samples on the GPU in float, one network of torch's own layers, `load_state_dict` for each client,
`torch.optim.SGD` and a weighted sum: what simulators do, without their data loaders. Where CIFAR-10 is not at hand,
random images of the same shape take the same time. `--device cpu --tiny` tries everything out without a GPU; its
figures mean nothing.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gpu_agreement import agreement, every_method
from gpu_kernels import kernels
from gpu_sheet import Clock, Sheet
from gpu_speed import together, whole_rounds
from gpu_whole_runs import cost, seeds

PARTS = ("agreement", "methods", "speed", "cost", "kernels", "seeds", "profile", "together")

IN_ONE: dict[str, Callable[[argparse.Namespace, Sheet, Clock], None]] = {
    "agreement": agreement,
    "methods": every_method,
    "cost": cost,
    "kernels": kernels,
    "seeds": seeds,
}
"""Parts that are measured in one process."""

APART: dict[str, Callable[[argparse.Namespace, Sheet, str, str], None]] = {
    "speed": whole_rounds,
    "profile": whole_rounds,
    "together": together,
}
"""Those of which each network has a process of its own, with each precision; one, if the same function does both."""


def main() -> None:
    parser = argparse.ArgumentParser(description="The CUDA engine on this GPU; see the top of this file.")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="by default all")
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet20", "vgg16", "resnet18"])
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedcross", "fedmr"], help="for `cost`")
    parser.add_argument("--precisions", nargs="+", default=["tf32", "bf16"], choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--fast", action="store_true", help="let the engine use what is not the same every time")
    parser.add_argument("--channels-last", action=argparse.BooleanOptionalAction, help="instead of the faster order")
    parser.add_argument("--loop-in-bf16", action="store_true", help="with bf16, time such a loop too, which is slower")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are timed")
    parser.add_argument("--warm", type=int, default=2, help="how often these are played before, to be recorded")
    parser.add_argument("--at-once", type=int, default=3, help="runs that share the GPU in `together`")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each part")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="to try the benchmark out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    asked = [(model, precision) for precision in options.precisions for model in options.models]
    options.parts = [part for part in PARTS if part in (options.parts or PARTS)]
    if len(asked) == 1 and options.parts[0] in APART and len({APART.get(part) for part in options.parts}) == 1:
        APART[options.parts[0]](options, Sheet(options), *asked[0])
        return
    for part in options.parts:
        if part in IN_ONE:
            print(f"{part}, at most {options.minutes:g} minutes", flush=True)
            IN_ONE[part](options, Sheet(options), Clock(options.minutes))
    for work in dict.fromkeys(APART.values()):
        parts = [part for part in options.parts if APART.get(part) is work]
        minutes = options.minutes * len(parts)
        if parts:
            print(f"{' and '.join(parts)}, at most {minutes:g} minutes", flush=True)
        for model, precision in Clock(minutes).while_left(asked if parts else []):
            line = [*parts, "--models", model, "--precisions", precision]
            subprocess.run([sys.executable, sys.argv[0], *line, *other_words(parser, options)], check=True)


def other_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """What else was asked for on the command line."""
    words = []
    for name, value in vars(options).items():
        if name not in ("parts", "models", "methods", "precisions") and value != parser.get_default(name):
            no = "no-" if value is False else ""
            words += [f"--{no}{name.replace('_', '-')}", *([] if isinstance(value, bool) else [str(value)])]
    return words


if __name__ == "__main__":
    main()
