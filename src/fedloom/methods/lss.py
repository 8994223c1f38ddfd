"""Local Superior Soups: a client grows a pool of models in one valley of its loss, and sends their mean.

Chen et al., "Local Superior Soups: A Catalyst for Reducing Communication Rounds in Federated Learning with
Pre-trained Model"; NeurIPS 2024. The client receives f_p, and with the pool M = {f_p}, for i = 1 .. n:

    f_i = mean of M;  M = M + {f_i}                                       only f_i is trained
    each step:  f_s = sum_m a_m m,  a uniform on the simplex over M       (connectivity)
                f_i -= eta * gradient of
                       L(f_s) + la dist(f_i, f_p) - ld 1/|M| sum_{m in M} dist(f_i, m)      (affinity, diversity)

and sends the mean of M. The gradient of f_i is a_i times the gradient at f_s, plus that of the distances.

Where the paper is silent or odd: with the plain L2 distance of whole models, coefficients of 3 hold every f_i at f_p
(docs/lss.md), so by default distances are squared, as in the authors' code, and in units of the norm of f_p;
`distance=l2` with `scale=absolute` is the letter of the text. An L2 distance has no gradient at 0, where f_1 starts: it
is taken as 0. There is one set of batch norm's statistics, which every forward pass updates, as in the authors' code.
That code also differs from the paper: f_p is not in the pool (`include_init`), the first member is trained alone and
longer (`first_alone`, `first_epochs`), and diversity is the squared volume of the simplex (`spread`).

Where the run says `keep_optimizer`, the first member goes on with what the client's first member knew in its last
round, as in a soup: both train the received model. With `new_optimizer=false` one optimiser trains all members, and
goes on as the last has left it.

Members are kept as their way from f_p, so f_p itself is a row of zeros that need not be kept, and distances between
models that are almost equal lose no digits. The gradient of every regulariser is a combination of these rows.
"""

from collections.abc import Iterator
from math import factorial
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.methods.base import Client, Options
from fedloom.methods.registry import Method, register
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer

NOISE = 1e-5
"""A squared distance of less than this share of the squared ways is rounding, and counts as this much: divided by a
smaller one the push could be of any size."""


class LSSOptions(Options):
    models: int = Field(4, ge=0)
    """members that a client trains, one after the other (n)"""
    epochs: int | None = Field(None, ge=0)
    """epochs of each member; by default those of the run, for each"""
    steps: int | None = Field(None, ge=0)
    """steps of each member, instead of epochs"""
    share: bool = False
    """share the run's epochs or steps among the members instead: as much work as FedAvg"""
    affinity: float = Field(3.0, ge=0)
    """pull of a member to the received model (lambda_a)"""
    diversity: float = Field(3.0, ge=0)
    """push of a member away from the others (lambda_d)"""
    distance: Literal["l2", "squared"] = "squared"
    """distance of two models: the L2 norm of their difference, or its square"""
    scale: Literal["relative", "absolute"] = "relative"
    """distances in units of the norm of the received model, or as they are"""
    spread: Literal["mean", "volume"] = "mean"
    """what diversity is: the mean distance to the pool, or the squared volume of the simplex it spans"""
    include_init: bool = True
    """whether the received model is in the pool, and so in the mean"""
    first_alone: bool = False
    """train the first member by itself, without interpolation and diversity"""
    first_epochs: int | None = Field(None, ge=0)
    """epochs of the first member, where they differ from the others'"""
    new_optimizer: bool = True
    """a new optimiser for each member"""
    estimate: bool = False
    """estimate batch norm's statistics of the mean anew, as `--statistics estimated` does for every method"""

    @model_validator(mode="after")
    def _consistent(self) -> "LSSOptions":
        if self.share and not (self.epochs is self.steps is self.first_epochs is None):
            raise ValueError("share divides the run's own epochs, so it goes without epochs, steps and first_epochs.")
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps of a member are given, but one of them is enough.")
        if self.diversity:
            self._refuse_unbounded()
        return self

    def _refuse_unbounded(self) -> None:
        """Far away all distances are alike, so it is enough to compare how pull and push grow."""
        count = self.models + self.include_init
        if self.spread == "volume":
            if self.distance != "squared":
                raise ValueError(
                    "spread=volume needs distance=squared: a squared volume outgrows an L2 distance, so the loss "
                    "would have no minimum, and members would run away."
                )
            if self.affinity <= self.diversity:
                raise ValueError(
                    f"affinity must be above diversity with spread=volume, not {self.affinity} against "
                    f"{self.diversity}: the volume of two models is their distance, so the loss would have no minimum, "
                    "and members would run away."
                )
            return
        push = self.diversity * (count - 1)
        if self.affinity * count < push or (self.affinity * count == push > 0 and self.distance == "squared"):
            raise ValueError(
                f"affinity must be above {push / count:g}, which is diversity x {count - 1}/{count} for a pool of "
                f"{count}, not {self.affinity}: the push to the outside would win, the loss would have no minimum, and "
                "members would run away."
            )


class LSSClient(Client[LSSOptions]):
    """Algorithm 1 of the paper."""

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        o, parameters = self.options, bench.layout.trainable
        f_p, f_i = bench.received[:parameters], bench.weights
        pool = bench.buffer("lss pool", o.models, parameters)  # row m is the way from f_p to member m
        point = bench.scratch["point"] = bench.buffer("lss point", bench.layout.size)  # f_s, and its statistics
        unit = bench.scratch["unit"] = bench.buffer("lss unit")
        norm = torch.linalg.vector_norm(f_p)
        unit.copy_(torch.where((norm > 0) & (o.scale == "relative"), norm, 1.0))
        for i in range(o.models):
            if i:
                self.mean(bench, pool[:i])
                if o.new_optimizer:
                    bench.new_optimizer()
            bench.scratch["rows"] = pool[: i + 1]
            bench.scratch["alone"] = not i and (o.first_alone or not o.include_init)
            self.survey(bench, pool[:i])
            if bench.scratch["alone"]:
                yield self.stretch(bench, i)
            else:
                point.copy_(bench.row)
                bench.bind(point)
                yield self.stretch(bench, i)
                bench.row[parameters:] = point[parameters:]
                bench.bind(bench.row)
            torch.sub(f_i, f_p, out=pool[i])
            if not i and o.new_optimizer:
                bench.keep_optimizer()
        if o.models:
            self.mean(bench, pool)
            if o.new_optimizer and bench.training.keep_optimizer:
                bench.new_optimizer()
                bench.recall_optimizer()  # of what the first member knew, for that is kept
        if o.estimate and bench.training.statistics != "estimated":
            bench.estimate_statistics()

    def mean(self, bench: LocalTrainer, members: Tensor) -> None:
        """Put the mean of the pool into the client's row: where a member starts, and what is sent."""
        count = len(members) + self.options.include_init
        if count == 1:
            return  # the one member lies there already
        torch.add(bench.received[: len(bench.weights)], members.sum(0), alpha=1 / count, out=bench.weights)

    def stretch(self, bench: LocalTrainer, i: int) -> LocalSteps:
        """How long member i is trained."""
        o = self.options
        if o.share:
            total = bench.length(LocalSteps(self.step))
            return LocalSteps(self.step, steps=total * (i + 1) // o.models - total * i // o.models)
        if not i and o.first_epochs is not None:
            return LocalSteps(self.step, o.first_epochs)
        return LocalSteps(self.step, o.epochs, o.steps)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        rows, f_p = bench.scratch["rows"], bench.received[: len(bench.weights)]
        torch.sub(bench.weights, f_p, out=rows[-1])
        if bench.scratch["alone"]:
            return super().step(bench, batch)
        a = lss_simplex_weights(len(rows) + self.options.include_init, rows)[-len(rows) :]
        torch.addmv(f_p, rows.T, a, out=bench.scratch["point"][: len(f_p)])  # f_s
        loss = bench.loss(batch)
        bench.backward(loss)
        bench.gradient.mul_(a[-1])
        self.correct(bench)
        bench.descend()
        return loss

    def correct(self, bench: LocalTrainer) -> None:
        """Add the gradient of affinity and diversity."""
        if self.options.affinity or self.options.diversity:
            rows, pulls = bench.scratch["rows"], bench.scratch["pulls"]
            bench.gradient.addmv_(rows.T, self.pulls(bench, rows @ rows[-1]) if pulls is None else pulls)

    def pulls(self, bench: LocalTrainer, products: Tensor) -> Tensor:
        """The weights of the pool's rows in the regularisers' gradient; `products` are theirs with the last row."""
        o = self.options
        unit: Tensor = bench.scratch["unit"]

        def slope(square: Tensor) -> Tensor:
            """The gradient of dist(x, m) is (x - m) times this; `square` is |x - m|^2."""
            if o.distance == "squared":
                return (2 / unit**2).expand_as(square)
            return torch.where(square > 0, square.rsqrt(), 0.0) / unit

        others, own = products[:-1], products[-1]
        pulls = torch.zeros_like(products)
        pulls[-1] = o.affinity * slope(own)
        if bench.scratch["alone"] or not o.diversity:
            return pulls
        if o.spread == "volume":
            push = o.diversity * bench.scratch["growth"] * 2 / unit**2
            pulls[-1] -= push
            pulls[:-1] += push * (bench.scratch["hull"] @ others + bench.scratch["offset"])
            return pulls
        squares = bench.scratch["squares"]
        share = o.diversity / (len(products) + o.include_init)
        push = share * slope(torch.maximum(own - 2 * others + squares, NOISE * (own + squares)))
        pulls[:-1] += push
        pulls[-1] -= push.sum() + o.include_init * share * slope(own)
        return pulls

    def survey(self, bench: LocalTrainer, frozen: Tensor) -> None:
        """What the regularisers need to know about the members that no longer move.

        The simplex of the pool has a base, spanned by its k frozen members, and a height, the distance of x from their
        plane. So its squared volume is (base / k)^2 |x - projection of x|^2, and the projection of x is a combination
        of frozen members with weights that are linear in their products with x.
        """
        o, count = self.options, len(frozen)

        def keep(name: str, value: Tensor) -> None:
            bench.scratch[name] = bench.buffer(f"lss {name} {count}", *value.shape).copy_(value)

        gram = (frozen @ frozen.T).double()
        keep("squares", gram.diagonal())
        bench.scratch["pulls"] = None
        if o.spread == "mean" or bench.scratch["alone"]:
            if o.distance == "squared":  # then the pulls are the same wherever x is
                keep("pulls", self.pulls(bench, frozen.new_zeros(count + 1)))
            return
        one = torch.eye(count, dtype=gram.dtype, device=gram.device)
        edges = one if o.include_init else one[1:] - one[:1]  # from f_p, or from the first member
        base = (edges @ gram @ edges.T).nan_to_num(0.0, 0.0, 0.0)  # what has broken down is refused by the server
        hull = edges.T @ torch.linalg.pinv(base, hermitian=True, rtol=NOISE) @ edges
        keep("hull", hull)
        keep("offset", one.new_zeros(count) if o.include_init else one[0] - hull @ gram[0])
        growth = torch.linalg.det(base / bench.scratch["unit"].double() ** 2) / factorial(count + o.include_init) ** 2
        keep("growth", growth.clamp(0, 1))  # above 1 it would grow faster than the affinity that is held against it


def lss_simplex_weights(count: int, like: Tensor) -> Tensor:
    """A point drawn uniformly from the simplex: `count` weights that sum to 1."""
    draws = torch.empty(count, dtype=like.dtype, device=like.device).exponential_()
    return draws / draws.sum()


register(
    Method(
        name="lss",
        summary="each client sends the mean of a pool of models that it grew in one valley",
        reference="Chen et al., NeurIPS 2024",
        options=LSSOptions,
        local=LSSClient,
        neutral={
            **{"models": 1, "include_init": False, "affinity": 0.0, "diversity": 0.0},
            **{"epochs": None, "steps": None, "first_epochs": None, "estimate": False},
        },
        models_sent="2K",
        extra_compute="client 4x",
    )
)
