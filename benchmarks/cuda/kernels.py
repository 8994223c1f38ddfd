"""Measure alternative implementations of parts of a training step.

Each alternative is captured in a CUDA graph, as in the engine, and timed alone and with eight clients at once. Each
client has its own numbers and its own stream: a kernel that leaves most of the GPU idle costs less with eight clients
than it seems to cost alone. The sizes are those of McMahan's CNN and of ResNets on CIFAR-10 with batch size 50.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cuda.profile import seconds
from benchmarks.cuda.setting import BATCH, LR, MOMENTUM
from benchmarks.cuda.table import ResultTable, TimeLimit
from fedloom.models.layers.fused_relu import fused_relu_available
from fedloom.models.layers.norms import _BatchNormReLUFunction
from fedloom.models.layers.pooling import MaxPool2x2, _MaxPoolReLUFunction
from fedloom.training.optimizers import SGD

AT_ONCE, REPEATS = 8, 20
"""Number of clients, and repetitions in one graph, which make the cost of a launch negligible."""
Alternative = Callable[[], Tensor]
"""Computes a part of a step and returns its result."""
Alternatives = dict[str, Alternative]


def sgd(device: str, numbers: int) -> Alternatives:
    """Return alternatives for a step of SGD with momentum on a model of `numbers` weights."""
    draw = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(numbers, generator=draw).to(device) for _ in range(2))
    lr = torch.tensor(LR, device=device)

    def ours() -> Alternative:
        weights, optimizer = start.clone(), SGD(MOMENTUM)
        optimizer.allocate_state(weights)

        def step() -> Tensor:
            optimizer.step(weights, gradient, lr)
            return weights

        return step

    def fused() -> Alternative:
        weights, velocity = start.clone(), torch.zeros_like(start)

        def step() -> Tensor:
            torch._fused_sgd_(
                [weights], [gradient], [velocity], weight_decay=0.0, momentum=MOMENTUM, lr=lr, dampening=0.0,
                nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
            return weights

        return step

    def two() -> Alternative:
        weights, velocity = start.clone(), torch.zeros_like(start)

        def step() -> Tensor:
            torch.add(gradient, velocity, alpha=MOMENTUM, out=velocity)
            return weights.addcmul_(velocity, lr, value=-1)

        return step

    return {"the engine's": ours(), "torch's fused, in one piece": fused(), "two elementwise kernels": two()}


def pooling(device: str, channels: int, side: int) -> Alternatives:
    """Return alternatives for the gradient of 2 x 2 max pooling."""
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


def pools(device: str, channels: int, side: int, bf16: bool) -> Alternatives:
    """Return alternatives for relu(pool(x) + bias) and its gradients."""
    draw = torch.Generator().manual_seed(0)
    given = {"dtype": torch.bfloat16, "memory_format": torch.channels_last} if bf16 and device == "cuda" else {}
    x = torch.randn(BATCH, channels, side, side, generator=draw).to(device, **given).requires_grad_()
    g = torch.randn(BATCH, channels, side // 2, side // 2, generator=draw).to(device, **given)
    bias = torch.randn(channels, generator=draw).to(device, x.dtype).requires_grad_()

    def by(pool: Callable[[Tensor, Tensor], Tensor]) -> Alternative:
        return lambda: torch.autograd.grad(pool(x, bias), [x, bias], g)[0]

    level, pool = (-1, 1, 1), MaxPool2x2()
    return {
        "torch's": by(lambda x, bias: F.relu(F.max_pool2d(x, 2) + bias.view(level))),
        "torch's and a scatter": by(lambda x, bias: F.relu(pool(x) + bias.view(level))),
    } | ({"together": by(_MaxPoolReLUFunction.apply)} if fused_relu_available(x.device) else {})


def norms(device: str, channels: int, side: int, bf16: bool) -> Alternatives:
    """Return alternatives for relu(norm(x) + residual) in channels-last format, and its gradients."""
    draw = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if bf16 and device == "cuda" else torch.float32
    x, residual, g = (
        torch.randn(BATCH, channels, side, side, generator=draw).to(device, dtype, memory_format=torch.channels_last)
        for _ in range(3)
    )
    weight, bias, *running = (torch.rand(channels, generator=draw).to(device) for _ in range(4))
    counter, inputs = torch.zeros((), dtype=torch.long, device=device), [x, residual, weight, bias]
    for tensor in inputs:
        tensor.requires_grad_()

    def torchs() -> Tensor:
        counter.add_(1)
        y = F.relu(F.batch_norm(x, running[0], running[1], weight, bias, True) + residual)
        return torch.autograd.grad(y, inputs, g)[0]

    def ours() -> Tensor:
        y = _BatchNormReLUFunction.apply(x, residual, weight, bias, (*running, counter), 0.1, 1e-5, True)
        return torch.autograd.grad(y, inputs, g)[0]

    return {"torch's": torchs} | ({"together": ours} if fused_relu_available(x.device) else {})


PARTS: dict[str, Callable[[str], Alternatives]] = {
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


def kernels(options: argparse.Namespace, table: ResultTable, limit: TimeLimit) -> None:
    """Time all alternatives."""
    for name in limit.until_over(list(PARTS)):
        made = [PARTS[name](options.device) for _ in range(1 if options.tiny else AT_ONCE)]
        # An optimizer uses all of its arithmetic from its third step on.
        outcomes, found = [[alternative() for _ in range(3)][-1].clone() for alternative in made[0].values()], {}
        for which, outcome in zip(made[0], outcomes, strict=True):
            repeats = [_RepeatedAlternative(alternatives[which], options.device) for alternatives in made]
            found[which] = {
                "microseconds, alone": _microseconds(repeats[:1], options.device),
                f"microseconds, {len(made)} at once": _microseconds(repeats, options.device),
                "same bits": bool(torch.equal(outcome, outcomes[0])),
            }
        table.put("kernels", name, found)


class _RepeatedAlternative:
    """An alternative, captured several times in one CUDA graph on a GPU."""

    def __init__(self, alternative: Alternative, device: str) -> None:
        self._alternative, self._graph = alternative, None
        if device == "cuda":
            self._stream, self._graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._stream):
                alternative()
                torch.cuda.synchronize()
                self._graph.capture_begin()
                self._repeat()
                self._graph.capture_end()

    def _repeat(self) -> None:
        for _ in range(REPEATS):
            self._alternative()

    def run(self) -> None:
        if self._graph is None:
            return self._repeat()
        with torch.cuda.stream(self._stream):
            self._graph.replay()
        return None


def _microseconds(repeats: list[_RepeatedAlternative], device: str) -> float:
    """Return the median time of one part of one client."""

    def all_of_them() -> None:
        for repeat in repeats:
            repeat.run()

    def times() -> Iterator[float]:
        for _ in range(9 if device == "cuda" else 1):
            yield seconds(device, all_of_them) / len(repeats) / REPEATS

    list(times())
    return round(1e6 * statistics.median(times()), 2)
