"""Tests of the CUDA engine on the CPU: slots, order, updates, eager steps."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedloom.core.tasks import ClientFailure, ClientUpdate
from fedloom.data import FederatedDataset, InputTransform, Samples
from fedloom.devices.cuda_graphs import EagerRunner
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.engines.cuda.slot import CudaSlot
from fedloom.methods import Client, Method, Options, methods, register
from fedloom.testing.fixtures import build_small_run
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer
from tests.support.core_methods import CORE_METHODS
from tests.support.cuda_agreement import apart, experiment_of, jobs_of, trained_at_once, trained_by_a_loop
from tests.support.cuda_engine import answers, assert_alike, cuda_of, dense, jobs_for, pooled
from tests.support.fake_graphs import fake_tape
from tests.support.task_rounds import in_round

LOCALS = [name for name, method in methods().items() if method.client is not None]


@pytest.fixture(autouse=True)
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of all clients in turn from the beginning: these clients have few."""
    monkeypatch.setattr("fedloom.engines.cuda.engine.LEAD", 0)


@pytest.mark.quick_if(method=CORE_METHODS, slots=(2,))
@pytest.mark.parametrize("slots", [1, 2, 3, 0])
@pytest.mark.parametrize("method", LOCALS)
def test_it_returns_what_the_plain_engine_returns(method: str, slots: int) -> None:
    clients = [5, 0, 7, 2, 1, 6]
    with build_small_run(
        method, {}, engine="sequential", clients_per_round=8, momentum=0.5, lr_decay=0.9
    ).engine_closed() as plain:
        for round in (0, 1):  # the second shows what a slot keeps from the first
            jobs = jobs_for(plain, clients[round:])
            expected = answers(plain.engine, jobs, round)
            engine = cuda_of(plain, slots)
            answers(engine, jobs_for(plain, [3, 4, 1]), 5)
            assert_alike(answers(engine, jobs, round), expected)


@pytest.mark.quick_if(method=CORE_METHODS)
@pytest.mark.parametrize("method", LOCALS)
def test_replayed_steps_do_what_was_written(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With recordings that keep addresses and numbers, as CUDA graphs do."""
    monkeypatch.setattr("fedloom.engines.cuda.slot.make_graph_runner", fake_tape)
    monkeypatch.setattr("fedloom.engines.cuda.slot.STEPS_PER_GRAPH", 3)
    settings = {
        "engine": "sequential",
        "clients_per_round": 8,
        "momentum": 0.5,
        "lr_decay": 0.9,
        "batch_size": 8,
        "model": dense,
    }
    with build_small_run(method, {}, **settings).engine_closed() as plain:
        engine = cuda_of(plain, 2)
        for round in range(3):
            jobs = jobs_for(plain, [5, 0, 7, 2, 1, 6])
            assert_alike(answers(engine, jobs, round), answers(plain.engine, jobs, round))
    assert sum(slot.graph_runner.replayed for slot in engine.slots) > sum(
        slot.graph_runner.captured for slot in engine.slots
    )


@pytest.mark.parametrize(
    "settings",
    [
        # Without batch norm: a bias before it has no gradient but rounding, whose sign Adam would follow.
        {"optimizer": "adam", "weight_decay": 0.01, "lr": 0.001, "model": "dense"},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"clip": 0.1, "lr": 0.5},
        {"steps": 7},
        {"batch_size": 0},
        {"epochs": 0},
        {"validation": 0.3},
        {"statistics": "estimated"},
    ],
)
def test_every_way_to_train_is_the_same(settings: dict[str, object]) -> None:
    if "model" in settings:
        settings = {**settings, "model": dense}
    with build_small_run("fedavg", {}, engine="sequential", **settings).engine_closed() as plain:
        jobs = jobs_for(plain, list(range(8)))
        assert_alike(answers(cuda_of(plain, 3), jobs), answers(plain.engine, jobs))


def test_interleaved_clients_draw_as_if_they_were_alone() -> None:
    """Dropout knows only torch's global generator, which all clients share."""
    with build_small_run("fedavg", {}, engine="sequential", model=lambda: dense(0.5)).engine_closed() as plain:
        jobs = jobs_for(plain, [0, 1, 2, 3, 4])
        before = torch.get_rng_state()
        assert_alike(answers(cuda_of(plain, 3), jobs), answers(plain.engine, jobs), rtol=1e-6)
        assert torch.equal(torch.get_rng_state(), before)


def test_samples_may_come_from_anywhere() -> None:
    """Clients of a pool are gathered on the device, others are brought there."""
    with build_small_run("fedavg", {}, engine="sequential").engine_closed() as plain:
        jobs = jobs_for(plain, [4, 0, 1, 2])
        expected = answers(plain.engine, jobs)
        for shop in (plain.engine.context, pooled(plain.engine.context)):
            assert_alike(answers(CudaEngine(shop, "cpu", 2), jobs), expected)


def test_it_scores_as_the_plain_engine_does() -> None:
    with build_small_run("fedavg", {}, engine="sequential").engine_closed() as plain:
        row = plain.rounds.parts.server.global_model()
        ours, theirs = cuda_of(plain).evaluate(row), plain.engine.evaluate(row)
        assert ours is not None
        assert theirs is not None
        assert (ours.correct_per_class.tolist(), ours.count_per_class.tolist(), ours.count) == (
            theirs.correct_per_class.tolist(),
            theirs.count_per_class.tolist(),
            theirs.count,
        )
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_clients_get_steps_before_the_next_is_seated(lead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.engines.cuda.engine.LEAD", lead)
    monkeypatch.setattr("fedloom.engines.cuda.slot.STEPS_PER_GRAPH", 1)
    taken, take = list[int](), CudaSlot._take_steps

    def noted(self: CudaSlot, *given: object) -> None:
        taken.append(self.host["client_id"])
        take(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaSlot, "_take_steps", noted)
    with build_small_run("fedavg", {}, engine="sequential", steps=6).engine_closed() as plain:
        list(cuda_of(plain, 3).train(in_round(0, jobs_for(plain, [0, 1, 2]))))
    first, second, third = dict.fromkeys(taken)
    begun, left = 1 + lead, 5 - lead  # those who are seated get one more whenever another is
    expected = [first] * begun + [second] * begun + [first] + [third] * begun + [second, first]
    steps_left = {first: left - 2, second: left - 1, third: left}
    while any(steps_left.values()):
        for client in (third, second, first):
            expected += [client] if steps_left[client] else []
            steps_left[client] = max(0, steps_left[client] - 1)
    assert taken == expected


@pytest.mark.parametrize(
    ("method", "field"), [("fedavg", "row"), ("scaffold", "uploads"), ("scaffold", "client_state")]
)
@pytest.mark.parametrize(
    ("number", "known"), [(1.0, True), (3e38, False), (float("nan"), False), (float("-inf"), False)]
)
def test_it_knows_that_an_answer_is_finite(method: str, field: str, number: float, known: bool) -> None:
    """Where it is not sure, because the sum of finite numbers overflows, somebody else has to look."""

    def train(bench: LocalTrainer) -> Iterator[LocalSteps]:
        place = bench.row if field == "row" else next(iter(getattr(bench, field).values()))
        place[:2] = number
        yield from ()

    with build_small_run(method, {}, engine="sequential").engine_closed() as plain:
        shop = plain.engine.context
        shop = replace(shop, client=replace(shop.client, train=train, make_copy=None))
        (update,) = CudaEngine(shop, "cpu").train(in_round(0, jobs_for(plain, [0])))
        assert isinstance(update, ClientUpdate)
        assert update.finite is known


class Failing(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step, steps=1)
        if trainer.client_id == 2:
            raise RuntimeError("out of luck")
        yield LocalSteps(self.training_step, steps=1)


def test_a_client_that_fails_is_lost_and_the_others_are_not() -> None:
    register(Method("failing", "", "", client=Failing))
    with build_small_run("failing", {}, engine="sequential").engine_closed() as plain:
        found = list(cuda_of(plain, 2).train(in_round(0, jobs_for(plain, [0, 2, 1]))))
        assert [type(a) for a in found] == [ClientUpdate, ClientFailure, ClientUpdate]
        assert isinstance(found[1], ClientFailure)
        assert found[1].reason == "RuntimeError: out of luck"


def test_where_memory_is_short_there_are_fewer_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    take = CudaSlot._take_steps

    def short(self: CudaSlot, *given: object) -> None:
        if len(engine.slots) > 2:
            raise torch.OutOfMemoryError("out of memory")
        take(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaSlot, "_take_steps", short)
    with build_small_run("scaffold", {}, engine="sequential").engine_closed() as plain:
        jobs = jobs_for(plain, [0, 1, 2, 3, 4, 5, 6])
        expected = answers(plain.engine, jobs)
        engine = cuda_of(plain)
        assert_alike(answers(engine, jobs), expected)
        assert len(engine.slots) == engine.gpus[0].max_slots == 2


def test_answers_wait_their_turn_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.engines.cuda.device.RESULT_MEMORY", 1)
    with build_small_run("fedavg", {}, engine="sequential").engine_closed() as plain:
        jobs = jobs_for(plain, [0, 1, 2, 3, 4, 5, 6, 7] * 2)
        engine = cuda_of(plain, 2)
        assert_alike(answers(engine, jobs), answers(plain.engine, jobs))
        assert engine.gpus[0].allocate_results(16) == 4


class Recording(EagerRunner):
    """Plays like a recording: it keeps the host values that a step saw when it was recorded."""

    def __init__(self, bench: CudaSlot) -> None:
        super().__init__()
        self.bench, self.reads = bench, set[str]()
        self.keys = set[object]()
        self.refused = set[object]()

    def run(self, kind, key, body, owner, *, whole=True) -> None:  # type: ignore[no-untyped-def]  # as its parent
        with owner.listen() as reads:
            super().run(kind, key, body, owner, whole=whole)
        self.reads |= reads
        self.keys.add(key)

    def refuse(self, kind: object, reason: str) -> None:
        self.refused.add(reason)


def keys_of(step: object, clients: list[int], **settings: object) -> tuple[Recording, CudaSlot]:
    """What a slot that serves these clients has to record."""

    class Own(Client[Options]):
        pass

    Own.training_step = step  # type: ignore[assignment, method-assign]
    register(Method("recorded", "", "", client=Own))
    with build_small_run("recorded", {}, engine="sequential", **settings).engine_closed() as plain:
        engine = cuda_of(plain, 1)
        slot = CudaSlot(engine.context, torch.device("cpu"))
        engine.gpus[0].slots.append(slot)
        tape = slot.graph_runner = Recording(slot)
        answers(engine, jobs_for(plain, clients))
        return tape, slot


def test_one_recording_serves_all_clients_with_batches_of_one_size() -> None:
    tape, _ = keys_of(Client.training_step, [3, 4, 5, 3, 4], steps=1, batch_size=5, momentum=0.9)
    assert tape.done == 5
    assert len(tape.keys) == 1
    assert not tape.reads


def test_what_a_step_reads_on_the_host_is_noticed() -> None:
    def step(self: Client[Options], bench: LocalTrainer, batch: Batch) -> Tensor:
        bench.gradient.mul_(
            bench.lr * bench.round * bench.client_id * bench.steps * bench.num_examples * bench.first_visit
        )
        return Client.training_step(self, bench, batch)

    tape, slot = keys_of(step, [3])
    assert tape.reads == {"lr", "round", "client_id", "steps", "num_examples", "first_visit"}
    assert slot.values(frozenset(tape.reads)) is not None


def test_a_step_that_counts_on_the_host_is_never_recorded() -> None:
    def step(self: Client[Options], bench: LocalTrainer, batch: Batch) -> Tensor:
        bench.scratch["count"] = bench.scratch.get("count", 0) + 1
        return Client.training_step(self, bench, batch)

    tape, _ = keys_of(step, [3])
    assert tape.refused == {"it keeps count of something on the host"}


def test_memory_that_a_step_brings_itself_needs_another_recording() -> None:
    def own(self: Client[Options], bench: LocalTrainer, batch: Batch) -> Tensor:
        return Client.training_step(self, bench, batch)

    class Bringing(Client[Options]):
        def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
            kept.append(torch.zeros(3))
            trainer.scratch["own"] = kept[-1]
            trainer.scratch["lent"] = trainer.buffer("lent", 3)
            yield LocalSteps(self.training_step, steps=1)

    kept: list[Tensor] = []
    register(Method("bringing", "", "", client=Bringing))
    with build_small_run("bringing", {}, engine="sequential", batch_size=2).engine_closed() as plain:
        engine = cuda_of(plain, 1)
        slot = CudaSlot(engine.context, torch.device("cpu"))
        engine.gpus[0].slots.append(slot)
        tape = slot.graph_runner = Recording(slot)
        answers(engine, jobs_for(plain, [3, 4, 5]))
    assert len(tape.keys) == 3
    lent = {dict(own[0][0])["lent"] for _, _, own in slot._tokens}  # type: ignore[misc, arg-type]
    assert len(lent) == 1, "what the bench lends lies where it lay"


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
def test_it_trains_as_a_plain_loop_does(double: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On images of the usual size; on a GPU this is tested with all networks."""
    monkeypatch.setattr("fedloom.engines.cuda.slot.make_graph_runner", fake_tape)
    monkeypatch.setattr("fedloom.engines.cuda.slot.STEPS_PER_GRAPH", 2)
    with experiment_of("lenet", "cpu", double).engine_closed() as experiment:
        jobs, floats = jobs_of(experiment), experiment.layout.floats
        rows, replayed = trained_at_once(experiment, jobs, "cpu", slots=2)
        loop = trained_by_a_loop(experiment, jobs, "cpu")
        assert apart(rows, loop, floats) < (1e-12 if double else 1e-6)
        assert apart(loop, [job.row for job in jobs], floats) > 1e-3, "it has learned something"
        assert replayed > 0


def test_clients_may_have_samples_of_different_shapes() -> None:
    """Texts of different lengths, say, where the network takes any."""

    class Texts(FederatedDataset):
        classes, shape, test = 2, (5,), None
        transform = InputTransform.identity()

        def __len__(self) -> int:
            return 4

        def client_samples(self, client_id: int) -> Samples:
            x = torch.randn(6, 3 + 2 * client_id, generator=torch.Generator().manual_seed(client_id))
            return Samples(x, (x.sum(1) > 0).long())

        def num_examples(self, client_id: int) -> int:
            return 6

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x.sum(1, keepdim=True))

    settings = {"engine": "sequential", "federated_data": Texts(), "model": Summed, "batch_size": 2}
    with build_small_run("fedavg", {}, **settings).engine_closed() as plain:
        jobs = jobs_for(plain, [1, 0, 3, 2])
        assert_alike(answers(cuda_of(plain, 1), jobs), answers(plain.engine, jobs))
