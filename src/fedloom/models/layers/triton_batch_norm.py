"""Batch norm with what follows it, in two kernels forward and two backward, written with Triton.

For relu(norm(x) + beside) torch has a kernel or more for each of the three, and some that only prepare others. Here one
kernel sums up, and the other reads the sums and does all the rest. Every program of the second adds up the few partial
sums itself, always in the same order, so results are repeatable.

Maps are in channels-last order, and seen as a matrix, see `fedloom.models.layers.triton_tiling`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, no-untyped-call"
# Triton's own language has no types that mypy knows.

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.models.layers.triton_tiling import Tiling, tile_channels, tile_relu_gradient

TILE = 2048
"""Numbers that a program works on at once."""

PROGRAMS = 256
"""Most programs of a kernel, some two for each processor of a large GPU: each of the second reads all partial sums."""

CHUNKS = 128
"""Most partial sums of a channel."""

_BY_BATCH = ["M", "rows", "chunks", "share"]
_ANYWHERE = ["weight", "bias", "running_mean", "running_var", "counter", "d_weight", "d_bias"]
"""What lies in a model's row, at any address."""


@triton.jit
def _partial(sums, which: tl.constexpr, c, there, chunks, C: tl.constexpr, CHUNKS: tl.constexpr):
    """Partial sums of these channels, one row for each chunk, and zeros."""
    k = tl.arange(0, CHUNKS)
    return tl.load(sums + (which * CHUNKS + k)[:, None] * C + c[None, :], (k < chunks)[:, None] & there[None, :], 0.0)


@triton.jit(do_not_specialize=_BY_BATCH)
def _moments(
    x, sums, M, rows,
    C: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The mean of each channel in a chunk of rows, and the sum of squares about it."""
    k = tl.program_id(0)
    c, there = tile_channels(C, WIDE)
    first = k * rows
    end = tl.minimum(first + rows, M)
    # Sums about some number of the channel: about zero, small differences of large numbers would be lost.
    about = tl.load(x + first * C + c, there, 0.0).to(tl.float32)
    total = tl.zeros([TALL, WIDE], tl.float32)
    squares = tl.zeros([TALL, WIDE], tl.float32)
    for start in range(first, end, TALL):
        m = start + tl.arange(0, TALL)
        inside = (m < end)[:, None] & there[None, :]
        value = tl.load(x + m[:, None] * C + c[None, :], inside, 0.0).to(tl.float32)
        value = tl.where(inside, value - about[None, :], 0.0)
        total += value
        squares += value * value
    count = (end - first).to(tl.float32)
    away = tl.sum(total, 0) / count
    tl.store(sums + k * C + c, about + away, there)
    tl.store(sums + (CHUNKS + k) * C + c, tl.sum(squares, 0) - count * away * away, there)


@triton.jit(do_not_specialize=_BY_BATCH, do_not_specialize_on_alignment=_ANYWHERE)
def _normalise(
    x, beside, y, weight, bias, sums, saved, running_mean, running_var, counter,
    M, rows, chunks, share, momentum, eps,
    C: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, CHUNKS: tl.constexpr,
    RELU: tl.constexpr, BESIDE: tl.constexpr, TRACKED: tl.constexpr,
):  # fmt: skip
    """relu(norm(x) + beside) for a share of the rows; the first program keeps mean and deviation of its channels."""
    c, there = tile_channels(C, WIDE)
    k = tl.arange(0, CHUNKS)
    counts = tl.maximum(tl.minimum(M - k * rows, rows), 0).to(tl.float32)[:, None]
    size = M.to(tl.float32)
    means = _partial(sums, 0, c, there, chunks, C, CHUNKS)
    mean = tl.sum(means * counts, 0) / size
    away = tl.where((k < chunks)[:, None], means - mean[None, :], 0.0)
    squares = tl.sum(_partial(sums, 1, c, there, chunks, C, CHUNKS) + counts * away * away, 0)
    scale = 1.0 / tl.sqrt(squares / size + eps)
    if tl.program_id(0) == 0:
        tl.store(saved + c, mean, there)
        tl.store(saved + C + c, scale, there)
        if TRACKED:
            before = tl.load(running_mean + c, there, 0.0)
            tl.store(running_mean + c, (1 - momentum) * before + momentum * mean, there)
            before = tl.load(running_var + c, there, 0.0)
            tl.store(running_var + c, (1 - momentum) * before + momentum * squares / (size - 1), there)
            if tl.program_id(1) == 0:
                tl.store(counter, tl.load(counter) + 1)
    slope = scale * tl.load(weight + c, there, 0.0)
    level = tl.load(bias + c, there, 0.0)
    first = tl.program_id(0) * share
    end = tl.minimum(first + share, M)
    for start in range(first, end, TALL):
        m = start + tl.arange(0, TALL)
        inside = (m < end)[:, None] & there[None, :]
        at = m[:, None] * C + c[None, :]
        value = (tl.load(x + at, inside, 0.0).to(tl.float32) - mean[None, :]) * slope[None, :] + level[None, :]
        if BESIDE:
            value += tl.load(beside + at, inside, 0.0).to(tl.float32)
        if RELU:
            value = tl.where(value < 0, 0.0, value)  # what is not a number stays what it is
        tl.store(y + at, value.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=_BY_BATCH)
def _slopes(
    x, y, g, d_beside, saved, sums, M, rows,
    C: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, CHUNKS: tl.constexpr,
    RELU: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient, and of the gradient times the normalised x, in a chunk of rows."""
    k = tl.program_id(0)
    c, there = tile_channels(C, WIDE)
    first = k * rows
    end = tl.minimum(first + rows, M)
    mean = tl.load(saved + c, there, 0.0)[None, :]
    scale = tl.load(saved + C + c, there, 0.0)[None, :]
    total = tl.zeros([TALL, WIDE], tl.float32)
    along = tl.zeros([TALL, WIDE], tl.float32)
    for start in range(first, end, TALL):
        m = start + tl.arange(0, TALL)
        inside = (m < end)[:, None] & there[None, :]
        at = m[:, None] * C + c[None, :]
        slope = tile_relu_gradient(g, y, at, inside, RELU)
        if BESIDE:
            tl.store(d_beside + at, slope.to(d_beside.dtype.element_ty), inside)
        normal = (tl.load(x + at, inside, 0.0).to(tl.float32) - mean) * scale
        total += slope
        along += slope * tl.where(inside, normal, 0.0)
    tl.store(sums + k * C + c, tl.sum(total, 0), there)
    tl.store(sums + (CHUNKS + k) * C + c, tl.sum(along, 0), there)


@triton.jit(do_not_specialize=_BY_BATCH, do_not_specialize_on_alignment=_ANYWHERE)
def _backward(
    x, y, g, d_x, weight, d_weight, d_bias, saved, sums, M, chunks, share,
    C: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, CHUNKS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """The gradient of x for a share of the rows; the first program writes those of weight and bias."""
    c, there = tile_channels(C, WIDE)
    total = tl.sum(_partial(sums, 0, c, there, chunks, C, CHUNKS), 0)
    along = tl.sum(_partial(sums, 1, c, there, chunks, C, CHUNKS), 0)
    if tl.program_id(0) == 0:
        tl.store(d_bias + c, total, there)
        tl.store(d_weight + c, along, there)
    size = M.to(tl.float32)
    level = (total / size)[None, :]
    along = (along / size)[None, :]
    mean = tl.load(saved + c, there, 0.0)[None, :]
    scale = tl.load(saved + C + c, there, 0.0)[None, :]
    factor = scale * tl.load(weight + c, there, 0.0)[None, :]
    first = tl.program_id(0) * share
    end = tl.minimum(first + share, M)
    for start in range(first, end, TALL):
        m = start + tl.arange(0, TALL)
        inside = (m < end)[:, None] & there[None, :]
        at = m[:, None] * C + c[None, :]
        slope = tile_relu_gradient(g, y, at, inside, RELU)
        normal = (tl.load(x + at, inside, 0.0).to(tl.float32) - mean) * scale
        tl.store(d_x + at, (factor * (slope - level - normal * along)).to(d_x.dtype.element_ty), inside)


class _Plan(Tiling):
    """How the work on maps like x is divided among programs: chunks to sum up, and shares to go through once more."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x.shape, channels_last=True, tile=TILE)
        # What is compiled depends on the channels alone.
        self.partial = max(1, min(CHUNKS, PROGRAMS // triton.next_power_of_2(self.blocks)))
        self.compiled_for["CHUNKS"] = self.partial
        self.rows, self.chunks = self.chunk(self.partial)
        self.share, self.shares = self.chunk(max(1, PROGRAMS // self.blocks))

    def sums(self, x: Tensor) -> Tensor:
        return x.new_empty(2, self.partial, self.channels, dtype=torch.float32)


def triton_batch_norm_forward(
    x: Tensor,
    beside: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running: tuple[Tensor, Tensor, Tensor] | None,
    momentum: float,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """relu(norm(x) + beside), and what `backward` needs to know of it: mean and inverse deviation of each channel.

    `running` are mean, variance and the number of batches so far, which are brought up to date.
    """
    plan = _Plan(x)
    y, sums = torch.empty_like(x), plan.sums(x)
    saved = x.new_empty(2, plan.channels, dtype=torch.float32)
    if beside is not None:
        beside = beside.contiguous(memory_format=torch.channels_last)
    plan.launch(_moments, plan.chunks, x, sums, plan.M, plan.rows)
    plan.launch(
        _normalise, plan.shares, x, x if beside is None else beside, y, weight, bias, sums, saved,
        *((saved, saved, saved) if running is None else running),
        plan.M, plan.rows, plan.chunks, plan.share, float(momentum), float(eps),
        RELU=relu, BESIDE=beside is not None, TRACKED=running is not None,
    )  # fmt: skip
    return y, saved


def triton_batch_norm_backward(
    g: Tensor, x: Tensor, y: Tensor, weight: Tensor, saved: Tensor, relu: bool, beside: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The gradients of x, of what was added, of weight and bias."""
    plan = _Plan(x)
    g, sums = g.contiguous(memory_format=torch.channels_last), plan.sums(x)
    d_x, d_beside = torch.empty_like(x), torch.empty_like(x) if beside and relu else None
    d_weight, d_bias = torch.empty_like(weight), torch.empty_like(weight)
    plan.launch(
        _slopes, plan.chunks, x, y, g, x if d_beside is None else d_beside, saved, sums, plan.M, plan.rows,
        RELU=relu, BESIDE=d_beside is not None,
    )  # fmt: skip
    masked = g if d_beside is None else d_beside  # the gradient where y is not 0, once somebody has written it down
    plan.launch(
        _backward, plan.shares, x, y, masked, d_x, weight, d_weight, d_bias, saved, sums,
        plan.M, plan.chunks, plan.share, RELU=relu and d_beside is None,
    )  # fmt: skip
    return d_x, (masked if beside else None), d_weight, d_bias
