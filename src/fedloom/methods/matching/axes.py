"""What lies along one axis of a tensor: units (neurons, channels) that may change places, and how axes are tied.

An axis is a row of segments. A segment is a set of units in their order, each taking `inner` positions: after
flattening maps of 8 x 8, every channel takes 64. Two axes that are added, or that meet in a product, must be permuted
alike: `tie` makes their units the same, and splits sets where only a part of them is tied. Units that must stay where
they are, such as pixels and classes, are fixed.
"""

from typing import NamedTuple


class AxisUnits:
    """A set of units with an order, which is permuted as a whole.

    It may turn out to be fixed, to be the same as another, or to consist of smaller sets, or of larger units.
    """

    def __init__(self, size: int, *, fixed: bool = False, coupled: bool = False) -> None:
        self.size = size
        self.fixed = fixed or size <= 1  # one alone has nowhere to go
        self.coupled = coupled
        """Whether what one of them computes depends on how many others there are, as in a norm over all of them."""
        self._same: AxisUnits | None = None
        self._parts: Axis | None = None

    def root(self) -> "AxisUnits":
        """The set that this one was found to be the same as."""
        return self if self._same is None else self._same.root()

    def leaves(self, inner: int = 1) -> "list[AxisSegment]":
        """What it was found to consist of, if each of its units takes `inner` positions."""
        root = self.root()
        if root._parts is None:
            return [AxisSegment(root, inner)]
        return [leaf for part in root._parts for leaf in part.units.leaves(part.inner * inner)]

    def join(self, other: "AxisUnits") -> None:
        """Say that this set and another of the same size are one; both are roots."""
        if self is not other:
            other.fixed |= self.fixed
            other.coupled |= self.coupled
            self._same = other

    def split(self, at: int) -> None:
        """Say that the first `at` units and the others do not mix."""
        self._parts = tuple(self._like(size) for size in (at, self.size - at))

    def bundle(self, count: int) -> None:
        """Say that its units move in bundles of `count` neighbours only."""
        self._parts = (self._like(self.size // count, count),)

    def _like(self, size: int, inner: int = 1) -> "AxisSegment":
        return AxisSegment(AxisUnits(size, fixed=self.fixed, coupled=self.coupled), inner)


class AxisSegment(NamedTuple):
    """Units along an axis, each taking `inner` positions."""

    units: AxisUnits
    inner: int = 1

    @property
    def length(self) -> int:
        return self.units.size * self.inner


Axis = tuple[AxisSegment, ...]


def make_fixed_axis(size: int) -> Axis:
    """An axis whose positions have their meaning."""
    return (AxisSegment(AxisUnits(size, fixed=True)),)


def make_permutable_axis(size: int) -> Axis:
    """An axis of units of its own."""
    return (AxisSegment(AxisUnits(size)),)


def resolve_axis_segments(axis: Axis) -> list[AxisSegment]:
    """The segments as they now stand, of sets that are not split."""
    return [leaf for segment in axis for leaf in segment.units.leaves(segment.inner)]


def axis_length(axis: Axis) -> int:
    return sum(segment.length for segment in axis)


def is_fixed_axis(axis: Axis) -> bool:
    return all(segment.units.fixed for segment in resolve_axis_segments(axis))


def fix_axis(axis: Axis) -> None:
    """Let nothing along this axis change places."""
    for segment in resolve_axis_segments(axis):
        segment.units.fixed = True


def couple_axis_units(axis: Axis) -> None:
    """Say that the units along this axis are normalised together."""
    for segment in resolve_axis_segments(axis):
        segment.units.coupled = True


def tie_axes(a: Axis, b: Axis) -> None:
    """Let two axes of the same length be permuted alike from now on."""
    if axis_length(a) != axis_length(b):
        raise ValueError(f"axes of {axis_length(a)} and {axis_length(b)} positions cannot be tied")
    while not _tied(a, b):
        pass


def _tied(a: Axis, b: Axis) -> bool:
    """Tie from the left; False when a set had to be split or fixed, so that one must start again."""
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
    """Let the first units of `fine` move in such bundles as one unit of `coarse` takes, or not at all."""
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
    """Split a segment's units where a position lies; units that the cut goes through cannot be permuted."""
    whole, rest = divmod(at, segment.inner)
    if rest:
        segment.units.fixed = True
    else:
        segment.units.split(whole)


def slice_axis(axis: Axis, start: int, size: int) -> Axis:
    """The piece of an axis from `start` on."""
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
    """Several axes as one, the last running fastest."""
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
    """One axis as several, where each unit takes enough positions to fill all but the first."""
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


def reshape_axes(axes: list[Axis], before: tuple[int, ...], after: tuple[int, ...]) -> list[Axis]:
    """The axes of a tensor of shape `before` when it is seen as one of shape `after`."""
    result = [make_fixed_axis(1) for _ in after]
    old = [i for i, size in enumerate(before) if size != 1]
    new = [i for i, size in enumerate(after) if size != 1]
    while old:
        olds, news = [old.pop(0)], [new.pop(0)]
        have, want = before[olds[0]], after[news[0]]
        while have != want:
            if have < want:
                olds.append(old.pop(0))
                have *= before[olds[-1]]
            else:
                news.append(new.pop(0))
                want *= after[news[-1]]
        axis = merge_axes([axes[i] for i in olds]) if len(olds) > 1 else axes[olds[0]]
        pieces = _split_axis(axis, [after[i] for i in news]) if len(news) > 1 else [axis]
        for i, piece in zip(news, pieces, strict=True):
            result[i] = piece
    return result
