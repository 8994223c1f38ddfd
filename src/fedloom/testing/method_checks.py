"""The contract of a method, as a suite that anyone can run on a method of their own.

    from fedloom.testing.method_checks import check_method
    check_method("my_method")

Each check is a function `(method, options) -> None` that raises AssertionError; `CHECKS` lists them by name, so that a
test runner can show them one by one. They run for seconds, on a part of the embedded digits.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.layout import Layout, TensorKind, model_digest
from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate
from fedloom.errors import RunStopped
from fedloom.methods import compose, methods
from fedloom.runs.build import BuiltRun
from fedloom.runs.callback import SilentCallback
from fedloom.runs.execute import resume, run
from fedloom.testing.fixtures import (
    SETTINGS,
    Given,
    SmallFederatedDataset,
    batch_norm_network,
    build_small_run,
    simple_network,
    small_run,
)

Check = Callable[[str, Given], None]


def check_method(name: str, options: Given | None = None) -> None:
    """Check that a method, or a composition such as `fedcross+fedprox`, keeps the contract.

    `options` are set for all checks, by method and key. The first broken promise raises AssertionError.
    """
    compose(name, options)
    for title, check in CHECKS.items():
        try:
            check(name, options or {})
        except AssertionError as error:
            raise AssertionError(f"{name}: {title}: {error}") from error


# Rounds with made-up answers


def _run_made_up_round(
    experiment: BuiltRun, order: Callable[[list[ClientUpdate]], list[ClientUpdate]], change: float = 0.01
) -> Tensor:
    """One round with made-up answers, handed to the server in some order; the deployed row."""
    parts, layout = experiment.rounds.parts, experiment.layout
    jobs = list(parts.server.dispatch(0, parts.server.select(0)))
    updates = order([_answer(experiment, job, change) for job in jobs])
    if parts.companion is not None:
        for update in updates:
            parts.companion.take(0, update)
    parts.server.collect(0, iter(updates))
    if parts.companion is not None:
        parts.companion.finish(0)
    assert layout.is_finite(parts.server.deploy()), "the deployed model is not finite"
    return parts.server.deploy().clone()


def _answer(experiment: BuiltRun, job: ClientTask, change: float) -> ClientUpdate:
    layout, row = experiment.layout, job.row.clone()
    generator = torch.Generator().manual_seed(job.client)
    if change:
        row[: layout.floats] += change * torch.randn(layout.floats, generator=generator).abs()
    for counter in layout.views(row, TensorKind.INTEGER):
        counter += 1 + 10 * job.client**2  # so that a mean of some of them is none of them
    uploads = experiment.rounds.parts.local.uploads(layout)
    extras = {name: change * torch.randn(shape, generator=generator) for name, shape in uploads.items()}
    return ClientUpdate(job, row, samples=3 + job.client, loss=1.0, steps=2, extras=extras)


# The checks


def _equals_fedavg_when_neutral(method: str, options: Given) -> None:
    """With its neutral options a method is FedAvg, bit for bit."""
    composition = compose(method, options)
    if any(part.neutral is None for part in composition.methods):
        return
    neutral = {part.name: {**options.get(part.name, {}), **(part.neutral or {})} for part in composition.methods}
    fedavg = dict(options.get("fedavg", {}))
    for part in composition.methods:  # what the method sets for FedAvg's server, FedAvg must be told as well
        fedavg = {k.partition(".")[2]: v for k, v in part.defaults.items() if k.startswith("fedavg.")} | fedavg
    expected = small_run("fedavg", {"fedavg": fedavg}).digest
    if "fedavg" in options:
        neutral["fedavg"] = dict(options["fedavg"])
    assert small_run(method, neutral).digest == expected, "its neutral options do not give FedAvg's model"


def _order_of_clients_does_not_matter(method: str, options: Given) -> None:
    """The server makes the same of the answers in whatever order they come."""
    rows = []
    for order in (lambda updates: updates, lambda updates: updates[::-1]):
        with build_small_run(method, options).engine_closed() as experiment:
            rows.append(_run_made_up_round(experiment, order))
            floats = experiment.layout.floats
    close = torch.allclose(rows[0][:floats], rows[1][:floats], rtol=1e-5, atol=1e-6)
    assert close, "answers in another order give another model"
    assert torch.equal(rows[0][floats:], rows[1][floats:]), "answers in another order give other integer buffers"


def _weights_sum_to_one(method: str, options: Given) -> None:
    """Clients that return what they received leave the deployed model as it was (or scaled, if a method says so)."""
    with build_small_run(method, options).engine_closed() as experiment:
        floats, trainable = experiment.layout.floats, experiment.layout.trainable
        before = experiment.rounds.parts.server.deploy().clone()
        after = _run_made_up_round(experiment, lambda updates: updates, change=0.0)
        server = experiment.composition.owner("server")
    if server is not None and server.rescales:  # then it is a multiple of what it was
        factor = (before[:trainable] @ after[:trainable]) / before[:trainable].square().sum()
        assert factor > 0, "the factor on the mean is not positive"
        after[:trainable] /= factor
    assert torch.allclose(before[:floats], after[:floats], rtol=1e-5, atol=1e-7), "the weights do not sum to one"


def _buffers_follow_their_rules(method: str, options: Given) -> None:
    """Deployed float buffers lie between those of the clients; integers are not averaged and keep their type."""
    with build_small_run(method, options).engine_closed() as experiment:
        layout = experiment.layout
        server = experiment.rounds.parts.server
        selected = server.select(0)
        rows = [_answer(experiment, job, 0.01).row for job in server.dispatch(0, selected)]
        rows += [experiment.rounds.context.initial]
        deployed = _run_made_up_round(experiment, lambda updates: updates)
        for entry in layout.entries:
            values = torch.stack([entry.view(row) for row in rows])
            mine = entry.view(deployed)
            if entry.kind is TensorKind.BUFFER:
                low, high = values.min(dim=0).values - 1e-5, values.max(dim=0).values + 1e-5
                assert bool(((mine >= low) & (mine <= high)).all()), f"{entry.name} lies outside what the clients have"
            if entry.kind is TensorKind.INTEGER:
                assert mine.dtype is entry.dtype, f"{entry.name} changed its type"
                assert bool((values == mine).any(dim=0).all()), f"{entry.name} is a value that no client has"


def _copes_with_tiny_clients(method: str, options: Given) -> None:
    """Clients with no sample or one are no trouble, and an empty client changes nothing."""
    federation = SmallFederatedDataset(sizes={0: 0, 1: 1, 2: 2})
    finished = small_run(method, options, federation=federation, per_round=8)
    assert not any(record["lost"] for record in finished.records), "a client with few samples was lost"
    assert isfinite(finished.loss), "the model is not finite"


def _copes_with_lost_clients(method: str, options: Given) -> None:
    """Rounds go on without clients that do not answer, and a round without any answer keeps the model."""
    finished = small_run(method, options, lost=0.5, rounds=6)
    assert sum(record["lost"] for record in finished.records) > 0, "no client was lost in this check"
    assert isfinite(finished.loss), "the model is not finite after clients were lost"
    with build_small_run(method, options).engine_closed() as experiment:
        before = experiment.rounds.parts.server.deploy().clone()
        after = _run_made_up_round(experiment, lambda updates: [])
        assert torch.equal(before, after), "a round without an answer changed the model"


def _refuses_what_is_not_finite(method: str, options: Given) -> None:
    """An update that is not finite is refused and named whenever its client is asked, and never reaches the model."""
    rounds, federation = 16, SmallFederatedDataset(poisoned=3)  # some servers ask a client only now and then
    made = build_small_run(method, options, federation=federation, per_round=8, rounds=rounds)
    with made.engine_closed() as experiment:
        train, asked = experiment.engine.train, list[bool]()

        def noted(round: int, jobs: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
            asked.append(any(job.client == 3 for job in jobs))
            return train(round, jobs)

        experiment.engine.train = noted  # type: ignore[method-assign]  # to see whom it is given
        for round in range(rounds):
            reason = experiment.rounds.play(round)["lost_clients"].get("3", "")
            assert "refused" in reason or not asked[-1], "an update that is not finite was not refused"
            if sum(asked) == 4:
                break
        assert any(asked), f"client 3 of 8 was not asked in {len(asked)} rounds"
        score = experiment.engine.score(experiment.rounds.deployed())
        assert score is None or isfinite(score.loss), "an update that is not finite reached the model"


def _resumes_exactly(method: str, options: Given) -> None:
    """A run that was stopped after any round and resumed gives the same bits as one that was not."""
    whole = small_run(method, options, checkpoint_seconds=0).digest
    for rounds in (1, 3):
        with tempfile.TemporaryDirectory() as place:
            out, federation = Path(place) / "run", SmallFederatedDataset()
            values: dict[str, Any] = {"options": options, "out": out, "report": False, **SETTINGS}
            try:
                run(method, federation, batch_norm_network, watcher=_StopAfter(rounds), **values)
                raise AssertionError("the run was not stopped")
            except RunStopped:
                finished = resume(out, data=federation, model=batch_norm_network, report=False)
            assert finished.digest == whole, f"stopped after round {rounds} and resumed, it gives another model"


def _engines_agree(method: str, options: Given) -> None:
    """One worker, several workers and the plain engine give the same bits."""
    plain = small_run(method, options).digest
    for workers in (1, 3):
        host = small_run(method, options, engine="host", workers=workers).digest
        assert host == plain, f"{workers} worker(s) of the host engine give another model than the plain engine"


def _sends_what_it_says(method: str, options: Given) -> None:
    """The models sent in a round are as many as the method's description says."""
    stated = [method_.models_sent for method_ in compose(method, options).methods]
    matches = [re.fullmatch(r"(\d+)K", text) for text in stated]
    if not all(matches):
        return
    expected = 2 + sum(int(match[1]) - 2 for match in matches if match)
    for record in small_run(method, options, model=simple_network).records:
        sent = record["models_down"] + record["models_up"]
        assert sent == expected * record["clients"], f"it says {stated}, but {sent / record['clients']:g}K were sent"


def _leaves_inputs_alone(method: str, options: Given) -> None:
    """Neither the samples, nor the user's module, nor the models handed to clients are changed."""
    federation, module = SmallFederatedDataset(), batch_norm_network()
    before, weights = federation.content(), {k: v.clone() for k, v in module.state_dict().items()}
    small_run(method, options, federation=federation, model=module)
    assert federation.content() == before, "it changed the samples"
    assert all(torch.equal(v, weights[k]) for k, v in module.state_dict().items()), "it changed the user's module"
    with build_small_run(method, options).engine_closed() as experiment:
        server, companion = experiment.rounds.parts.server, experiment.rounds.parts.companion
        extras = companion.send(0, 0) if companion is not None else {}
        asked = server.dispatch(0, server.select(0))
        jobs = [ClientTask(job.client, job.row, job.slot, {**job.extras, **extras}) for job in asked]
        sent = [tensor for job in jobs for tensor in (job.row, *job.extras.values())]
        rows = [model_digest(tensor) for tensor in sent]
        assert sum(1 for _ in experiment.engine.train(0, jobs)) == len(jobs)
        now = [model_digest(tensor) for tensor in sent]
        assert rows == now, "training changed what the server had sent"


def _needs_no_more_than_it_says(method: str, options: Given) -> None:
    """A server that says that a mean is all it needs makes the same of the answers and of copies of their mean."""
    if not all(part.needs_mean_only for part in compose(method, options).methods):
        return
    of_each, of_mean = (
        state_after_rounds(method, options, _answers, shown) for shown in (_keep_updates, server_sees_only_mean)
    )
    assert states_agree(of_each, of_mean), (
        "its server makes something else of the mean of the answers than of the answers"
    )


Answers = Callable[[BuiltRun, list[ClientTask]], list[ClientUpdate]]
Shown = Callable[[list[ClientUpdate], Layout], list[ClientUpdate]]


def state_after_rounds(method: str, options: Given, answer: Answers, shown: Shown) -> dict[str, Any]:
    """The state of all parts after some rounds with made-up answers, of which they are shown what `shown` makes."""
    with build_small_run(method, options).engine_closed() as experiment:
        parts = experiment.rounds.parts
        companion, refiner = parts.companion, parts.refiner
        for turn in range(3):
            jobs = list(parts.server.dispatch(turn, parts.server.select(turn)))
            updates = shown(answer(experiment, jobs), experiment.layout)
            for update in updates:
                if companion is not None:
                    companion.take(turn, update)
                if refiner is not None:
                    refiner.take(turn, update)
            parts.server.collect(turn, iter(updates))
            if companion is not None:
                companion.finish(turn)
            if refiner is not None:
                refiner.refine(turn, parts.server)
        return {**experiment.state(), "deployed": parts.server.deploy().clone()}


def _answers(experiment: BuiltRun, jobs: list[ClientTask]) -> list[ClientUpdate]:
    return [replace(_answer(experiment, job, 0.01), samples=5) for job in jobs]


def _keep_updates(updates: list[ClientUpdate], layout: Layout) -> list[ClientUpdate]:
    """The updates."""
    return updates


def server_sees_only_mean(updates: list[ClientUpdate], layout: Layout) -> list[ClientUpdate]:
    """As many copies of the mean of all, extras included."""
    mean, row = WeightedMean(layout), updates[0].row.clone()
    for update in updates:
        mean.add(update.row)
    mean.into(row)
    names = updates[0].extras
    extras = {name: torch.stack([update.extras[name] for update in updates]).mean(0) for name in names}
    return [replace(update, row=row, extras=extras) for update in updates]


def states_agree(one: Any, other: Any) -> bool:
    """Whether two states agree to rounding."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(states_agree(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(states_agree, one, other))
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-6)
    return bool(one == other)


def _documents_its_options(method: str, options: Given) -> None:
    """Every option has a help text and a default."""
    for name in method.split("+"):
        for option, field in methods()[name].options.model_fields.items():
            assert field.description, f"the option {name}.{option} has no docstring below it"
            assert not field.is_required(), f"the option {name}.{option} has no default"


CHECKS: dict[str, Check] = {
    check.__name__.strip("_").replace("_", " "): check
    for check in (
        _equals_fedavg_when_neutral,
        _order_of_clients_does_not_matter,
        _weights_sum_to_one,
        _buffers_follow_their_rules,
        _copes_with_tiny_clients,
        _copes_with_lost_clients,
        _refuses_what_is_not_finite,
        _resumes_exactly,
        _engines_agree,
        _sends_what_it_says,
        _leaves_inputs_alone,
        _needs_no_more_than_it_says,
        _documents_its_options,
    )
}


class _StopAfter(SilentCallback):
    """Asks a run to stop after some round."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def record(self, record: Mapping[str, Any]) -> None:
        self.left -= record["round"] > 0

    def wants_stop(self) -> bool:
        return self.left <= 1
