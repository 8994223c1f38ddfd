"""Axes of tensors as sequences of units (neurons, channels), and their ties.

Units may be permuted; tied axes are permuted alike.

An axis is a sequence of segments. A segment is an ordered set of units, each with `inner` positions: after flattening
maps of 8 x 8, every channel has 64. Two axes that are added, or that meet in a product, need the same permutation:
`tie_axes` makes their units the same, and splits sets if only a part of them is tied. Units that must stay in place,
such as pixels and classes, are fixed.
"""

from typing import NamedTuple


class AxisUnits:
    """An ordered set of units with one permutation.

    Tracing may find that it is fixed, is the same as another set, or consists of smaller sets or of larger units.
    """

    def __init__(self, size: int, *, fixed: bool = False, coupled: bool = False) -> None:
        self.size = size
        self.fixed = fixed or size <= 1  # a single unit cannot move
        self.coupled = coupled
        """Whether the output of a unit depends on the number of the others, as in a norm over all of them."""
        self._same: AxisUnits | None = None
        self._parts: Axis | None = None

    def root(self) -> "AxisUnits":
        """Return the set that stands for all that were found to be the same as this one."""
        return self if self._same is None else self._same.root()

    def leaves(self, inner: int = 1) -> "list[AxisSegment]":
        """Return the segments that it consists of, if each of its units has `inner` positions."""
        root = self.root()
        if root._parts is None:
            return [AxisSegment(root, inner)]
        return [leaf for part in root._parts for leaf in part.units.leaves(part.inner * inner)]

    def join(self, other: "AxisUnits") -> None:
        """Make this set and another of the same size one; both are roots."""
        if self is not other:
            other.fixed |= self.fixed
            other.coupled |= self.coupled
            self._same = other

    def split(self, at: int) -> None:
        """Split the first `at` units from the others."""
        self._parts = tuple(self._like(size) for size in (at, self.size - at))

    def bundle(self, count: int) -> None:
        """Let units move only in bundles of `count` neighbors."""
        self._parts = (self._like(self.size // count, count),)

    def _like(self, size: int, inner: int = 1) -> "AxisSegment":
        return AxisSegment(AxisUnits(size, fixed=self.fixed, coupled=self.coupled), inner)


class AxisSegment(NamedTuple):
    """Units along an axis, each with `inner` positions."""

    units: AxisUnits
    inner: int = 1

    @property
    def length(self) -> int:
        return self.units.size * self.inner


Axis = tuple[AxisSegment, ...]


def make_fixed_axis(size: int) -> Axis:
    """Return an axis whose positions must not move."""
    return (AxisSegment(AxisUnits(size, fixed=True)),)


def make_permutable_axis(size: int) -> Axis:
    """Return an axis with new units."""
    return (AxisSegment(AxisUnits(size)),)


def resolve_axis_segments(axis: Axis) -> list[AxisSegment]:
    """Return the present segments, in terms of sets that are not split."""
    return [leaf for segment in axis for leaf in segment.units.leaves(segment.inner)]


def axis_length(axis: Axis) -> int:
    return sum(segment.length for segment in axis)


def is_fixed_axis(axis: Axis) -> bool:
    return all(segment.units.fixed for segment in resolve_axis_segments(axis))


def fix_axis(axis: Axis) -> None:
    """Fix all units along this axis."""
    for segment in resolve_axis_segments(axis):
        segment.units.fixed = True


def couple_axis_units(axis: Axis) -> None:
    """Mark the units along this axis as normalized together."""
    for segment in resolve_axis_segments(axis):
        segment.units.coupled = True


def tie_axes(a: Axis, b: Axis) -> None:
    """Give two axes of the same length the same permutation."""
    if axis_length(a) != axis_length(b):
        raise ValueError(f"axes of {axis_length(a)} and {axis_length(b)} positions cannot be tied")
    while not _tied(a, b):
        pass


def _tied(a: Axis, b: Axis) -> bool:
    """Tie from the left; return False if a set was split or fixed and tying must start again."""
    left, right = resolve_axis_segments(a)[::-1], resolve_axis_segments(b)[::-1]
    while left:
        x, y = (AxisSegment(segment.units.root(), segment.inner) for segment in (left.pop(), right.pop()))
        if x.units.fixed or y.units.fixed:
            both = min(x.length, y.length)
            for segment, others in ((x, left), (y, right)):
                if not segment.units.fixed and segment.length > both:
                    _cut(segment, both)
                    return False
                segment.units.fixed = True
                if segment.length > both:
                    others.append(AxisSegment(AxisUnits(segment.length - both, fixed=True)))
        elif x.inner != y.inner:
            _bundle(*((x, y) if x.inner > y.inner else (y, x)))
            return False
        elif x.units.size == y.units.size:
            x.units.join(y.units)
        else:
            larger, smaller = (x, y) if x.units.size > y.units.size else (y, x)
            larger.units.split(smaller.units.size)
            return False
    return True


def _bundle(coarse: AxisSegment, fine: AxisSegment) -> None:
    """Bundle the first units of `fine` to the size of one unit of `coarse`, or fix them."""
    count, rest = divmod(coarse.inner, fine.inner)
    if rest or fine.units.size < count:
        coarse.units.fixed = fine.units.fixed = True
    elif fine.length > coarse.length:
        _cut(fine, coarse.length)
    elif fine.units.size % count:
        fine.units.split(fine.units.size // count * count)
    else:
        fine.units.bundle(count)


def _cut(segment: AxisSegment, at: int) -> None:
    """Split the units of a segment at a position; if that cuts through a unit, fix them."""
    whole, rest = divmod(at, segment.inner)
    if rest:
        segment.units.fixed = True
    else:
        segment.units.split(whole)


def slice_axis(axis: Axis, start: int, size: int) -> Axis:
    """Return the part of an axis from `start` on, of length `size`."""
    while True:
        taken: list[AxisSegment] = []
        place = 0
        for segment in resolve_axis_segments(axis):
            low, high = max(start, place), min(start + size, place + segment.length)
            if low < high:
                if high - low == segment.length:
                    taken.append(segment)
                elif segment.units.fixed:
                    taken.append(AxisSegment(AxisUnits(high - low, fixed=True)))
                else:
                    _cut(segment, low - place if low > place else high - place)
                    break
            place += segment.length
        else:
            return tuple(taken)


def merge_axes(axes: list[Axis]) -> Axis:
    """Merge axes into one; the last varies fastest."""
    result: Axis = (AxisSegment(AxisUnits(1, fixed=True)),)
    for axis in axes:
        if not is_fixed_axis(axis) and is_fixed_axis(result):
            result = tuple(resolve_axis_segments(axis)) * axis_length(result)
            continue
        fix_axis(axis)
        result = tuple(
            AxisSegment(segment.units, segment.inner * axis_length(axis)) for segment in resolve_axis_segments(result)
        )
    return result


def _split_axis(axis: Axis, sizes: list[int]) -> list[Axis]:
    """Split an axis into several, if each unit has enough positions to fill all but the first."""
    first, *others = sizes
    rest = axis_length(axis) // first
    if any(segment.inner % rest for segment in resolve_axis_segments(axis) if not segment.units.fixed):
        fix_axis(axis)
    if is_fixed_axis(axis):
        return [make_fixed_axis(size) for size in sizes]
    if any(segment.units.fixed for segment in resolve_axis_segments(axis)):
        fix_axis(axis)
        return [make_fixed_axis(size) for size in sizes]
    outer = tuple(AxisSegment(segment.units, segment.inner // rest) for segment in resolve_axis_segments(axis))
    return [outer, *(make_fixed_axis(size) for size in others)]


def reshape_axes(axes: list[Axis], old_shape: tuple[int, ...], new_shape: tuple[int, ...]) -> list[Axis]:
    """Return the axes of a tensor after a reshape from `old_shape` to `new_shape`."""
    result = [make_fixed_axis(1) for _ in new_shape]
    old = [i for i, size in enumerate(old_shape) if size != 1]
    new = [i for i, size in enumerate(new_shape) if size != 1]
    while old:
        olds, news = [old.pop(0)], [new.pop(0)]
        have, want = old_shape[olds[0]], new_shape[news[0]]
        while have != want:
            if have < want:
                olds.append(old.pop(0))
                have *= old_shape[olds[-1]]
            else:
                news.append(new.pop(0))
                want *= new_shape[news[-1]]
        axis = merge_axes([axes[i] for i in olds]) if len(olds) > 1 else axes[olds[0]]
        pieces = _split_axis(axis, [new_shape[i] for i in news]) if len(news) > 1 else [axis]
        for i, piece in zip(news, pieces, strict=True):
            result[i] = piece
    return result
