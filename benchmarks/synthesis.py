"""What DynaFed's synthesis costs: seconds and memory of one iteration, with and without checkpointing.

    python benchmarks/synthesis.py [--device cuda] [--images 150] [--out results/synthesis.json]

ConvNet on 28 x 28 images, 20 inner steps by default. Each case runs in a process of its own, because the peak of a
process's memory never goes down. The peak is that of what torch had allocated on a GPU, and on the CPU that of the
resident set, above what it was before the first iteration; one thread, as in a run. The resident set also holds what
the allocator has not given back, so there the tensors alive are counted as well, in an iteration that is not timed.
Memory by step is the slope between few and many inner steps, in rows (copies of the model). `remember` is
`checkpoint=false`.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedloom.config import TrainingConfig
from fedloom.core.bank import Bank
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.methods import MethodContext
from fedloom.methods._support.trajectory_matching import SyntheticData, match_trajectory
from fedloom.methods.dynafed import DynaFedOptions, DynaFedRefiner
from fedloom.models import build_model


def refiner(
    device: torch.device, model: str, images: int, steps: int, checkpoint: bool, augment: str
) -> DynaFedRefiner:
    shape = (1, 28, 28)
    torch.manual_seed(0)
    module = build_model(model, shape, 10)
    layout = Layout.of(module)
    context = MethodContext(
        layout=layout, initial=layout.read(module, device), clients=80, per_round=32, rounds=200, streams=RngStreams(0),
        training=TrainingConfig(), samples=lambda _: 1, criterion=torch.nn.functional.cross_entropy,
        make_module=lambda: build_model(model, shape, 10), classes=10, shape=shape, cache_dir=None, keep_checkpoints=2,
        device=device, make_bank=lambda count, width: Bank.memory(count, width),
    )  # fmt: skip
    options = DynaFedOptions(
        images_per_class=max(1, images // 10), inner_steps=steps, checkpoint=checkpoint, augment=augment
    )
    made = DynaFedRefiner(context, options)
    noise = torch.Generator(device).manual_seed(0)
    for _ in range(options.L - 1):
        row = made.trajectory[-1]
        made.trajectory.append(row + 0.01 * torch.randn(row.shape, generator=noise, device=device))
    return made


def measure(
    pipe: Connection, device: str, model: str, images: int, steps: int, checkpoint: bool, augment: str, iterations: int
) -> None:
    """One case: seconds of the iterations after the first, and the peak of memory."""
    torch.set_num_threads(1)
    place = torch.device(device)
    made = refiner(place, model, images, steps, checkpoint, augment)
    data = made._first_samples()
    before = _resident(place)
    times: list[float] = []
    for n in range(iterations):
        start = time.perf_counter()
        _iterate(made, data, n, checkpoint)
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        times.append(time.perf_counter() - start)
    kept = times[1:] or times
    peak = _peak(place) - before
    made._kinds = made._kinds and ("rotate",)  # the kind that needs most, so that all steps are alike
    with Alive() as alive:
        _iterate(made, data, 0, checkpoint)
    row = made.context.layout.nbytes
    sizes = {"peak MiB": peak, "tensors MiB": alive.most, "row MiB": row}
    pipe.send({"seconds": statistics.median(kept), **{name: size / 2**20 for name, size in sizes.items()}})


class Alive(TorchDispatchMode):
    """The bytes of the tensors made while it is on, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                self._known.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, key, size)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _iterate(made: DynaFedRefiner, data: SyntheticData, n: int, checkpoint: bool) -> None:
    t, target = made.segment(n)
    found = match_trajectory(
        made._network, data, made.inner_steps(n), made.trajectory[t], target, remember=not checkpoint
    )
    data.images.sub_(found.gradients.images)
    data.logits.sub_(found.gradients.logits)


def _resident(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def apart(*case: Any) -> dict[str, float]:
    """`measure` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(theirs, *case))
    process.start()
    theirs.close()
    try:
        result: dict[str, float] = ours.recv()
    except EOFError:
        raise SystemExit(f"the case {case} ended without a result; is there memory enough?") from None
    process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="What DynaFed's synthesis costs.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--images", type=int, default=150)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--augment", default="dsa")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--cases", default="checkpoint,remember")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    case = (options.device, options.model, options.images)
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu, one thread",
        "torch": torch.__version__,
        "images": options.images,
        "inner steps": options.steps,
    }
    few = max(1, options.steps // 10)
    for name in options.cases.split(","):
        last = (name == "checkpoint", options.augment, options.iterations)
        many, less = apart(*case, options.steps, *last), apart(*case, few, *last)
        result[name] = {
            "seconds an iteration": round(many["seconds"], 3),
            "peak MiB": round(many["peak MiB"], 1),
            f"peak MiB with {few} steps": round(less["peak MiB"], 1),
            "tensors alive, MiB": round(many["tensors MiB"], 1),
            "tensors alive by step, rows": round(
                (many["tensors MiB"] - less["tensors MiB"]) / (options.steps - few) / many["row MiB"], 3
            ),
        }
        print(name, result[name], file=sys.stderr, flush=True)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
