"""Rules for operations: what each does to the units along the axes of its tensors.

A convolution makes new units and consumes its input's, a sum ties two tensors, and flattening gives a channel several
positions. Each rule gets the tracer, the result and the arguments of a call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedloom.methods.matching.axes import (
    Axis,
    couple_axis_units,
    fix_axis,
    is_fixed_axis,
    make_fixed_axis,
    make_permutable_axis,
    merge_axes,
    reshape_axes,
    slice_axis,
    tie_axes,
)

if TYPE_CHECKING:
    from fedloom.methods.matching.symmetries import SymmetryTracer

Axes = list[Axis]


def find_operation_tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from find_operation_tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from find_operation_tensors(each)


def _pointwise_rule(trace: "SymmetryTracer", out: Any, *args: Any, **kwargs: Any) -> None:
    """Tie the units of all inputs; axes of size 1 are broadcast."""
    axes: list[Axis | None] = [None] * out.dim()
    for tensor in find_operation_tensors((args, kwargs)):
        if not trace.knows(tensor) and tensor.numel() and bool((tensor == tensor.flatten()[0]).all()):
            continue  # a constant with equal elements permutes freely
        for i, axis in enumerate(trace.of(tensor), start=out.dim() - tensor.dim()):
            if i < 0 or tensor.shape[i - out.dim()] == 1:
                continue
            known = axes[i]
            if known is not None:
                tie_axes(known, axis)
            axes[i] = known or axis
    trace.put(out, [axis or make_fixed_axis(n) for axis, n in zip(axes, out.shape, strict=True)])


def _linear_rule(
    trace: "SymmetryTracer", out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> None:
    trace.consume(weight, 1, trace.of(input)[-1])
    made = trace.of(weight)[0]
    if bias is not None:
        tie_axes(trace.of(bias)[0], made)
    trace.put(out, [*trace.of(input)[:-1], made])


def _matmul_rule(trace: "SymmetryTracer", out: Tensor, input: Tensor, other: Tensor) -> None:
    if other.dim() != 2 or input.dim() < 1:
        raise trace.unclear("it multiplies batches of matrices")
    trace.consume(other, 0, trace.of(input)[-1])
    trace.put(out, [*trace.of(input)[:-1], trace.of(other)[1]])


def _convolution_rule(
    trace: "SymmetryTracer",
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> None:
    if input.dim() != weight.dim():
        raise trace.unclear("it calls a convolution on an input without batch dimension")
    before, made = trace.of(input), trace.of(weight)[0]
    if groups == 1:
        trace.consume(weight, 1, before[1])
    elif groups == weight.shape[0] == input.shape[1]:
        tie_axes(made, before[1])
    else:
        raise trace.unclear(f"it calls a convolution with {groups} groups, which is not supported")
    if bias is not None:
        tie_axes(trace.of(bias)[0], made)
    for axis in (*before[2:], *trace.of(weight)[2:]):
        fix_axis(axis)
    trace.put(out, [before[0], made, *(make_fixed_axis(n) for n in out.shape[2:])])


def _batch_norm_rule(
    trace: "SymmetryTracer",
    out: Tensor,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> None:
    for tensor in (running_mean, running_var, weight, bias):
        if tensor is not None:
            tie_axes(trace.of(tensor)[0], trace.of(input)[1])
    trace.put(out, trace.of(input))


def _group_norm_rule(
    trace: "SymmetryTracer",
    out: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> None:
    channels = input.shape[1]
    if num_groups < channels:  # channels stay in their group
        couple_axis_units(trace.of(input)[1])
        if num_groups > 1:
            each = [make_permutable_axis(channels // num_groups)[0] for _ in range(num_groups)]
            tie_axes(trace.of(input)[1], tuple(each))
    _batch_norm_rule(trace, out, input, None, None, weight, bias)


def _layer_norm_rule(
    trace: "SymmetryTracer",
    out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    last = trace.of(input)[-len(normalized_shape) :]
    for i, axis in enumerate(last):
        couple_axis_units(axis)
        for tensor in (weight, bias):
            if tensor is not None:
                tie_axes(trace.of(tensor)[i], axis)
    trace.put(out, trace.of(input))


def _prelu_rule(trace: "SymmetryTracer", out: Tensor, input: Tensor, weight: Tensor) -> None:
    if weight.numel() > 1:
        tie_axes(trace.of(weight)[0], trace.of(input)[1])
    trace.put(out, trace.of(input))


def _softmax_rule(trace: "SymmetryTracer", out: Tensor, input: Tensor, dim: int = -1, *_: Any, **__: Any) -> None:
    couple_axis_units(trace.of(input)[dim])
    trace.put(out, trace.of(input))


def _make_pool_rule(spatial_dims: int) -> Callable[..., None]:
    """Return the rule of a pool over the last axes."""

    def rule(t: "SymmetryTracer", out: Any, input: Tensor, *_: Any, **__: Any) -> None:
        for axis in t.of(input)[-spatial_dims:]:
            fix_axis(axis)
        for tensor in find_operation_tensors(out):
            t.put(tensor, [*t.of(input)[:-spatial_dims], *(make_fixed_axis(n) for n in tensor.shape[-spatial_dims:])])

    return rule


def _reduction_rule(
    trace: "SymmetryTracer",
    out: Any,
    input: Tensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    axis: Any = None,
    **_: Any,
) -> None:
    """Handle a sum, mean or extremum over some axes, which does not depend on the order of units."""
    dim = axis if dim is None else dim
    dims = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % input.dim() for d in dims}
    for d in gone:
        couple_axis_units(trace.of(input)[d])
    kept = [
        make_fixed_axis(1) if d in gone else each for d, each in enumerate(trace.of(input)) if keepdim or d not in gone
    ]
    trace.put(out, kept)


def _reshape_rule(trace: "SymmetryTracer", out: Tensor, input: Tensor, *_: Any, **__: Any) -> None:
    trace.put(out, reshape_axes(trace.of(input), tuple(input.shape), tuple(out.shape)))


def _expand_rule(trace: "SymmetryTracer", out: Tensor, input: Tensor, *_: Any, **__: Any) -> None:
    axes: Axes = [make_fixed_axis(n) for n in out.shape]
    for i, axis in enumerate(trace.of(input), start=out.dim() - input.dim()):
        if input.shape[i - out.dim()] == out.shape[i]:
            axes[i] = axis
    trace.put(out, axes)


def _transpose_rule(trace: "SymmetryTracer", out: Tensor, input: Tensor, dim0: int = 0, dim1: int = 1) -> None:
    axes = list(trace.of(input))
    if len(axes) > 1:
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    trace.put(out, axes)


def _permute_rule(trace: "SymmetryTracer", out: Tensor, input: Tensor, *sizes: Any, dims: Any = None) -> None:
    order = dims or (sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    trace.put(out, [trace.of(input)[d] for d in order])


def _concatenation_rule(trace: "SymmetryTracer", out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> None:
    dim %= out.dim()
    axes = [trace.of(tensor) for tensor in tensors]
    for other in axes[1:]:
        for i in range(out.dim()):
            if i != dim:
                tie_axes(axes[0][i], other[i])
    together = tuple(segment for each in axes for segment in each[dim])
    trace.put(out, [together if i == dim else axis for i, axis in enumerate(axes[0])])


def _split_rule(trace: "SymmetryTracer", out: Sequence[Tensor], input: Tensor, _: Any, dim: int = 0) -> None:
    """Handle `chunk` and `split`."""
    start = 0
    for tensor in out:
        axes = list(trace.of(input))
        axes[dim] = slice_axis(axes[dim], start, tensor.shape[dim])
        trace.put(tensor, axes)
        start += tensor.shape[dim]


def _pad_rule(
    trace: "SymmetryTracer", out: Tensor, input: Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> None:
    axes = list(trace.of(input))
    for i in range(len(pad) // 2):
        low, high = pad[2 * i], pad[2 * i + 1]
        d = len(axes) - 1 - i
        if not low and not high:
            continue
        if mode != "constant" or min(low, high) < 0:
            fix_axis(axes[d])
        if is_fixed_axis(axes[d]):
            axes[d] = make_fixed_axis(out.shape[d])
        else:  # padded units are equal, so they may be permuted
            axes[d] = (
                *(make_permutable_axis(low) if low else ()),
                *axes[d],
                *(make_permutable_axis(high) if high else ()),
            )
    trace.put(out, axes)


def _getitem_rule(trace: "SymmetryTracer", out: Tensor, input: Tensor, index: Any) -> None:
    keys = list(index) if isinstance(index, tuple) else [index]
    if not all(key is None or key is Ellipsis or isinstance(key, int | slice) for key in keys):
        raise trace.unclear("it selects units by index")
    if any(key is Ellipsis for key in keys):
        at = keys.index(Ellipsis)
        keys[at : at + 1] = [slice(None)] * (input.dim() - sum(k is not None for k in keys) + 1)
    keys += [slice(None)] * (input.dim() - sum(key is not None for key in keys))
    axes, made = iter(zip(trace.of(input), input.shape, strict=True)), []
    for key in keys:
        if key is None:
            made.append(make_fixed_axis(1))
            continue
        axis, size = next(axes)
        if isinstance(key, int):
            fix_axis(axis)
            continue
        start, stop, step = key.indices(size)
        if step != 1:
            fix_axis(axis)
            made.append(make_fixed_axis(len(range(start, stop, step))))
        else:
            made.append(slice_axis(axis, start, max(0, stop - start)))
    trace.put(out, made)


def _embedding_rule(trace: "SymmetryTracer", out: Tensor, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    fix_axis(trace.of(weight)[0])
    trace.consuming.add((id(weight), 0))
    trace.put(out, [*trace.of(input), trace.of(weight)[1]])


def _recurrent_rule(
    trace: "SymmetryTracer",
    out: tuple[Tensor, ...],
    input: Tensor,
    hx: Any,
    weights: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> None:
    """Handle LSTM, GRU and plain recurrent layers: all gates and the state have the same units."""
    each, count = (4 if has_biases else 2), num_layers * (2 if bidirectional else 1)
    if not isinstance(weights, list | tuple) or len(weights) != each * count:
        raise trace.unclear("a recurrent layer has a projection or packed sequences")
    if any(trace.knows(tensor) for tensor in find_operation_tensors(hx)):
        raise trace.unclear("a recurrent layer starts from a state that is not constant")
    below: Axis = trace.of(input)[-1]
    above: list[Axis] = []
    for i in range(count):
        w_ih, w_hh, *biases = weights[each * i : each * (i + 1)]
        hidden = make_permutable_axis(w_hh.shape[1])
        gates = merge_axes([make_fixed_axis(w_hh.shape[0] // w_hh.shape[1]), hidden])
        for tensor in (w_ih, w_hh, *biases):
            tie_axes(trace.of(tensor)[0], gates)
        trace.consume(w_ih, 1, below)
        trace.consume(w_hh, 1, hidden)
        above.append(hidden)
        if len(above) == count // num_layers:  # both directions of this layer
            below, above = tuple(segment for axis in above for segment in axis), []
    sequence, *states = out
    trace.put(sequence, [*(make_fixed_axis(n) for n in sequence.shape[:-1]), below])
    for state in states:
        trace.put(state, [*(make_fixed_axis(n) for n in state.shape[:-1]), below] if count == 1 else None)


POINTWISE = (
    "relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign hardtanh hardswish hardsigmoid logsigmoid "
    "sigmoid tanh exp log sqrt rsqrt square abs neg pow clamp clip sin cos erf sign positive "
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout "
    "add radd iadd sub rsub isub mul rmul imul div rdiv truediv rtruediv itruediv maximum minimum where "
    "contiguous clone detach float double to type type_as data"
)
"""Elementwise operations."""

RULES: dict[str, Callable[..., None]] = {
    "linear": _linear_rule,
    "matmul": _matmul_rule,
    "mm": _matmul_rule,
    "batch_norm": _batch_norm_rule,
    "instance_norm": _batch_norm_rule,
    "group_norm": _group_norm_rule,
    "layer_norm": _layer_norm_rule,
    "prelu": _prelu_rule,
    "permute": _permute_rule,
    "expand": _expand_rule,
    "expand_as": _expand_rule,
    "pad": _pad_rule,
    "getitem": _getitem_rule,
    "embedding": _embedding_rule,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution_rule),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax_rule),
    **dict.fromkeys(("mean", "sum", "amax", "amin"), _reduction_rule),
    **dict.fromkeys(("cat", "concat", "concatenate"), _concatenation_rule),
    **dict.fromkeys(("chunk", "split"), _split_rule),
    **dict.fromkeys(("transpose", "swapaxes", "t", "T"), _transpose_rule),
    **dict.fromkeys(("flatten", "view", "reshape", "squeeze", "unsqueeze", "unflatten", "view_as"), _reshape_rule),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent_rule),
    **{
        f"{kind}_pool{n}d": _make_pool_rule(n)
        for kind in ("max", "avg", "lp", "adaptive_max", "adaptive_avg")
        for n in (1, 2, 3)
    },
    **dict.fromkeys(POINTWISE.split(), _pointwise_rule),
}
"""The rule of each known operation, by name."""
