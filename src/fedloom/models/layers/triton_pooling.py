"""Triton kernels for pooling, forward and backward.

Bias, maximum of four pixels and ReLU are one kernel, and their gradient is another.

torch needs three kernels forward, which write the index of the largest pixel as eight bytes, and four backward, one of
which only fills the gradient with zeros. Here an index is one byte.

The output of the pool is treated as a matrix, see `triton_tiling.py`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, no-untyped-call"
# mypy does not know the types of Triton's language.

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.models.layers.triton_tiling import Tiling, tile_channels, triton_tiling_relu_gradient

CHUNKS = 64
"""Maximum number of partial sums of a bias's gradient."""

TILE = 1024
"""Outputs of the pool that a program processes at once, from four times as many inputs."""


@triton.jit
def _behind(m, c, C: tl.constexpr, PIXELS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Return the offsets of these rows and channels in the output of the pool."""
    if CHANNELS_LAST:
        at = m[:, None] * C + c[None, :]
    else:
        at = (m // PIXELS)[:, None] * (C * PIXELS) + c[None, :] * PIXELS + (m % PIXELS)[:, None]
    return at


@triton.jit
def _before(m, c, C: tl.constexpr, PIXELS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Return the offsets of the first of their four pixels in the input of the pool."""
    pixel = m % PIXELS
    within = (pixel // WIDTH) * (4 * WIDTH) + 2 * (pixel % WIDTH)
    if CHANNELS_LAST:
        at = ((m // PIXELS) * (4 * PIXELS) + within)[:, None] * C + c[None, :]
    else:
        at = ((m // PIXELS) * (4 * PIXELS * C) + within)[:, None] + c[None, :] * (4 * PIXELS)
    return at


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["bias"])
def _forward(
    x, bias, y, which, M,
    C: tl.constexpr, PIXELS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * TALL + tl.arange(0, TALL)
    c, there = tile_channels(C, WIDE)
    inside = (m < M)[:, None] & there[None, :]
    first = x + _before(m, c, C, PIXELS, WIDTH, CHANNELS_LAST)
    right = C if CHANNELS_LAST else 1
    largest = tl.load(first, inside, 0.0).to(tl.float32)
    place = tl.zeros([TALL, WIDE], tl.int8)
    for k in tl.static_range(1, 4):
        value = tl.load(first + ((k // 2) * 2 * WIDTH + k % 2) * right, inside, 0.0).to(tl.float32)
        larger = (value > largest) | (value != value)  # NaN wins, as in torch
        largest = tl.where(larger, value, largest)
        place = tl.where(larger, k, place).to(tl.int8)
    value = largest + tl.load(bias + c, there, 0.0).to(tl.float32)[None, :]
    value = tl.where(value < 0, 0.0, value)
    at = _behind(m, c, C, PIXELS, CHANNELS_LAST)
    tl.store(y + at, value.to(y.dtype.element_ty), inside)
    tl.store(which + at, place, inside)


@triton.jit(do_not_specialize=["M", "rows"])
def _backward(
    g, y, which, d_x, sums, M, rows,
    C: tl.constexpr, PIXELS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    c, there = tile_channels(C, WIDE)
    first = tl.program_id(0) * rows
    end = tl.minimum(first + rows, M)
    right = C if CHANNELS_LAST else 1
    total = tl.zeros([TALL, WIDE], tl.float32)
    for start in range(first, end, TALL):
        m = start + tl.arange(0, TALL)
        inside = (m < end)[:, None] & there[None, :]
        at = _behind(m, c, C, PIXELS, CHANNELS_LAST)
        slope = triton_tiling_relu_gradient(g, y, at, inside, True)
        total += slope
        place = tl.load(which + at, inside, 0)
        corner = d_x + _before(m, c, C, PIXELS, WIDTH, CHANNELS_LAST)
        for k in tl.static_range(4):
            value = tl.where(place == k, slope, 0.0).to(d_x.dtype.element_ty)
            tl.store(corner + ((k // 2) * 2 * WIDTH + k % 2) * right, value, inside)
    tl.store(sums + tl.program_id(0) * C + c, tl.sum(total, 0), there)


class _Plan(Tiling):
    """How the work on the output of a pool is divided among programs, for inputs of this shape."""

    def __init__(self, shape: torch.Size, channels_last: bool) -> None:
        count, channels, height, width = shape
        down, across = height // 2, width // 2
        self.shape = count, channels, down, across
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        super().__init__(self.shape, channels_last, TILE)
        self.compiled_for |= {"PIXELS": down * across, "WIDTH": across, "CHANNELS_LAST": channels_last}


def triton_pooling_forward(x: Tensor, bias: Tensor, channels_last: bool) -> tuple[Tensor, Tensor]:
    """Return relu(pool(x) + bias) for maps with even sides, and which of the four pixels was the largest."""
    plan = _Plan(x.shape, channels_last)
    y = torch.empty(plan.shape, dtype=x.dtype, device=x.device, memory_format=plan.memory_format)
    which = torch.empty(plan.shape, dtype=torch.int8, device=x.device, memory_format=plan.memory_format)
    plan.launch(_forward, triton.cdiv(plan.M, plan.tall), x, bias, y, which, plan.M)
    return y, which


def triton_pooling_backward(
    grad_output: Tensor, y: Tensor, max_indices: Tensor, input_shape: torch.Size, channels_last: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, which had this shape, and of the bias."""
    plan = _Plan(input_shape, channels_last)
    rows, chunks = plan.chunk(CHUNKS)
    d_x = torch.empty(input_shape, dtype=grad_output.dtype, device=grad_output.device, memory_format=plan.memory_format)
    sums = torch.empty(chunks, plan.channels, dtype=torch.float32, device=grad_output.device)
    grad_output = grad_output.contiguous(memory_format=plan.memory_format)
    plan.launch(_backward, chunks, grad_output, y, max_indices, d_x, sums, plan.M, rows)
    return d_x, sums.sum(0)
