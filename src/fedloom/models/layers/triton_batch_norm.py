"""Triton kernels for batch norm and what follows it.

There are two kernels forward and two backward.

For relu(norm(x) + beside) torch has at least one kernel for each of the three, and some that only prepare others. Here
one kernel computes partial sums, and the other reads them and does all the rest. Every program of the second adds up
the few partial sums itself, always in the same order, so results are deterministic.

Maps are in channels-last order and treated as a matrix, see `triton_tiling.py`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, no-untyped-call"
# mypy does not know the types of Triton's language.

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.models.layers.triton_tiling import Tiling, tile_channels, triton_tiling_relu_gradient

TILE = 2048
"""Numbers that a program processes at once."""

PROGRAMS = 256
"""Maximum programs of a kernel, about two per multiprocessor of a large GPU; each adds up all partial sums."""

CHUNKS = 128
"""Maximum number of partial sums per channel."""

_BY_BATCH = ["M", "rows", "chunks", "share"]
_ANYWHERE = ["weight", "bias", "running_mean", "running_var", "counter", "d_weight", "d_bias"]
"""Tensors that are views of a model's row, at any address."""


@triton.jit
def _partial(sums, which: tl.constexpr, c, there, chunks, C: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the partial sums of these channels, one row for each chunk, padded with zeros."""
    k = tl.arange(0, CHUNKS)
    return tl.load(sums + (which * CHUNKS + k)[:, None] * C + c[None, :], (k < chunks)[:, None] & there[None, :], 0.0)


@triton.jit(do_not_specialize=_BY_BATCH)
def _moments(
    x, sums, M, rows,
    C: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Compute the mean of each channel in a chunk of rows, and the sum of squares about it."""
    k = tl.program_id(0)
    c, there = tile_channels(C, WIDE)
    first = k * rows
    end = tl.minimum(first + rows, M)
    # Sums about a value of the channel: about zero, small differences of large numbers would be lost.
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
    """Compute relu(norm(x) + beside) for a share of the rows; the first program saves mean and deviation."""
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
            value = tl.where(value < 0, 0.0, value)  # NaN stays NaN
        tl.store(y + at, value.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=_BY_BATCH)
def _slopes(
    x, y, g, d_beside, saved, sums, M, rows,
    C: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, CHUNKS: tl.constexpr,
    RELU: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Sum the gradient, and the gradient times the normalized x, over a chunk of rows."""
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
        slope = triton_tiling_relu_gradient(g, y, at, inside, RELU)
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
    """Compute the gradient of x for a share of the rows; the first program writes those of weight and bias."""
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
        slope = triton_tiling_relu_gradient(g, y, at, inside, RELU)
        normal = (tl.load(x + at, inside, 0.0).to(tl.float32) - mean) * scale
        tl.store(d_x + at, (factor * (slope - level - normal * along)).to(d_x.dtype.element_ty), inside)


class _Plan(Tiling):
    """How the work on maps like x is divided among programs: chunks for the sums, shares for the second kernel."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x.shape, channels_last=True, tile_size=TILE)
        # Compiled code may depend on the channels only.
        self.partial = max(1, min(CHUNKS, PROGRAMS // triton.next_power_of_2(self.blocks)))
        self.compiled_for["CHUNKS"] = self.partial
        self.rows, self.chunks = self.chunk(self.partial)
        self.share, self.shares = self.chunk(max(1, PROGRAMS // self.blocks))

    def sums(self, x: Tensor) -> Tensor:
        return x.new_empty(2, self.partial, self.channels, dtype=torch.float32)


def triton_batch_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_stats: tuple[Tensor, Tensor, Tensor] | None,
    momentum: float,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """Return relu(norm(x) + residual), and mean and inverse deviation of each channel for the backward pass.

    `running_stats` holds mean, variance and the number of batches so far; they are updated.
    """
    plan = _Plan(x)
    y, sums = torch.empty_like(x), plan.sums(x)
    saved = x.new_empty(2, plan.channels, dtype=torch.float32)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    plan.launch(_moments, plan.chunks, x, sums, plan.M, plan.rows)
    plan.launch(
        _normalise, plan.shares, x, x if residual is None else residual, y, weight, bias, sums, saved,
        *((saved, saved, saved) if running_stats is None else running_stats),
        plan.M, plan.rows, plan.chunks, plan.share, float(momentum), float(eps),
        RELU=relu, BESIDE=residual is not None, TRACKED=running_stats is not None,
    )  # fmt: skip
    return y, saved


def triton_batch_norm_backward(
    grad_output: Tensor, x: Tensor, y: Tensor, weight: Tensor, saved_stats: Tensor, relu: bool, has_residual: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the gradients of x, of the residual, of weight and of bias."""
    plan = _Plan(x)
    grad_output, sums = grad_output.contiguous(memory_format=torch.channels_last), plan.sums(x)
    d_x, d_beside = torch.empty_like(x), torch.empty_like(x) if has_residual and relu else None
    d_weight, d_bias = torch.empty_like(weight), torch.empty_like(weight)
    plan.launch(
        _slopes, plan.chunks, x, y, grad_output, x if d_beside is None else d_beside, saved_stats, sums, plan.M,
        plan.rows,
        RELU=relu, BESIDE=d_beside is not None,
    )  # fmt: skip
    masked = (
        grad_output if d_beside is None else d_beside
    )  # in d_beside, the first kernel has stored the gradient with ReLU applied
    plan.launch(
        _backward, plan.shares, x, y, masked, d_x, weight, d_weight, d_bias, saved_stats, sums,
        plan.M, plan.chunks, plan.share, RELU=relu and d_beside is None,
    )  # fmt: skip
    return d_x, (masked if has_residual else None), d_weight, d_bias
