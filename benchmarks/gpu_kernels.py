"""Pieces of a step, in the ways in which they can be computed: for benchmarks/gpu.py.

Each way is recorded as the engine would record it, and timed alone and with eight clients at once, each with numbers
and a stream of its own: a kernel that leaves most of the chip idle costs less there than it seems to alone. Sizes are
those of McMahan's CNN and of ResNets on CIFAR-10 with a batch of 50.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from gpu_profile import BATCH, LR, MOMENTUM, seconds
from gpu_sheet import Clock, Sheet
from torch import Tensor

from fedloom.models.layers.fused_relu import fused_kernels_available
from fedloom.models.layers.norms import BatchNormReLUFunction
from fedloom.models.layers.pooling import MaxPool2x2, MaxPoolReLUFunction
from fedloom.training.optimizers import SGD

AT_ONCE, REPEATS = 8, 20
"""Clients, and times that a way is recorded in a row: a launch then costs little beside it."""
Way = Callable[[], Tensor]
"""Computes the piece, and gives what came out of it."""
Ways = dict[str, Way]


def sgd(device: str, numbers: int) -> Ways:
    """A step of SGD with momentum on a model of so many numbers."""
    draw = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(numbers, generator=draw).to(device) for _ in range(2))
    lr = torch.tensor(LR, device=device)

    def ours() -> Way:
        weights, optimizer = start.clone(), SGD(MOMENTUM)
        optimizer.settle(weights)

        def step() -> Tensor:
            optimizer.step(weights, gradient, lr)
            return weights

        return step

    def fused() -> Way:
        weights, velocity = start.clone(), torch.zeros_like(start)

        def step() -> Tensor:
            torch._fused_sgd_(
                [weights], [gradient], [velocity], weight_decay=0.0, momentum=MOMENTUM, lr=lr, dampening=0.0,
                nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
            return weights

        return step

    def two() -> Way:
        weights, velocity = start.clone(), torch.zeros_like(start)

        def step() -> Tensor:
            torch.add(gradient, velocity, alpha=MOMENTUM, out=velocity)
            return weights.addcmul_(velocity, lr, value=-1)

        return step

    return {"the engine's": ours(), "torch's fused, in one piece": fused(), "two elementwise kernels": two()}


def pooling(device: str, channels: int, side: int) -> Ways:
    """The gradient of the largest of four pixels."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, channels, side, side, generator=draw).to(device)
    g = torch.randn(BATCH, channels, side // 2, side // 2, generator=draw).to(device)
    _, places = F.max_pool2d_with_indices(x, 2)
    backward = torch.ops.aten.max_pool2d_with_indices_backward

    def put() -> Tensor:
        whole = torch.zeros_like(x)
        whole.view(BATCH, channels, -1).scatter_(2, places.flatten(2), g.flatten(2))
        return whole

    return {
        "torch's": lambda: backward(g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places),
        "unpooling": lambda: F.max_unpool2d(g, places, 2, output_size=x.shape),
        "zeros and a scatter": put,
    }


def pools(device: str, channels: int, side: int, bf16: bool) -> Ways:
    """relu(pool(x) + bias), and its gradients."""
    draw = torch.Generator().manual_seed(0)
    given = {"dtype": torch.bfloat16, "memory_format": torch.channels_last} if bf16 and device == "cuda" else {}
    x = torch.randn(BATCH, channels, side, side, generator=draw).to(device, **given).requires_grad_()
    g = torch.randn(BATCH, channels, side // 2, side // 2, generator=draw).to(device, **given)
    bias = torch.randn(channels, generator=draw).to(device, x.dtype).requires_grad_()

    def by(pool: Callable[[Tensor, Tensor], Tensor]) -> Way:
        return lambda: torch.autograd.grad(pool(x, bias), [x, bias], g)[0]

    level, pool = (-1, 1, 1), MaxPool2x2()
    return {
        "torch's": by(lambda x, bias: F.relu(F.max_pool2d(x, 2) + bias.view(level))),
        "torch's and a scatter": by(lambda x, bias: F.relu(pool(x) + bias.view(level))),
    } | ({"together": by(MaxPoolReLUFunction.apply)} if fused_kernels_available(x.device) else {})


def norms(device: str, channels: int, side: int, bf16: bool) -> Ways:
    """relu(norm(x) + beside) in channels-last order, and its gradients."""
    draw = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if bf16 and device == "cuda" else torch.float32
    x, beside, g = (
        torch.randn(BATCH, channels, side, side, generator=draw).to(device, dtype, memory_format=torch.channels_last)
        for _ in range(3)
    )
    weight, bias, *running = (torch.rand(channels, generator=draw).to(device) for _ in range(4))
    counter, inputs = torch.zeros((), dtype=torch.long, device=device), [x, beside, weight, bias]
    for tensor in inputs:
        tensor.requires_grad_()

    def torchs() -> Tensor:
        counter.add_(1)
        y = F.relu(F.batch_norm(x, running[0], running[1], weight, bias, True) + beside)
        return torch.autograd.grad(y, inputs, g)[0]

    def ours() -> Tensor:
        y = BatchNormReLUFunction.apply(x, beside, weight, bias, (*running, counter), 0.1, 1e-5, True)
        return torch.autograd.grad(y, inputs, g)[0]

    return {"torch's": torchs} | ({"together": ours} if fused_kernels_available(x.device) else {})


PIECES: dict[str, Callable[[str], Ways]] = {
    "SGD, 2.2 million weights (CNN)": lambda device: sgd(device, 2_156_490),
    "SGD, 0.27 million weights (ResNet-20)": lambda device: sgd(device, 269_722),
    "SGD, 11 million weights (ResNet-18)": lambda device: sgd(device, 11_173_962),
    "gradient of pooling, 32 channels of 32 x 32": lambda device: pooling(device, 32, 32),
    "gradient of pooling, 64 channels of 16 x 16": lambda device: pooling(device, 64, 16),
    "pool, bias and ReLU, 32 channels of 32 x 32": lambda device: pools(device, 32, 32, False),
    "pool, bias and ReLU, 64 channels of 16 x 16": lambda device: pools(device, 64, 16, False),
    "pool, bias and ReLU, 32 channels of 32 x 32, bf16": lambda device: pools(device, 32, 32, True),
    "pool, bias and ReLU, 64 channels of 16 x 16, bf16": lambda device: pools(device, 64, 16, True),
    "norm, sum and ReLU, 16 channels of 32 x 32, bf16": lambda device: norms(device, 16, 32, True),
    "norm, sum and ReLU, 64 channels of 8 x 8, bf16": lambda device: norms(device, 64, 8, True),
    "norm, sum and ReLU, 64 channels of 32 x 32, bf16": lambda device: norms(device, 64, 32, True),
    "norm, sum and ReLU, 512 channels of 4 x 4, bf16": lambda device: norms(device, 512, 4, True),
    "norm, sum and ReLU, 16 channels of 32 x 32, channels last": lambda device: norms(device, 16, 32, False),
    "norm, sum and ReLU, 64 channels of 32 x 32, channels last": lambda device: norms(device, 64, 32, False),
}


def kernels(options: argparse.Namespace, sheet: Sheet, clock: Clock) -> None:
    for name in clock.while_left(list(PIECES)):
        made = [PIECES[name](options.device) for _ in range(1 if options.tiny else AT_ONCE)]
        # The third step of an optimiser is the first in which all of its arithmetic counts.
        outcomes, found = [[way() for _ in range(3)][-1].clone() for way in made[0].values()], {}
        for way, outcome in zip(made[0], outcomes, strict=True):
            players = [_Player(ways[way], options.device) for ways in made]
            found[way] = {
                "microseconds, alone": _microseconds(players[:1], options.device),
                f"microseconds, {len(made)} at once": _microseconds(players, options.device),
                "same bits": bool(torch.equal(outcome, outcomes[0])),
            }
        sheet.put("kernels", name, found)


class _Player:
    """A way, recorded several times in a row where there are recordings."""

    def __init__(self, way: Way, device: str) -> None:
        self._way, self._graph = way, None
        if device == "cuda":
            self._stream, self._graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._stream):
                way()
                torch.cuda.synchronize()
                self._graph.capture_begin()
                self._repeat()
                self._graph.capture_end()

    def _repeat(self) -> None:
        for _ in range(REPEATS):
            self._way()

    def play(self) -> None:
        if self._graph is None:
            return self._repeat()
        with torch.cuda.stream(self._stream):
            self._graph.replay()
        return None


def _microseconds(players: list[_Player], device: str) -> float:
    """For one piece of one client, the median of several times."""

    def all_of_them() -> None:
        for player in players:
            player.play()

    def times() -> Iterator[float]:
        for _ in range(9 if device == "cuda" else 1):
            yield seconds(device, all_of_them) / len(players) / REPEATS

    list(times())
    return round(1e6 * statistics.median(times()), 2)
