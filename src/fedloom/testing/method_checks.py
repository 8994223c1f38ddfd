"""`check_method`: the tests that every method must pass.

    from fedloom.testing import check_method
    check_method("my_method")

Each check is a function `(method, options) -> None` that raises AssertionError. Together the checks take seconds, on a
part of scikit-learn's digits.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.core.averaging import average_models
from fedloom.core.layout import Layout, TensorKind, model_digest
from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate
from fedloom.errors import RunStopped
from fedloom.methods import compose, methods
from fedloom.methods.variants import parse_method_variant
from fedloom.runs.build import BuiltRun
from fedloom.runs.callback import Callback
from fedloom.runs.execute import resume, run
from fedloom.testing.fixtures import (
    SETTINGS,
    Given,
    SmallFederatedDataset,
    batch_norm_network,
    build_small_run,
    small_run,
)
from fedloom.utils.storage import join_stored_tensors, split_stored_tensors

Check = Callable[[str, Given], None]


def check_method(name: str, options: Given | None = None) -> None:
    """Run all checks of `CHECKS` on a method.

    Args:
        name: A registered method or a combination, such as "fedcross+fedprox". Options may stand behind a name:
            "fedprox:mu=0.1".
        options: Options for all checks, by method and name.

    Raises:
        AssertionError: If a check fails; the message names the method and the check.

    Example:
        check_method("my-memory", {"my-memory": {"rounds": 2}})
    """
    compose(name, options)
    variant = parse_method_variant(name)
    for title, check in CHECKS.items():
        try:
            check(variant.name, variant.merge_options(options or {}))
        except AssertionError as error:
            raise AssertionError(f"{name}: {title}: {error}") from error


# Rounds with made-up updates


Change = Callable[[list[ClientUpdate], Layout], list[ClientUpdate]]


def _run_made_up_round(
    built_run: BuiltRun, transform_updates: Change = lambda updates, _: updates, change: float = 0.01, round: int = 0
) -> Tensor:
    """Run one round with made-up updates, and return the global model before a refiner."""
    parts, layout = built_run.rounds.parts, built_run.layout
    tasks = list(parts.server.dispatch(round, parts.server.sample_clients(round)))
    updates = transform_updates([_answer(built_run, task, change) for task in tasks], layout)
    if parts.extras is not None:
        for update in updates:
            parts.extras.receive_update(round, update)
    parts.server.aggregate(round, iter(updates))
    if parts.extras is not None:
        parts.extras.end_round(round)
    assert layout.is_finite(parts.server.global_model()), "the global model is not finite"
    return parts.server.global_model().clone()


def _answer(built_run: BuiltRun, task: ClientTask, change: float) -> ClientUpdate:
    layout, row = built_run.layout, task.row.clone()
    generator = torch.Generator().manual_seed(task.client_id)
    if change:
        row[: layout.floats] += change * torch.randn(layout.floats, generator=generator).abs()
    for counter in layout.views(row, TensorKind.INTEGER):
        counter += 1 + 10 * task.client_id**2  # no mean of these values is one of them
    upload_shapes = built_run.rounds.parts.client.upload_shapes(layout)
    extras = {name: change * torch.randn(shape, generator=generator) for name, shape in upload_shapes.items()}
    return ClientUpdate(task, row, num_examples=3 + task.client_id, loss=1.0, steps=2 + task.client_id, extras=extras)


# The checks


def _equals_fedavg_when_neutral(method: str, options: Given) -> None:
    """With its neutral options a method equals FedAvg bit for bit."""
    composed_method = compose(method, options)
    if any(part.neutral is None for part in composed_method.methods):
        return
    neutral = {part.name: {**options.get(part.name, {}), **(part.neutral or {})} for part in composed_method.methods}
    fedavg = dict(options.get("fedavg", {}))
    for part in composed_method.methods:  # FedAvg needs the method's defaults for it too
        fedavg = {k.partition(".")[2]: v for k, v in part.defaults.items() if k.startswith("fedavg.")} | fedavg
    expected = small_run("fedavg", {"fedavg": fedavg}).digest
    if "fedavg" in options:
        neutral["fedavg"] = dict(options["fedavg"])
    assert small_run(method, neutral).digest == expected, "with its neutral options, the model differs from FedAvg's"


def _order_of_clients_does_not_matter(method: str, options: Given) -> None:
    """The result does not depend on the order of the updates."""
    rows = []
    for order in (lambda updates, _: updates, lambda updates, _: updates[::-1]):
        with build_small_run(method, options).engine_closed() as built_run:
            rows.append(_run_made_up_round(built_run, order))
            floats = built_run.layout.floats
    close = torch.allclose(rows[0][:floats], rows[1][:floats], rtol=1e-5, atol=1e-6)
    assert close, "the model depends on the order of the updates"
    assert torch.equal(rows[0][floats:], rows[1][floats:]), "the integer buffers depend on the order of the updates"


def _weights_sum_to_one(method: str, options: Given) -> None:
    """Clients that return what they received do not change the global model, or only scale it with `rescales`."""
    with build_small_run(method, options).engine_closed() as built_run:
        floats, trainable = built_run.layout.floats, built_run.layout.trainable
        before = built_run.rounds.parts.server.global_model().clone()
        after = _run_made_up_round(built_run, change=0.0)
        server = built_run.method.owner("server")
    if server is not None and server.rescales:  # the model may be a multiple of the old one
        factor = (before[:trainable] @ after[:trainable]) / before[:trainable].square().sum()
        assert factor > 0, "the server scales the mean by a factor that is not positive"
        after[:trainable] /= factor
    assert torch.allclose(before[:floats], after[:floats], rtol=1e-5, atol=1e-7), "the weights do not sum to one"


def _buffers_follow_their_rules(method: str, options: Given) -> None:
    """Global float buffers lie between those of the clients; integer buffers are not averaged and keep their dtype."""
    with build_small_run(method, options).engine_closed() as built_run:
        layout = built_run.layout
        server = built_run.rounds.parts.server
        client_ids = server.sample_clients(0)
        rows = [_answer(built_run, task, 0.01).row for task in server.dispatch(0, client_ids)]
        rows += [built_run.rounds.context.initial]
        deployed = _run_made_up_round(built_run)
        for entry in layout.entries:
            values = torch.stack([entry.view(row) for row in rows])
            mine = entry.view(deployed)
            if entry.kind is TensorKind.BUFFER:
                low, high = values.min(dim=0).values - 1e-5, values.max(dim=0).values + 1e-5
                assert bool(((mine >= low) & (mine <= high)).all()), (
                    f"{entry.name} is outside the range of the clients' values"
                )
            if entry.kind is TensorKind.INTEGER:
                assert mine.dtype is entry.dtype, f"{entry.name} changed its dtype"
                assert bool((values == mine).any(dim=0).all()), f"{entry.name} is a value that no client has"


def _handles_tiny_clients(method: str, options: Given) -> None:
    """Clients with no, one or two samples do not fail, and the model stays finite."""
    federated_data = SmallFederatedDataset(sizes={0: 0, 1: 1, 2: 2})
    finished = small_run(method, options, federated_data=federated_data, clients_per_round=8)
    assert not any(record["failed"] for record in finished.records), "a client with few samples failed"
    assert isfinite(finished.loss), "the model is not finite"


def _handles_failed_clients(method: str, options: Given) -> None:
    """Rounds continue without failed clients, and a round without updates keeps the model."""
    finished = small_run(method, options, failure_rate=0.5, rounds=6)
    assert sum(record["failed"] for record in finished.records) > 0, "no client failed in this check"
    assert isfinite(finished.loss), "the model is not finite after clients failed"
    with build_small_run(method, options).engine_closed() as built_run:
        before = built_run.rounds.parts.server.global_model().clone()
        after = _run_made_up_round(built_run, lambda *_: [])
        assert torch.equal(before, after), "a round without updates changed the model"


def _refuses_what_is_not_finite(method: str, options: Given) -> None:
    """An update that is not finite is rejected and recorded each time its client is sampled. It reaches no model."""
    if compose(method, options).bracket == "centralized":  # clients send no updates
        return
    rounds, federated_data = 16, SmallFederatedDataset(poisoned=3)  # some servers sample a client rarely
    made = build_small_run(method, options, federated_data=federated_data, clients_per_round=8, rounds=rounds)
    with made.engine_closed() as built_run:
        train, asked = built_run.engine.train, list[bool]()

        def noted(tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
            asked.append(any(task.client_id == 3 for task in tasks))
            return train(tasks)

        built_run.engine.train = noted  # type: ignore[method-assign]  # to see which clients it gets
        for round in range(rounds):
            reason = built_run.rounds.run_round(round)["failed_clients"].get("3", "")
            assert "rejected" in reason or not asked[-1], "an update that is not finite was not rejected"
            if sum(asked) == 4:
                break
        assert any(asked), f"client 3 of 8 was not sampled in {len(asked)} rounds"
        result = built_run.engine.evaluate(built_run.rounds.global_model())
        assert result is None or isfinite(result.loss), "an update that is not finite reached the model"


def _resumes_exactly(method: str, options: Given) -> None:
    """A run that is stopped and resumed gives the same bits as one without a stop."""
    whole = small_run(method, options, checkpoint_seconds=0).digest
    for rounds in (1, 3):
        with tempfile.TemporaryDirectory() as place:
            out, federated_data = Path(place) / "run", SmallFederatedDataset()
            values: dict[str, Any] = {"options": options, "out": out, "report": False, **SETTINGS}
            try:
                run(method, federated_data, batch_norm_network, callbacks=[_StopAfter(rounds)], **values)
                raise AssertionError("the run was not stopped")
            except RunStopped:
                finished = resume(out, data=federated_data, model=batch_norm_network, report=False)
            if finished.digest != whole:
                raise AssertionError(
                    f"the model differs after a stop in round {rounds} and a resume; a resume does not restore "
                    f"{' and '.join(_unrestored_attributes(method, options)) or 'something'}"
                )


def _unrestored_attributes(method: str, options: Given) -> list[str]:
    """Return the attributes of parts that two rounds change and a checkpoint does not bring back."""
    with (
        build_small_run(method, options).engine_closed() as stopped,
        build_small_run(method, options).engine_closed() as resumed,
    ):
        for round in range(2):
            stopped.rounds.run_round(round)
        resumed.load_state_dict(join_stored_tensors(*split_stored_tensors(stopped.state_dict())))
        return [
            f"{type(part).__name__}.{name}"
            for (_, part), (_, other) in zip(stopped.rounds.parts.items(), resumed.rounds.parts.items(), strict=True)
            for name, value in vars(part).items()
            if name not in ("context", "options") and not _values_agree(value, getattr(other, name, None))
        ]


def _values_agree(first: Any, second: Any) -> bool:
    """Return whether two attributes have the same value; objects of other kinds count as equal."""
    if isinstance(first, Mapping | list | tuple | Tensor) and isinstance(second, type(first)):
        return _states_agree(first, second)
    plain = bool | int | float | str | None
    return not isinstance(first, plain) or (isinstance(second, plain) and first == second)


def _engines_agree(method: str, options: Given) -> None:
    """One worker, several workers and the sequential engine give the same bits."""
    plain = small_run(method, options).digest
    for workers in (1, 3):
        host = small_run(method, options, engine="multiprocess", workers=workers).digest
        assert host == plain, (
            f"the model of the multiprocess engine with {workers} worker(s) differs from the sequential engine's"
        )


def _leaves_inputs_alone(method: str, options: Given) -> None:
    """A run does not change the samples, the user's module or the models sent to clients."""
    federated_data, model = SmallFederatedDataset(), batch_norm_network()
    before, weights = federated_data.fingerprint(), {k: v.clone() for k, v in model.state_dict().items()}
    small_run(method, options, federated_data=federated_data, model=model)
    assert federated_data.fingerprint() == before, "the method changed the samples"
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items()), (
        "the method changed the user's module"
    )
    with build_small_run(method, options).engine_closed() as built_run:
        server, extras_part = built_run.rounds.parts.server, built_run.rounds.parts.extras
        extras = extras_part.send_to_client(0, 0) if extras_part is not None else {}
        requested = server.dispatch(0, server.sample_clients(0))
        tasks = [replace(task, extras={**task.extras, **extras}, round=0) for task in requested]
        sent = [tensor for task in tasks for tensor in (task.row, *task.extras.values())]
        rows = [model_digest(tensor) for tensor in sent]
        assert sum(1 for _ in built_run.engine.train(tasks)) == len(tasks)
        now = [model_digest(tensor) for tensor in sent]
        assert rows == now, "training changed the tensors that the server sent"


def _needs_no_more_than_it_says(method: str, options: Given) -> None:
    """If a method needs only the mean, copies of the mean give the same state as the updates."""
    if any(part.part_that_needs_updates for part in compose(method, options).methods):
        return
    of_each = _state_after_rounds(method, options, lambda updates, _: updates)
    of_mean = _state_after_rounds(method, options, _server_sees_only_mean)
    assert _states_agree(of_each, of_mean), (
        'copies of the mean give another state than the updates: set needs = "updates" on the class'
    )


def _state_after_rounds(method: str, options: Given, transform_updates: Change) -> dict[str, Any]:
    """Return the state of all parts after three rounds with updates of equal weight."""
    with build_small_run(method, options).engine_closed() as built_run:
        server, refiner = built_run.rounds.parts.server, built_run.rounds.parts.refiner
        for turn in range(3):

            def seen(updates: list[ClientUpdate], layout: Layout, turn: int = turn) -> list[ClientUpdate]:
                updates = transform_updates([replace(update, num_examples=5) for update in updates], layout)
                if refiner is not None:
                    for update in updates:
                        refiner.receive_update(turn, update)
                return updates

            _run_made_up_round(built_run, seen, round=turn)
            if refiner is not None:
                refiner.refine(turn, server)
        return {**built_run.state_dict(), "deployed": server.global_model().clone()}


def _server_sees_only_mean(updates: list[ClientUpdate], layout: Layout) -> list[ClientUpdate]:
    """Replace each update by the mean of all, extras included."""
    row = average_models(layout, [update.row for update in updates])
    names = updates[0].extras
    extras = {name: torch.stack([update.extras[name] for update in updates]).mean(0) for name in names}
    return [replace(update, row=row, extras=extras) for update in updates]


def _states_agree(first: Any, second: Any) -> bool:
    """Return whether two states agree up to rounding."""
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_states_agree(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_states_agree, first, second))
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and torch.allclose(first.double(), second.double(), rtol=1e-4, atol=1e-6)
    return first is second or bool(first == second)


def _documents_its_options(method: str, options: Given) -> None:
    """Every option has a help text and a default value."""
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
        _handles_tiny_clients,
        _handles_failed_clients,
        _refuses_what_is_not_finite,
        _resumes_exactly,
        _engines_agree,
        _leaves_inputs_alone,
        _needs_no_more_than_it_says,
        _documents_its_options,
    )
}
"""All checks by name. Use them to show each check as a test of its own.

Example:
    @pytest.mark.parametrize("title", CHECKS)
    def test_my_method(title):
        CHECKS[title]("my_method", {})
"""


class _StopAfter(Callback):
    """Stop a run after a number of rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds_left = rounds

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        self.rounds_left -= record["round"] > 0

    def should_stop(self) -> bool:
        return self.rounds_left <= 0
