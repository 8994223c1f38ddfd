"""The CUDA engine on this GPU: agreement, speed, how busy the GPU is, what bounds the rest, and what the engine costs.

    python benchmarks/gpu.py [PARTS] [--models cnn resnet20] [--precisions tf32 bf16] [--minutes 5] \
        --out results/gpu.json

Parts, all by default, each of which may take `--minutes` and is written as soon as a piece of it is there:

  agreement  one round of each network against a plain PyTorch loop in float32 and float64, and how far a change of one
             part in ten million carries that loop itself
  methods    two rounds of every method against the plain engine, in float64
  speed      whole rounds against a plain sequential PyTorch loop in the same process, in turn: 100 clients by
             class-wise Dirichlet 0.1, 10 a round, 5 epochs, batch 50, SGD with momentum 0.5; medians, the same clients
             for both
  cost       runs with evaluation every ten rounds and checkpoints: the share of time that is not training
  kernels    pieces of a step in the ways in which they can be computed, alone and with eight clients at once
  seeds      the accuracy of five runs here and of the same five on the CPU
  profile    a steady round of each network as the profiler sees it, held against what the chip can do, measured here
             too; after this whatever is launched takes the processor longer, so it comes after all that is timed
  together   steady rounds of `--at-once` runs that share the GPU in one process, as the profiler sees them

The loop has the samples on the GPU in float, one network of torch's own layers, `load_state_dict` for each client,
`torch.optim.SGD` and a weighted sum: what simulators do, without their data loaders. Where CIFAR-10 is not at hand,
random images of the same shape take the same time. `--device cpu --tiny` tries everything out without a GPU; its
figures mean nothing.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from gpu_agreement import agreement, every_method
from gpu_kernels import kernels
from gpu_sheet import Clock, Sheet
from gpu_speed import profiles, speed, together
from gpu_whole_runs import cost, seeds

PARTS: dict[str, Callable[[argparse.Namespace, Sheet, Clock], None]] = {
    "agreement": agreement,
    "methods": every_method,
    "speed": speed,
    "cost": cost,
    "kernels": kernels,
    "seeds": seeds,
    "profile": profiles,
    "together": together,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="The CUDA engine on this GPU; see the top of this file.")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="by default all")
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet20", "vgg16", "resnet18"])
    parser.add_argument("--precisions", nargs="+", default=["tf32", "bf16"], choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--fast", action="store_true", help="let the engine use what is not the same every time")
    parser.add_argument("--channels-last", action="store_true", help="also in tf32")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are timed")
    parser.add_argument("--warm", type=int, default=2, help="how often these are played before, to be recorded")
    parser.add_argument("--at-once", type=int, default=3, help="runs that share the GPU in `together`")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each part")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="to try the benchmark out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sheet = Sheet(options)
    for part in [part for part in PARTS if part in (options.parts or PARTS)]:
        print(f"{part}, at most {options.minutes:g} minutes", flush=True)
        PARTS[part](options, sheet, Clock(options.minutes))


if __name__ == "__main__":
    main()
