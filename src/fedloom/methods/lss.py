"""Local Superior Soups: each client averages a pool of models.

It trains them from one start, in one low-loss region.

Chen et al., "Local Superior Soups: A Catalyst for Reducing Communication Rounds in Federated Learning with
Pre-trained Model"; NeurIPS 2024. The client receives f_p. It starts with the pool M = {f_p}, and for i = 1 .. n:

    f_i = mean of M;  M = M + {f_i}                                       only f_i is trained
    each step:  f_s = sum_m a_m m,  a uniform on the simplex over M       (connectivity)
                f_i -= eta * gradient of
                       L(f_s) + la dist(f_i, f_p) - ld 1/|M| sum_{m in M} dist(f_i, m)      (affinity, diversity)

It sends the mean of M. The gradient of f_i is a_i times the gradient at f_s, plus that of the distances.

The paper is unclear about distances. With the plain L2 distance of whole models, coefficients of 3 keep every f_i at
f_p (docs/lss.md). So by default distances are squared, as in the authors' code, and relative to the norm of f_p;
`distance=l2` with `scale=absolute` follows the text literally. An L2 distance has no gradient at 0, the start of f_1;
it is taken as 0. There is one set of batch-norm statistics, which every forward pass updates, as in the authors' code.
That code also differs from the paper: f_p is not in the pool (`include_init`), the first member trains alone and
longer (`first_alone`, `first_epochs`), and diversity is the squared volume of the simplex (`spread`).

With `keep_optimizer`, the first member continues with the optimizer state of the client's first member in its last
round, as in a soup: both train the received model. With `new_optimizer=false` one optimizer trains all members, and the
client's next round continues with its state.

Members are stored as differences from f_p. So f_p itself is zero and need not be stored, and distances between almost
equal models lose no digits. The gradient of every regularizer is a linear combination of these rows.
"""

from collections.abc import Iterator
from math import factorial
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.methods.base import Client, Options
from fedloom.methods.registry import register
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer

NOISE = 1e-5
"""Lower bound of a squared distance, relative to the squared distances from f_p. Smaller values are rounding errors;
dividing by them could make the push arbitrarily large."""

ACCEPT = "To try it nevertheless, set lss.allow_unbounded=true."


class LSSOptions(Options):
    models: int = Field(4, ge=0)
    """number of members that a client trains, one after the other (n)"""
    epochs: int | None = Field(None, ge=0)
    """epochs of each member; those of the run by default"""
    steps: int | None = Field(None, ge=0)
    """steps of each member, instead of epochs"""
    share: bool = False
    """divide the run's epochs or steps among the members: as much work as FedAvg"""
    affinity: float = Field(3.0, ge=0)
    """pull of a member towards the received model (lambda_a)"""
    diversity: float = Field(3.0, ge=0)
    """push of a member away from the others (lambda_d)"""
    distance: Literal["l2", "squared"] = "squared"
    """distance of two models: the L2 norm of their difference, or its square"""
    scale: Literal["relative", "absolute"] = "relative"
    """distances relative to the norm of the received model, or absolute"""
    spread: Literal["mean", "volume"] = "mean"
    """definition of diversity: the mean distance to the pool, or the squared volume of the simplex it spans"""
    include_init: bool = True
    """include the received model in the pool and in the mean"""
    first_alone: bool = False
    """train the first member alone, without interpolation and diversity"""
    first_epochs: int | None = Field(None, ge=0)
    """epochs of the first member, if they differ from the others'"""
    new_optimizer: bool = True
    """create a new optimizer for each member"""
    estimate: bool = False
    """estimate the batch-norm statistics of the mean again, as `--statistics estimated` does for every method"""
    allow_unbounded: bool = False
    """accept an affinity and a diversity with which the loss has no minimum, as Figure 5 of the paper has them"""

    @model_validator(mode="after")
    def _consistent(self) -> "LSSOptions":
        if self.share and not (self.epochs is self.steps is self.first_epochs is None):
            raise ValueError("share divides the run's own epochs; do not set epochs, steps or first_epochs with it.")
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps are both set, but one of them is enough; remove one.")
        if self.diversity and not self.allow_unbounded:
            self._refuse_unbounded()
        return self

    def _refuse_unbounded(self) -> None:
        """Refuse a loss without a minimum. Far away all distances are alike, so compare how pull and push grow."""
        count = self.models + self.include_init
        if self.spread == "volume":
            if self.distance != "squared":
                raise ValueError(
                    "spread=volume needs distance=squared: a squared volume grows faster than an L2 distance, so the "
                    f"loss would have no minimum and members would diverge. {ACCEPT}"
                )
            if self.affinity <= self.diversity:
                raise ValueError(
                    f"affinity must be above diversity with spread=volume, not {self.affinity} against "
                    f"{self.diversity}: the volume of two models is their distance, so the loss would have no minimum "
                    f"and members would diverge. {ACCEPT}"
                )
            return
        push = self.diversity * (count - 1)
        if self.affinity * count < push or (self.affinity * count == push > 0 and self.distance == "squared"):
            raise ValueError(
                f"affinity must be above {push / count:g}, which is diversity x {count - 1}/{count} for a pool of "
                f"{count}, not {self.affinity}: the push would exceed the pull, so the loss would have no minimum and "
                f"members would diverge. {ACCEPT}"
            )


@register(
    "lss",
    reference="Chen et al., NeurIPS 2024",
    neutral={
        **{"models": 1, "include_init": False, "affinity": 0.0, "diversity": 0.0},
        **{"epochs": None, "steps": None, "first_epochs": None, "estimate": False},
    },
    extra_compute="client 4x",
)
class LSSClient(Client[LSSOptions]):
    """Each client averages a pool of models trained from one start.

    This is Algorithm 1 of the paper.
    """

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        o, parameters = self.options, trainer.layout.trainable
        f_p, f_i = trainer.received[:parameters], trainer.weights
        pool = trainer.buffer("lss pool", o.models, parameters)  # row m is member m minus f_p
        point = trainer.scratch["point"] = trainer.buffer("lss point", trainer.layout.size)  # f_s with its statistics
        unit = trainer.scratch["unit"] = trainer.buffer("lss unit")
        norm = torch.linalg.vector_norm(f_p)
        unit.copy_(torch.where((norm > 0) & (o.scale == "relative"), norm, 1.0))
        for i in range(o.models):
            if i:
                self.mean(trainer, pool[:i])
                if o.new_optimizer:
                    trainer.new_optimizer()
            trainer.scratch["rows"] = pool[: i + 1]
            trainer.scratch["alone"] = not i and (o.first_alone or not o.include_init)
            self.survey(trainer, pool[:i])
            if trainer.scratch["alone"]:
                yield self.member_steps(trainer, i)
            else:
                point.copy_(trainer.row)
                trainer.bind(point)
                yield self.member_steps(trainer, i)
                trainer.row[parameters:] = point[parameters:]
                trainer.bind(trainer.row)
            torch.sub(f_i, f_p, out=pool[i])
            if not i and o.new_optimizer:
                trainer.save_optimizer_state()
        if o.models:
            self.mean(trainer, pool)
            if o.new_optimizer and trainer.config.keep_optimizer:
                trainer.new_optimizer()
                trainer.load_optimizer_state()  # that of the first member, which is the one to keep
        if o.estimate and trainer.config.statistics != "estimated":
            trainer.update_batch_norm_statistics()

    def mean(self, trainer: LocalTrainer, members: Tensor) -> None:
        """Write the mean of the pool to the client's row: the start of a member, and the model to send."""
        count = len(members) + self.options.include_init
        if count == 1:
            return  # the row holds the only member already
        torch.add(trainer.received[: len(trainer.weights)], members.sum(0), alpha=1 / count, out=trainer.weights)

    def member_steps(self, trainer: LocalTrainer, i: int) -> LocalSteps:
        """Return the training steps of member i."""
        o = self.options
        if o.share:
            total = trainer.num_steps(LocalSteps(self.training_step))
            return LocalSteps(self.training_step, steps=total * (i + 1) // o.models - total * i // o.models)
        if not i and o.first_epochs is not None:
            return LocalSteps(self.training_step, o.first_epochs)
        return LocalSteps(self.training_step, o.epochs, o.steps)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        rows, f_p = trainer.scratch["rows"], trainer.received[: len(trainer.weights)]
        torch.sub(trainer.weights, f_p, out=rows[-1])
        if trainer.scratch["alone"]:
            return super().training_step(trainer, batch)
        a = lss_simplex_weights(len(rows) + self.options.include_init, rows)[-len(rows) :]
        torch.addmv(f_p, rows.T, a, out=trainer.scratch["point"][: len(f_p)])  # f_s
        loss = trainer.loss(batch)
        trainer.backward(loss)
        trainer.gradient.mul_(a[-1])
        self.adjust_gradient(trainer)
        trainer.optimizer_step()
        return loss

    def adjust_gradient(self, trainer: LocalTrainer) -> None:
        """Add the gradient of affinity and diversity."""
        if self.options.affinity or self.options.diversity:
            rows, pulls = trainer.scratch["rows"], trainer.scratch["pulls"]
            trainer.gradient.addmv_(rows.T, self.pulls(trainer, rows @ rows[-1]) if pulls is None else pulls)

    def pulls(self, trainer: LocalTrainer, products: Tensor) -> Tensor:
        """Return the rows' weights in the gradient of the regularizers; `products` are those with the last row."""
        o = self.options
        unit: Tensor = trainer.scratch["unit"]

        def slope(square: Tensor) -> Tensor:
            """Return s with gradient of dist(x, m) = s (x - m); `square` is |x - m|^2."""
            if o.distance == "squared":
                return (2 / unit**2).expand_as(square)
            return torch.where(square > 0, square.rsqrt(), 0.0) / unit

        others, own = products[:-1], products[-1]
        pulls = torch.zeros_like(products)
        pulls[-1] = o.affinity * slope(own)
        if trainer.scratch["alone"] or not o.diversity:
            return pulls
        if o.spread == "volume":
            push = o.diversity * trainer.scratch["growth"] * 2 / unit**2
            pulls[-1] -= push
            pulls[:-1] += push * (trainer.scratch["hull"] @ others + trainer.scratch["offset"])
            return pulls
        squares = trainer.scratch["squares"]
        share = o.diversity / (len(products) + o.include_init)
        push = share * slope(torch.maximum(own - 2 * others + squares, NOISE * (own + squares)))
        pulls[:-1] += push
        pulls[-1] -= push.sum() + o.include_init * share * slope(own)
        return pulls

    def survey(self, trainer: LocalTrainer, frozen: Tensor) -> None:
        """Compute what the regularizers need of the frozen members.

        The simplex of the pool has a base, spanned by its k frozen members, and a height, the distance of x from their
        plane. Its squared volume is (base / k)^2 |x - projection of x|^2. The projection of x is a combination of the
        frozen members, with weights that are linear in their products with x.
        """
        o, count = self.options, len(frozen)

        def keep(name: str, value: Tensor) -> None:
            trainer.scratch[name] = trainer.buffer(f"lss {name} {count}", *value.shape).copy_(value)

        gram = (frozen @ frozen.T).double()
        keep("squares", gram.diagonal())
        trainer.scratch["pulls"] = None
        if o.spread == "mean" or trainer.scratch["alone"]:
            if o.distance == "squared":  # then the pulls do not depend on x
                keep("pulls", self.pulls(trainer, frozen.new_zeros(count + 1)))
            return
        one = torch.eye(count, dtype=gram.dtype, device=gram.device)
        edges = one if o.include_init else one[1:] - one[:1]  # from f_p, or from the first member
        base = (edges @ gram @ edges.T).nan_to_num(0.0, 0.0, 0.0)  # the server rejects models that are not finite
        hull = edges.T @ torch.linalg.pinv(base, hermitian=True, rtol=NOISE) @ edges
        keep("hull", hull)
        keep("offset", one.new_zeros(count) if o.include_init else one[0] - hull @ gram[0])
        growth = torch.linalg.det(base / trainer.scratch["unit"].double() ** 2) / factorial(count + o.include_init) ** 2
        keep("growth", growth.clamp(0, 1))  # above 1 the push would outgrow the affinity


def lss_simplex_weights(count: int, reference: Tensor) -> Tensor:
    """Draw a uniform point of the simplex: `count` weights that sum to 1."""
    draws = torch.empty(count, dtype=reference.dtype, device=reference.device).exponential_()
    return draws / draws.sum()
