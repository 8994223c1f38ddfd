"""Results of the CUDA engine on fake graphs, stored to detect changes.

For each run `cuda_values.json` holds
- `tapes`: steps that were captured, replayed and run eagerly, by who asked for them: slots, judge, sweep;
- `draws`: how often each purpose was drawn for, and a digest of all (purpose, round, client);
- `steps`: for each step what its captured graph depends on: `reads`, the host values that it reads; `names` in the
  graph key; `leaves`, the sizes of the parts of that key;
- a digest of every update, global model and evaluation, by torch version, CPU capability and how this machine rounds.

All but the digests is the same on every machine. `make golden-cuda` writes the file again.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from fedloom.core.rng import RngStreams
from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate
from fedloom.devices.cuda_graphs import _CapturedGraph, _GraphOwner
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.engines.cuda.graph_key import GraphKeyStep
from fedloom.engines.cuda.slot import CudaSlot
from fedloom.methods import Client, Method, Options, register, registry
from fedloom.methods.dynafed import DynaFedSteps
from fedloom.methods.registry import BUILT_IN
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import SmallFederatedDataset, build_small_run
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalTrainer
from tests.support.cuda_agreement import experiment_of
from tests.support.cuda_engine import dense, pooled
from tests.support.fake_graphs import FakeGraphTape
from tests.support.quick_options import QUICK
from tests.support.trainers import Counting

HERE = Path(__file__).parent
STORED = HERE / "cuda_values.json"
ROUNDS = 3


class Run(NamedTuple):
    """How a run is made."""

    make: Callable[[], BuiltRun]
    devices: Sequence[str] = ("cpu",)
    change: Callable[[Any], Any] = lambda shop: shop


class Reading(Client[Options]):
    """Its step reads every host value that a recording can depend on."""

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        factor = trainer.lr + 0.01 * (trainer.round + trainer.client_id + trainer.first_visit + trainer.config.epochs)
        held = trainer.validation
        loss = trainer.loss(batch) + trainer.loss(Batch(held.x[:2], held.y[:2]))
        trainer.backward(loss)
        trainer.gradient.mul_(factor).div_(1 + 0.01 * trainer.num_examples)
        trainer.optimizer_step()
        return loss


class Lending(Client[Options]):
    """Its step uses a buffer."""

    def train(self, trainer: LocalTrainer) -> Iterator[Any]:
        trainer.buffer("sum", trainer.weights.numel()).zero_()
        yield from super().train(trainer)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        loss = super().training_step(trainer, batch)
        trainer.buffer("sum", trainer.weights.numel()).add_(trainer.weights)
        return loss


class Asking(Client[Options]):
    """Its step asks how many steps were taken, so it is never recorded."""

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        trainer.gradient.fill_(trainer.steps)
        return super().training_step(trainer, batch)


class Holding(Client[Options]):
    """Its step uses a number that it keeps itself."""

    def train(self, trainer: LocalTrainer) -> Iterator[Any]:
        self.factor = 1.0 + trainer.round
        yield from super().train(trainer)

    def adjust_gradient(self, trainer: LocalTrainer) -> None:
        trainer.gradient.mul_(self.factor)


OWN = {"own reading": Reading, "own lending": Lending, "own asking": Asking, "own holding": Holding}


def small(method: str, options: dict[str, Any] | None = None, **settings: Any) -> BuiltRun:
    options = options or ({method: QUICK[method]} if method in QUICK else {})
    values = {
        "rounds": ROUNDS, "clients_per_round": 8, "batch_size": 4, "momentum": 0.5, "lr_decay": 0.9,
        "failure_rate": 0.1, "seed": 3,
        **settings,
    }  # fmt: skip
    return build_small_run(method, options, **values)


def own(name: str, **settings: Any) -> BuiltRun:
    register(Method("own", "", "", client=OWN[name]))
    return small("own", **settings)


def images(**settings: Any) -> BuiltRun:
    return experiment_of("lenet", "cpu", double=False, rounds=ROUNDS, **settings)


RUNS: dict[str, Run] = {name: Run(partial(small, name)) for name in sorted(BUILT_IN)} | {
    "fedavg adam": Run(partial(small, "fedavg", optimizer="adam", momentum=0.0, weight_decay=0.01, lr=0.01)),
    "fedavg clip": Run(partial(small, "fedavg", momentum=0.9, nesterov=True, weight_decay=0.01, clip=0.1)),
    "fedavg steps": Run(partial(small, "fedavg", steps=11)),
    "fedavg whole": Run(partial(small, "fedavg", batch_size=0, epochs=3)),
    "fedavg held out": Run(partial(small, "fedavg", validation=0.3, statistics="estimated")),
    "fedavg remembering": Run(partial(small, "fedavg", keep_optimizer=True)),
    "fedavg dropout": Run(partial(small, "fedavg", model=partial(dense, 0.5))),
    "fedavg buffers": Run(partial(small, "fedavg", model=partial(Counting, "anew", False))),
    "fedavg one sample": Run(partial(small, "fedavg", federated_data=SmallFederatedDataset({0: 1, 1: 5}))),
    "fedavg pooled": Run(partial(small, "fedavg"), change=pooled),
    "scaffold on two": Run(partial(small, "scaffold"), devices=("cpu", "cpu")),
    "fedcross+fedprox": Run(partial(small, "fedcross+fedprox")),
    "fedavg server lr": Run(partial(small, "fedavg", {"fedavg": {"server_lr": 0.5}})),
    "images": Run(partial(images, augment="crop+flip")),
    "images channels last": Run(partial(images, channels_last=True)),
    **{name: Run(partial(own, name, validation=0.3)) for name in OWN},
}


class Notes:
    """What is seen of one run."""

    def __init__(self) -> None:
        self.tapes: list[tuple[str, FakeGraphTape]] = []
        self.draws: set[tuple[str, int, int]] = set()
        self.steps: dict[str, dict[str, set[Any]]] = defaultdict(lambda: defaultdict(set))
        self.hash = blake2b(digest_size=16)

    def say(self, *values: object) -> None:
        """Add these to the digest."""
        for value in values:
            found = value.contiguous().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
            self.hash.update(len(found).to_bytes(8, "little") + found)

    def make_tape(self, whose: str, device: Any, generators: tuple[Any, ...] = (), urgency: int = 0) -> FakeGraphTape:
        """In the place of `make_graph_runner`."""
        tape = ListeningTape(self, generators)
        self.tapes.append((whose, tape))
        return tape

    def told(self) -> dict[str, Any]:
        """What the stored file says of it, but for the digest."""
        tapes = defaultdict(lambda: [0, 0, 0])
        for whose, tape in self.tapes:
            tapes[whose] = [a + b for a, b in zip(tapes[whose], (tape.captured, tape.replayed, tape.done), strict=True)]
        draws = sorted(self.draws)
        digest = blake2b(repr(draws).encode(), digest_size=8).hexdigest()
        return {
            "tapes": dict(tapes),
            "draws": {**Counter(purpose for purpose, *_ in draws), "digest": digest},
            "steps": {step: {what: sorted(seen) for what, seen in notes.items()} for step, notes in self.steps.items()},
        }


class ListeningTape(FakeGraphTape):
    """Notes which host values a step reads."""

    def __init__(self, notes: Notes, generators: tuple[Any, ...]) -> None:
        super().__init__(generators)
        self._notes = notes
        self.step = ""

    def capture(self, body: Callable[[], None], owner: _GraphOwner) -> Any:
        found: _CapturedGraph = super().capture(body, owner)
        if isinstance(owner, CudaSlot):
            assert owner.tracked_reads is not None
            self._notes.steps[self.step]["reads"].update(owner.tracked_reads)
        return found


class WatchedEngine(CudaEngine):
    """Puts every answer into the digest."""

    notes: Notes

    def train(self, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
        for answer in super().train(tasks):
            assert isinstance(answer, ClientUpdate), answer
            self.notes.say(answer.client_id, answer.num_examples, answer.steps, answer.loss, answer.finite, answer.row)
            self.notes.say(*answer.extras.values(), *answer.client_state.values())
            yield answer


def leaves(value: Any) -> int:
    """How many single things a part of a replay key has; the address of a tensor is one."""
    return sum(map(leaves, value)) if isinstance(value, tuple | frozenset) and not is_address(value) else 1


def is_address(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 4 and isinstance(value[-1], torch.dtype)


def note_key(notes: Notes, slot: CudaSlot, step: GraphKeyStep, key: Any) -> None:
    """What of a replay key is the same on every machine: numbers of torch's own layers are not."""
    state, (own, enclosed, _numbers, _criterion) = key
    _addresses, names, *_modes = state
    held = [name for pairs in own for name, _ in pairs]
    slot.graph_runner.step = step.function.__name__
    seen = notes.steps[slot.graph_runner.step]
    seen["names"].update(held, names)
    seen["leaves"].add(" ".join(str(leaves(part)) for part in (*state, *own, enclosed)))


def observed(name: str) -> tuple[dict[str, Any], str]:
    """What the stored file says of this run on this machine."""
    notes, run = Notes(), RUNS[name]
    key, all_of = RngStreams.key, CudaSlot._all_of

    def noted_key(self: RngStreams, purpose: str, round: int = 0, client: int = 0) -> int:
        notes.draws.add((purpose, round, client))
        return key(self, purpose, round, client)

    def noted_all(self: CudaSlot, step: GraphKeyStep) -> Any:
        found = all_of(self, step)
        note_key(notes, self, step, found)
        return found

    known = registry.methods()
    with ExitStack() as changed:
        for whose, module in (
            ("slots", "engines.cuda.slot"),
            ("judge", "engines.cuda.graph_evaluator"),
            ("sweep", "methods._support.trajectory_matching"),
        ):
            changed.enter_context(patch(f"fedloom.{module}.make_graph_runner", partial(notes.make_tape, whose)))
        changed.enter_context(patch("fedloom.devices.cuda_graphs.CHECK_ALL", False))
        changed.enter_context(patch.object(DynaFedSteps, "replays", lambda _: True))
        changed.enter_context(patch.object(RngStreams, "key", noted_key))
        changed.enter_context(patch.object(CudaSlot, "_all_of", noted_all))
        experiment = changed.enter_context(run.make().engine_closed())
        engine = WatchedEngine(run.change(experiment.engine.context), run.devices, 2)
        engine.notes, experiment.rounds.engine = notes, engine
        for round in range(ROUNDS):
            record = experiment.rounds.run_round(round)
            deployed = experiment.rounds.global_model()
            score = engine.evaluate(deployed)
            assert score is not None
            assert math.isfinite(score.loss)
            notes.say(
                deployed,
                score.loss,
                score.correct_per_class.tolist(),
                score.count,
                record.get("personal_accuracy_mean"),
            )
        told = notes.told()
        engine.close()
    registry._methods.clear()
    registry._methods.update(known)
    return told, notes.hash.hexdigest()


@cache
def machine() -> str:
    """What digests depend on. Products are rounded by libraries that look at the processor themselves."""
    threads, draw, hash = torch.get_num_threads(), np.random.default_rng(0), blake2b(digest_size=4)
    torch.set_num_threads(1)  # as the engine does
    for rows, inner, columns in [(4, 64, 16), (4, 16, 10), (64, 4, 16), (256, 64, 16), (80, 80, 80)]:
        a, b = (draw.standard_normal(shape, dtype=np.float32) for shape in ((rows, inner), (inner, columns)))
        x, y = torch.from_numpy(a), torch.from_numpy(b)
        hash.update((x @ y).exp().numpy().tobytes() + (a @ b).tobytes() + (x.double() @ y.double()).numpy().tobytes())
    for shapes in [((20, 3, 32, 32), (6, 3, 5, 5)), ((20, 6, 14, 14), (16, 6, 5, 5))]:
        x, w = (torch.from_numpy(draw.standard_normal(shape, dtype=np.float32)).requires_grad_() for shape in shapes)
        y = torch.conv2d(x, w)
        for tensor in (y, *torch.autograd.grad(y.square().sum(), (x, w))):
            hash.update(tensor.detach().numpy().tobytes())
    torch.set_num_threads(threads)
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, rounding {hash.hexdigest()}"


def stored() -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """The stored runs, and digests by machine and run."""
    found = json.loads(STORED.read_text())
    return found["runs"], found["digests"]


def text_of(runs: dict[str, dict[str, Any]], digests: dict[str, dict[str, str]]) -> str:
    """JSON with a line for each thing that may change."""

    def block(level: int, items: dict[str, Any]) -> str:
        inside = ",\n".join(
            f"{'  ' * level}{json.dumps(key)}: "
            + (block(level + 1, value) if isinstance(value, dict) and level < 4 else json.dumps(value))
            for key, value in items.items()
        )
        return f"{{\n{inside}\n{'  ' * (level - 1)}}}" if items else "{}"

    return block(1, {"runs": runs, "digests": digests}) + "\n"


def write() -> None:
    """Write the file again. Digests of other machines stay where this one's did not change, or were not there."""
    before = json.loads(STORED.read_text())["digests"] if STORED.exists() else {}
    found = {name: observed(name) for name in RUNS}
    ours, now = before.pop(machine(), None), {name: digest for name, (_, digest) in found.items()}
    same = {name for name in now if ours is None or ours.get(name) == now[name]}
    others = {one: {name: of[name] for name in of if name in same} for one, of in before.items()}
    STORED.write_text(text_of({name: told for name, (told, _) in found.items()}, {**others, machine(): now}))
    print(f"{STORED.name}: {len(found)} runs on {machine()}.")


if __name__ == "__main__":
    write()
