"""Measure seconds and memory of DynaFed's synthesis per iteration.

It measures with and without checkpointing.

The default case is ConvNet on 28 x 28 images with 20 inner steps and one thread. Each case has its own process, because
the peak memory of a process never falls. On a GPU the peak is the memory that PyTorch allocated; on the CPU it is the
resident memory above that before the first iteration. Resident memory also holds memory that the allocator has not
returned, so an iteration that is not timed counts the living tensors as well.

The memory of one step is the slope between few and many inner steps, in copies of the model. The case `remember` is
`checkpoint=false`.
"""

import json
import multiprocessing
import resource
import statistics
import sys
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks._common import add_out, command_of, describe_machine, make_parser, write_result
from fedloom.config import TrainingConfig
from fedloom.core.bank import Bank
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.methods import MethodContext
from fedloom.methods._support.trajectory_matching import TrajectoryMatchingData, match_trajectory
from fedloom.methods.base import ServerResources
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
        layout=layout, initial=layout.read(module, device), num_clients=80, clients_per_round=32, planned_rounds=200,
        rng_streams=RngStreams(0),
        config=TrainingConfig(), num_examples=lambda _: 1, criterion=torch.nn.functional.cross_entropy,
        make_model=lambda: build_model(model, shape, 10), classes=10, shape=shape,
        server=ServerResources(device, lambda count, width: Bank.memory(count, width)),
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
    """Measure one case: seconds of the iterations after the first, and peak memory."""
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
    made._kinds = made._kinds and ("rotate",)  # the augmentation that needs the most memory, in all steps
    with Alive() as alive:
        _iterate(made, data, 0, checkpoint)
    row = made.context.layout.nbytes
    sizes = {"peak MiB": peak, "tensors MiB": alive.most, "row MiB": row}
    pipe.send({"seconds": statistics.median(kept), **{name: size / 2**20 for name, size in sizes.items()}})


class Alive(TorchDispatchMode):
    """Count the bytes of the living tensors, and their maximum."""

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


def _iterate(made: DynaFedRefiner, data: TrajectoryMatchingData, n: int, checkpoint: bool) -> None:
    t, target = made.segment(n)
    found = match_trajectory(
        made._network, data, made.inner_steps(n), made.trajectory[t], target, keep_graphs=not checkpoint
    )
    data.images.sub_(found.gradients.images)
    data.label_logits.sub_(found.gradients.label_logits)


def _resident(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_in_process(*case: Any) -> dict[str, float]:
    """Run `measure` in its own process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(theirs, *case))
    process.start()
    theirs.close()
    try:
        result: dict[str, float] = ours.recv()
    except EOFError:
        raise SystemExit(f"The case {case} ended without a result. Check that there is enough memory.") from None
    process.join()
    return result


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("synthesis", __doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", default="convnet", help="network")
    parser.add_argument("--images", type=int, default=150, help="synthetic images")
    parser.add_argument("--steps", type=int, default=20, help="inner steps")
    parser.add_argument("--augment", default="dsa", help="augmentation of the synthetic images")
    parser.add_argument("--iterations", type=int, default=3, help="iterations; the first is not timed")
    parser.add_argument("--cases", default="checkpoint,remember", help="cases, separated by commas")
    add_out(parser)
    options = parser.parse_args(arguments)
    case = (options.device, options.model, options.images)
    result: dict[str, Any] = {
        "command": command_of("synthesis", arguments),
        "machine": describe_machine(),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu, one thread",
        "images": options.images,
        "inner steps": options.steps,
    }
    few = max(1, options.steps // 10)
    for name in options.cases.split(","):
        last = (name == "checkpoint", options.augment, options.iterations)
        many = measure_in_process(*case, options.steps, *last)
        less = measure_in_process(*case, few, *last)
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
    write_result(result, options.out)
