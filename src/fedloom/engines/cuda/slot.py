"""A slot of the CUDA engine: a bench whose tensors stay where they are, so that its steps can be recorded.

A client's whole training is put into the slot's stream without waiting for any of it. So batches are not cut when their
step comes: those of a whole pass are laid out before it (stock.py), and the same recording serves every step with a
batch of that size. Losses are noted on the device too and read at the end.
"""

import copy
import itertools
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fedloom.config import TrainingConfig
from fedloom.core.rng import GLOBAL_RNG_LOCK, use_generator
from fedloom.data import Samples
from fedloom.devices.cuda_graphs import MAX_GRAPHS, EagerRunner, StepKinds, make_graph_runner
from fedloom.engines.cuda.batch_queue import BatchQueue
from fedloom.engines.cuda.graph_key import (
    ALWAYS_READ,
    GraphKeyAttribute,
    GraphKeyConfig,
    GraphKeyStep,
    build_graph_key,
    graph_key_tensors,
    inspect_graph_key_step,
    modules_graph_key,
    tensor_graph_key,
)
from fedloom.training.batches import Positions
from fedloom.training.context import Step, TrainingContext
from fedloom.training.optimizers import SGD, StatefulOptimizer, make_optimizer
from fedloom.training.trainer import LocalSteps, LocalTrainer


def _is_restorable_tensor(tensor: Tensor) -> bool:
    """Whether it can be written over; others no step changes in place either."""
    usual = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.is_inference())
    return usual and all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _detach_loss(loss: Tensor) -> Tensor:
    """A loss that nobody changes in place later on."""
    fresh = loss.grad_fn is not None and loss._base is None and not loss._version
    return loss.detach() if fresh else loss.detach().clone()


MOST_OPTIMIZERS = 8
"""Optimisers whose state a slot keeps in its place, for methods that train with several settings in turn."""

_NONE = SGD()
"""In the place of an optimiser that nobody holds any longer."""

STEPS_PER_GRAPH = 8
"""Steps in one recording at most, where there are so many with batches of one size in a row."""


class _Kept(NamedTuple):
    """The state of an optimiser, which stays where it is for the next; and itself, as long as somebody has it."""

    optimizer: weakref.ref[StatefulOptimizer]
    state: dict[str, Any]


class CudaSlot(LocalTrainer):
    """A bench with memory of its own, a stream and a tape."""

    round, client, first_visit, steps = (
        GraphKeyAttribute(),
        GraphKeyAttribute(),
        GraphKeyAttribute(),
        GraphKeyAttribute(),
    )

    def __init__(self, shop: TrainingContext, device: torch.device, urgency: int = 0) -> None:
        self.host: dict[str, Any] = {}
        self.listening: set[str] | None = None
        super().__init__(copy_slot_context(shop), device)
        layout, self._optimizers = shop.layout, dict[Hashable, _Kept]()
        self._parts = list(self.module.modules())
        self._generator, self._noise = torch.Generator(self.device), torch.Generator(self.device)
        self.tape = make_graph_runner(self.device, (self._generator, self._noise), urgency)
        zeros = partial(torch.zeros, device=self.device)
        self.row, self.received = layout.empty(self.device), layout.empty(self.device)
        self.home = {name: zeros(shape, dtype=layout.dtype) for name, shape in shop.home.items()}
        self.uploads = {name: zeros(shape, dtype=layout.dtype) for name, shape in shop.uploads.items()}
        self._places = (self.row, self.home, self.uploads)
        self._extras: dict[str, Tensor] = {}
        self._space: Samples | None = None
        self._noted: list[tuple[Tensor, list[int]]] = []
        self._tokens: dict[Hashable, int] = {}
        self._numbers = itertools.count()
        self._begun = StepKinds()
        """Kinds of steps that have been taken here."""
        self._playing: GraphKeyStep | None = None
        """The step of the pass that runs."""
        self._lr_space = zeros((), dtype=layout.dtype)
        augmented = shop.augment is not None  # that is part of a step: what it draws depends on the batch
        ready = _as_it_is if augmented else partial(shop.prepare, channels_last=shop.channels_last)
        self._stock = BatchQueue(self.device, ready, channels_last=shop.channels_last and not augmented)

    def seat(
        self,
        round: int,
        client: int,
        store: Samples,
        positions: Positions,
        received: Tensor,
        extras: Mapping[str, Tensor],
        home: Mapping[str, Tensor],
        first_visit: bool,
    ) -> None:
        """Lay out the work of one client, whose samples are those at `positions` of `store`."""
        row, homes, uploads = self._places
        self.received.copy_(received, non_blocking=True)
        for name, place in homes.items():
            place.copy_(home[name], non_blocking=True) if name in home else place.zero_()
        for place in uploads.values():
            place.zero_()
        kept = {name: self._kept_extra(name, value) for name, value in extras.items()}
        self._positions = positions
        self.begin(round, client, store, row, self.received, kept, dict(homes), dict(uploads), first_visit)

    def _bring(self, samples: Samples) -> None:
        self._seed()
        used, held = self._split(len(self._positions))
        self.validation = samples.take(self._positions[held]) if len(held) else samples[:0]
        self._store, self._positions = samples, self._positions[used]
        self._taken: Samples | None = None

    def _kept_extra(self, name: str, value: Tensor) -> Tensor:
        place = self._extras.get(name)
        if place is None or place.shape != value.shape or place.dtype is not value.dtype:
            place = self._extras[name] = torch.empty_like(value, device=self.device)
        return place.copy_(value, non_blocking=True)

    @property
    def samples(self) -> int:
        if self.listening is not None:
            self.listening.add("samples")
        return len(self._positions)

    @property
    def _data(self) -> Samples:
        """This client's training samples, gathered when somebody wants them all."""
        if self._taken is None:
            self._taken = self._store.take(self._positions)
        return self._taken

    @property
    def training(self) -> TrainingConfig:
        if self.listening is not None:
            return cast(TrainingConfig, GraphKeyConfig(self.host["training"], self.listening))
        return cast(TrainingConfig, self.host["training"])

    @training.setter
    def training(self, training: TrainingConfig) -> None:
        self.host["training"] = training

    @property
    def validation(self) -> Samples:
        if self.listening is not None:
            self.listening.add("validation")
        return cast(Samples, self.host["validation"])

    @validation.setter
    def validation(self, samples: Samples) -> None:
        self.host["validation"] = samples

    @property
    def lr(self) -> float:
        """The learning rate; a `Local` may change it between passes."""
        if self.listening is not None:
            self.listening.add("lr")
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._set_rate(lr)

    def _set_rate(self, lr: float) -> None:
        self._lr, self._rate = lr, self._lr_space
        self._lr_space.fill_(lr)

    @property
    def mean_loss(self) -> float:
        """As on any bench; whoever asks waits for the steps that were asked for."""
        if not self._noted:
            return float("nan")
        sizes = [size for _, sizes in self._noted for size in sizes]
        losses = torch.cat([found for found, _ in self._noted]).double().cpu()
        return float(losses @ torch.tensor(sizes, dtype=torch.float64)) / sum(sizes)

    def restart(self) -> None:
        self._noted.clear()
        super().restart()

    def last_words(self) -> tuple[Tensor, list[int]]:
        """On their way to the host: the losses of the last epoch, and at the end the sum of all numbers that the client
        hands in, which is finite if they are; and the sizes of the batches that the losses are of."""
        given = (self.row[: self.layout.floats], *self.uploads.values(), *self.home.values())
        total = torch.stack([tensor.sum() for tensor in given]).sum().float().view(1)
        words = torch.cat([*(found for found, _ in self._noted), total]).to("cpu", non_blocking=True)
        return words, [size for _, sizes in self._noted for size in sizes]

    def bring(self, samples: Samples) -> Samples:
        """Copy samples from the host into memory of the slot, which is the same for all clients that fit into it."""
        now = self._space
        if now is None or len(now) < len(samples) or _sort_of(now) != _sort_of(samples):
            count = max(64, 2 * len(samples))
            spaces = (t.new_empty((count, *t.shape[1:]), device=self.device) for t in (samples.x, samples.y))
            now = self._space = Samples(*spaces)
        now.x[: len(samples)].copy_(samples.x, non_blocking=True)
        now.y[: len(samples)].copy_(samples.y, non_blocking=True)
        return now

    def close(self) -> None:
        """Give back memory: recordings, and what they refer to."""
        self.tape.close()
        self.tape = EagerRunner()
        self._optimizers.clear()
        self._buffers.clear()
        self._space = None

    def bind(self, row: Tensor) -> None:
        if self._bound is None or tensor_graph_key(self._bound) != tensor_graph_key(row):
            super().bind(row)

    def new_optimizer(self) -> None:
        t = self.training
        key = (t.optimizer, t.momentum, t.nesterov, t.weight_decay)
        self.optimizer = self._steady = _NONE
        before, made = self._optimizers.pop(key, None), make_optimizer(t)
        if before is not None and before.optimizer() is None:
            vars(made).update(before.state)
            made.reset()
        else:  # a `Local` that goes on with the old one too has that for its own
            made.settle(self.weights)
        while len(self._optimizers) >= MOST_OPTIMIZERS:
            del self._optimizers[next(iter(self._optimizers))]
        self._optimizers[key] = _Kept(weakref.ref(made), dict(vars(made)))
        self.optimizer = self._steady = made

    def buffer(self, name: str, *shape: int) -> Tensor:
        if self.listening is not None:
            self.listening.add("_buffers")  # where they lie
            kept = self._buffers.get(name)
            if kept is None or kept.shape != shape:
                raise RuntimeError("it makes a buffer, which a recording would make anew each time")
        return super().buffer(name, *shape)

    def _seed(self) -> None:
        """Code that only knows torch's global generators draws from the stream of this client and round."""
        seed = self._shop.streams.key("noise", self.host["round"], self.host["client"]) >> 65
        self._host_state = torch.Generator().manual_seed(seed).get_state()
        self._generator.manual_seed(seed)

    def _new_noise(self) -> torch.Generator:
        key = self._shop.streams.key("augment", self.host["round"], self.host["client"])
        return self._noise.manual_seed(key >> 65)

    @contextmanager
    def randomness(self) -> Iterator[None]:
        """Let torch's global generators be this client's."""
        with GLOBAL_RNG_LOCK:
            outside = torch.get_rng_state()
            torch.set_rng_state(self._host_state)
            try:
                with use_generator(self._generator, self.device):
                    yield
            finally:
                self._host_state = torch.get_rng_state()
                torch.set_rng_state(outside)

    @contextmanager
    def listen(self) -> Iterator[set[str]]:
        """Note which host values are read."""
        self.listening = set()
        try:
            yield self.listening
        finally:
            self.listening = None

    def values(self, names: frozenset[str]) -> Hashable:
        """Host values by name."""
        return tuple(build_graph_key(attrgetter(name)(self)) for name in sorted(names))

    def memory(self) -> list[Tensor]:
        """Everything on the bench that a step may change."""
        # Buffers that are no part of a model are not in its row.
        places = [self.row, self.gradient, *self._stock.changing, *self.module.buffers()]
        if self._bound is not None:
            places.append(self._bound)
        held: list[Any] = [self.home, self.uploads, self._buffers, self.scratch, vars(self.optimizer)]
        if self._playing is not None:
            held += [self._playing.attributes, *self._playing.enclosed]
        places += graph_key_tensors(held)
        return list({tensor_graph_key(tensor): tensor for tensor in places if _is_restorable_tensor(tensor)}.values())

    def launch(self, piece: LocalSteps) -> Iterator[None]:
        """Run one pass; gives way after every few steps, which need not have been carried out by then."""
        cuts = list(self._cuts(piece))
        if not cuts:
            return
        room = self._stock.prepare(self._store, max(map(len, cuts)), self.training.batch_size)
        self.network_buffers.gather()  # recordings know where they belong, not what was put there between passes
        step = self._playing = inspect_graph_key_step(piece.step)
        kind, before = step.kind, self._all_of(step)
        token = self._token(kind, before)
        lr, training = self._lr, self.host["training"]
        for low in range(0, len(cuts), room):
            part = cuts[low : low + room]
            sizes = [len(cut) for cut in part]
            self._stock.fill(self._store, [self._positions[cut.positions] for cut in part])
            for size, count in _stretches(sizes):
                taken, recorded, written = self.host["steps"], self.tape.recorded, self.tape.recorded + self.tape.done
                take = partial(self._take, piece.step, size, count, taken)
                self.tape.play(kind, (token, size, count), take, self, whole=size > 1)  # norms rest for one sample
                self.host["steps"] = taken + count
                # Only a step that was not replayed can have changed something on the host.
                if self.tape.recorded + self.tape.done != written and self.tape.may_record(kind):
                    now, settled = self._all_of(step), self._lr == lr and self.host["training"] is training
                    first = kind not in self._begun and self.tape.recorded == recorded
                    if settled and first and (now[0], now[1][:2]) == (before[0], before[1][:2]):
                        before, token = now, self._token(kind, now)  # what a network made, it has from now on
                    elif not settled or now != before:
                        self.tape.refuse(kind, "it keeps count of something on the host")
                    self._begun.add(kind)
                yield
            start = max((number for number, cut in enumerate(part) if cut.first), default=None)
            if start is not None:  # an epoch began here: losses before it are not asked for
                self._noted.clear()
            self._noted.append((self._stock.losses(start or 0, len(part)), sizes[start or 0 :]))

    def _take(self, step: Step, size: int, count: int, before: int) -> None:
        """Some steps with batches of one size, after `before` others."""
        bound = self._bound
        try:
            turns, losses = self._stock.turns(count), list[Tensor]()
            for number, batch in enumerate(self._stock.take(size, turns)):
                self.host["steps"] = before + number
                if self._augment is not None:
                    batch = self._prepared(Samples(batch.x, batch.y))
                losses.append(_detach_loss(self._step(step, batch)))
            self._stock.note(turns, losses)
        except Exception:
            if bound is not None:  # it may be done again, from the beginning
                self.bind(bound)
            raise

    def _token(self, kind: Hashable, depends: tuple[Hashable, Hashable]) -> int:
        """A number for a kind of step and all it depends on: quicker to look up at every step."""
        found = (kind, *depends)
        if found not in self._tokens:
            if len(self._tokens) >= MAX_GRAPHS:
                del self._tokens[next(iter(self._tokens))]  # the oldest, whose recordings are or will be gone too
            self._tokens[found] = next(self._numbers)
        return self._tokens[found]

    def _all_of(self, step: GraphKeyStep) -> tuple[Hashable, tuple[Hashable, ...]]:
        """Everything a recording of a step depends on besides the batch's size and what lies behind the addresses."""
        return self._state(), self._on_host(step)

    def _on_host(self, step: GraphKeyStep) -> tuple[Hashable, ...]:
        """What a step may read on the host beside the bench's own values: a recording keeps it as it is."""
        own = build_graph_key((self.scratch, vars(self.optimizer), step.attributes))
        return (
            own,
            build_graph_key(step.enclosed, deep=1),
            modules_graph_key(self._parts),
            build_graph_key(self._shop.criterion),
        )

    def _state(self) -> Hashable:
        """What a step works on: where it lies, and how the network is set."""
        tensors: list[Tensor] = [self.row, self.weights, self.gradient, self.received, *self._stock.places]
        tensors += [*self.extras.values(), *self.home.values(), *self.uploads.values()]
        if self._bound is not None:
            tensors.append(self._bound)
        names = (*self.extras, *self.home, *self.uploads)
        modes = tuple(module.training for module in self.module.modules())
        trained = tuple(p.requires_grad for p in self.module.parameters())
        settings = tuple(getattr(self.training, name) for name in ALWAYS_READ)
        return tuple(map(tensor_graph_key, tensors)), names, modes, trained, type(self.optimizer), settings


def copy_slot_context(shop: TrainingContext) -> TrainingContext:
    """The same with a network of its own; frozen weights are shared, for one copy serves all. But not those of
    recurrent layers: whoever brings such a layer to a GPU moves them, and recordings would read where they were."""
    moved = {id(p) for m in shop.module.modules() if isinstance(m, nn.RNNBase) for p in m.parameters()}
    frozen = {id(p): p for p in shop.module.parameters() if not p.requires_grad and id(p) not in moved}
    return replace(shop, module=copy.deepcopy(shop.module, frozen))


def _stretches(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Batches as (size, how many of that size in a row): the first alone, then STRETCH, halves of it, and so on.

    A recording of several steps is launched nearly as quickly as one of a single step.
    """
    yield sizes[0], 1
    at = 1
    while at < len(sizes):
        alike = next((n for n, size in enumerate(sizes[at : at + STEPS_PER_GRAPH]) if size != sizes[at]), None)
        count = STEPS_PER_GRAPH
        while count > (alike if alike is not None else len(sizes) - at):
            count //= 2
        yield sizes[at], max(1, count)
        at += max(1, count)


def _sort_of(samples: Samples) -> Hashable:
    """What samples must have in common to lie in one place."""
    return tuple((tensor.shape[1:], tensor.dtype) for tensor in (samples.x, samples.y))


def _as_it_is(x: Any) -> Any:
    return x
