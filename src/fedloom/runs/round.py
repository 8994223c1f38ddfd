"""Run one round: sample clients, dispatch, train, aggregate, refine, evaluate.

    client_ids = server.sample_clients(round)      # sample the clients of this round
    tasks = server.dispatch(round, client_ids)     # a model (and extras) for each client
    updates = engine.train(tasks)                  # updates, while clients finish
    server.aggregate(round, updates)               # new models of the server
    refiner.refine(round, server)                  # optional
    engine.evaluate(server.global_model())         # metrics, also of personal models

`round` counts from 0. The `round` of a record is the number of finished rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.config import Config
from fedloom.core.layout import Layout, all_finite, model_digest, scatter_columns
from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate, Shapes
from fedloom.engines.base import Engine
from fedloom.errors import FedloomError
from fedloom.methods.base import MethodContext, MethodPart, Server
from fedloom.methods.composition import MethodParts
from fedloom.privacy.mechanism import PrivacyMechanism, mechanism_base_model
from fedloom.runs.metrics import (
    DivergenceMonitor,
    RoundMetricsTimer,
    client_accuracy_metrics,
    mean_and_worst_decile,
)
from fedloom.training.context import PERSONAL_KEY

MOST_PERSONAL = 100
"""Most personal models to evaluate, and of held-out clients. Of more, a sample is drawn once for the run."""


@dataclass
class _RoundStatistics:
    """What happened to the tasks of one round."""

    accepted: int = 0
    num_examples: int = 0
    loss_sum: float = 0.0
    bytes_up: int = 0
    idle: int = 0
    """Clients without training samples."""
    failed: dict[int, str] = field(default_factory=dict)
    """Clients that did not answer or whose update was rejected, and why."""
    received: int = 0
    """Updates of clients with samples, accepted or rejected."""
    non_finite: int = 0
    """Updates with a model or a training loss that is not finite."""
    num_permanent: int = 0
    """How many of them cannot answer, even if the round is repeated."""
    unsent_tasks: list[ClientTask] = field(default_factory=list)
    """Tasks that were never sent, because the client was not there."""

    def count_bytes(self, tasks: list[ClientTask], personal_bytes: int) -> tuple[int, int]:
        """Return the bytes sent down to clients and up to the server; those of personal columns never travel."""
        sent = sum(task.nbytes for task in tasks) - sum(task.nbytes for task in self.unsent_tasks)
        return sent - personal_bytes * (len(tasks) - len(self.unsent_tasks)), self.bytes_up

    def count_update(self, update: ClientUpdate, fault: str | None) -> None:
        """Count an update of a client with samples, and whether it is finite."""
        if update.num_examples:
            infinite_loss = update.steps > 0 and not np.isfinite(update.loss)
            self.received += 1
            self.non_finite += infinite_loss or (fault is not None and fault.endswith("is not finite"))


@dataclass
class RoundRunner:
    """Run the rounds of one run."""

    config: Config
    context: MethodContext
    parts: MethodParts
    engine: Engine
    label_counts: np.ndarray | None
    privacy: PrivacyMechanism | None = None
    """If set, the server sees only a private mean of the updates."""
    pooled_bytes: int | None = None
    """Bytes of all training samples, if they are in one place; only they are sent then, before the first round."""
    check: Callable[[], None] = lambda: None
    """Called after each client's answer. It may raise an error to end the round."""
    diverging: DivergenceMonitor = field(default_factory=DivergenceMonitor)

    def __post_init__(self) -> None:
        self._named_parts = self.parts.items()

    @property
    def total(self) -> int:
        """Return the number of rounds: as set, or fewer if the privacy budget allows no more."""
        return self.context.planned_rounds

    @property
    def repeatable(self) -> bool:
        """Return whether a repeated round gives the same bits."""
        return self.privacy is None or self.privacy.repeatable

    def initial_record(self) -> dict[str, Any]:
        """Return the record of round 0: the initial model before any training."""
        timer = RoundMetricsTimer()
        record = {"round": 0, **(self.privacy.spent(0) if self.privacy else {})}
        return self._evaluate(record, timer) | {"seconds": timer.report()}

    def run_round(self, round: int) -> dict[str, Any]:
        """Run one round and return its record."""
        server, extras, refiner = self.parts.server, self.parts.extras, self.parts.refiner
        timer, statistics = RoundMetricsTimer(), _RoundStatistics()
        with timer.measure("sample_clients"):
            client_ids = self._sample_clients(round)
        with timer.measure("dispatch"):
            tasks = [replace(task, round=round) for task in server.dispatch(round, client_ids)]
            if extras is not None:
                tasks = [
                    replace(task, extras={**task.extras, **extras.send_to_client(round, task.client_id)})
                    for task in tasks
                ]
            _check_no_repeats(self.engine, round, tasks)
        with timer.measure("aggregate"):
            answers = self._valid_updates(round, tasks, timer, statistics)
            if self.privacy is not None:
                answers = self.privacy.mean(round, mechanism_base_model(tasks, server.models()), answers)
            server.aggregate(round, self._observed_updates(round, answers))
            if extras is not None:
                extras.end_round(round)
        # With noise, the end of a run must not depend on the data: the guarantee does not cover it.
        if self.privacy is None or not self.privacy.noise:
            self.diverging.add_round(round + 1, statistics.non_finite, statistics.received)
        timer.add("aggregate", -timer.seconds.get("train", 0.0))  # aggregation waits for training inside
        if refiner is not None:
            with timer.measure("refine"):
                refiner.refine(round, server)

        size = self.context.layout.nbytes
        bytes_down, bytes_up = statistics.count_bytes(tasks, self._personal_bytes())
        if self.pooled_bytes is not None:
            bytes_down, bytes_up = 0, 0 if round else self.pooled_bytes
        record: dict[str, Any] = {
            "round": round + 1,
            "train_loss": statistics.loss_sum / statistics.num_examples if statistics.num_examples else None,
            "bytes_down": bytes_down,
            "bytes_up": bytes_up,
            "models_down": bytes_down / size,
            "models_up": bytes_up / size,
            "clients": len(tasks),
            "idle": statistics.idle,
            "failed": len(statistics.failed),
            "failed_clients": {str(client): reason for client, reason in statistics.failed.items()},
        }
        if self.privacy is not None:
            record |= self.privacy.spent(round + 1)
        elif not statistics.accepted:
            record["note"] = "no client answered, so the model was kept as it was"
        reporting: list[tuple[str, MethodPart[Any] | Engine]] = [*self._named_parts, ("engine", self.engine)]
        numbers = {f"{name}.{key}": value for name, part in reporting for key, value in part.diagnostics().items()}
        if numbers:
            record["diagnostics"] = numbers
        if (round + 1) % self.config.eval_every == 0 or round + 1 == self.total:
            record = self._evaluate(record, timer)
        return record | {"seconds": timer.report()}

    def _valid_updates(
        self, round: int, tasks: list[ClientTask], timer: RoundMetricsTimer, statistics: _RoundStatistics
    ) -> Iterator[ClientUpdate]:
        """Yield the valid updates. Count the others, and record the reasons."""
        asked = []
        for task in tasks:
            if self._simulates_failure(round, task):
                statistics.failed[task.client_id] = "did not answer (simulated)"
            else:
                asked.append(task)
        personal_bytes, upload_shapes = self._personal_bytes(), self.parts.client.upload_shapes(self.context.layout)
        for answer in timer.measure_iterator(self.engine.train(asked), "train"):
            self.check()
            if isinstance(answer, ClientFailure):
                statistics.failed[answer.task.client_id] = answer.reason
                statistics.num_permanent += answer.permanent
                if not answer.was_sent:
                    statistics.unsent_tasks.append(answer.task)
                continue
            statistics.bytes_up += answer.nbytes - personal_bytes
            fault = _find_update_fault(answer, self.context.layout, upload_shapes)
            statistics.count_update(answer, fault)
            if fault:
                statistics.failed[answer.client_id] = f"rejected: {fault}"
            elif answer.num_examples == 0:
                statistics.idle += 1
            else:
                statistics.accepted += 1
                if np.isfinite(answer.loss):
                    statistics.num_examples += answer.num_examples
                    statistics.loss_sum += answer.num_examples * answer.loss
                self.engine.commit_update(answer)
                yield answer
        # If no update came and enough clients can never answer, an error here would block the run forever.
        min_clients = self._min_clients(len(tasks))
        never = statistics.num_permanent
        hopeless = never and len(tasks) - never < min_clients and not statistics.accepted
        if statistics.accepted < min_clients and not hopeless:
            reasons = "; ".join(
                f"client {client_id}: {reason}" for client_id, reason in list(statistics.failed.items())[:3]
            )
            raise FedloomError(
                f"round {round + 1}: {statistics.accepted} of {len(tasks)} clients answered, but min_clients is "
                f"{min_clients}{' by default' if self.config.min_clients is None else ''} "
                f"({reasons or 'the others have no samples'})."
            )

    def _min_clients(self, num_clients: int) -> int:
        """Return how many clients of a round must answer; with fewer the run ends."""
        if self.pooled_bytes is not None:  # no client is asked
            return 0
        if self.config.min_clients is not None:
            return self.config.min_clients
        # The privacy guarantee does not cover the end of a run, so it ends early only if `min_clients` is set.
        return 0 if self.privacy is not None and self.privacy.noise else self.engine.default_min_clients(num_clients)

    def _sample_clients(self, round: int) -> list[int]:
        if self.privacy is not None and self.privacy.noise:
            return self.privacy.sample_clients(round)
        return self.parts.server.sample_clients(round)

    def _observed_updates(self, round: int, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        """Yield the updates after extras and refiner have seen them."""
        for update in updates:
            for part in (self.parts.extras, self.parts.refiner):
                if part is not None:
                    part.receive_update(round, update)
            yield update

    def _personal_bytes(self) -> int:
        """Return the bytes of the personal columns, which never travel."""
        layout = self.context.layout
        columns: int = sum(part.stop - part.start for part in self.parts.client.personal_columns(layout))
        return columns * layout.dtype.itemsize

    def _simulates_failure(self, round: int, task: ClientTask) -> bool:
        chance = self.config.failure_rate
        return bool(chance and self.context.rng_streams.numpy("lost", round, task.client_id).random() < chance)

    @property
    def has_global_model(self) -> bool:
        """Return whether there is a global model: not if each client keeps its whole model."""
        return self._personal_bytes() < self.context.layout.nbytes

    def digest(self) -> str:
        """Return the SHA-256 of the global model; without one, of the clients' models in the order of the clients.

        A client that has not trained yet has no model of its own.
        """
        client_states = self.engine.client_states
        if self.has_global_model or not len(client_states):
            return model_digest(self.global_model())
        return model_digest(*(client_states.get(client_id)[PERSONAL_KEY] for client_id in client_states.client_ids()))

    def global_model(self) -> Tensor:
        """Return the global model. Its personal columns are the mean of the clients' own, weighted by samples.

        Otherwise the model would have columns that were never trained. This is only possible in simulation; these
        columns are not sent to anybody.
        """
        row, layout, client_states = self.parts.server.global_model(), self.context.layout, self.engine.client_states
        personal_columns = self.parts.client.personal_columns(layout)
        if not personal_columns or not len(client_states):
            return row
        mean, theirs, total = row.clone(), row.clone(), 0
        for client_id in client_states.client_ids():
            num_examples = self.context.num_examples(client_id)
            total += num_examples
            scatter_columns(theirs, personal_columns, client_states.get(client_id)[PERSONAL_KEY])
            for columns in personal_columns if num_examples else ():
                floats = slice(columns.start, min(columns.stop, layout.floats))
                mean[floats].lerp_(theirs[floats], num_examples / total)
            for counters, others in zip(*map(layout.integers, (mean, theirs)), strict=True):
                torch.maximum(counters, others, out=counters)
        return mean

    def artifacts(self) -> dict[str, dict[str, Tensor]]:
        """Return the artifacts of all parts, with the normalization constants, because images are made as inputs."""
        transform, artifacts = self.engine.context.data.transform, dict[str, dict[str, Tensor]]()
        constants = {"mean": torch.tensor(transform.mean), "std": torch.tensor(transform.std)} if transform.mean else {}
        for _, part in self._named_parts:
            artifacts.update({name: {**tensors, **constants} for name, tensors in part.artifacts().items()})
        return artifacts

    def _evaluate(self, record: dict[str, Any], timer: RoundMetricsTimer) -> dict[str, Any]:
        with timer.measure("evaluate"):
            row = self.global_model()
            result = self.engine.evaluate(row) if self.has_global_model else None
            if self.has_global_model:
                record = {**record, **_evaluate_held_out_clients(self.engine, record["round"], row)}
        if result is not None:
            # The loss of a finite model may overflow, and JSON cannot store that.
            record = {**record, "accuracy": result.accuracy, "loss": result.loss if np.isfinite(result.loss) else None}
            test_owners = self.engine.context.data.test_owners
            if among_clients := client_accuracy_metrics(result, self.label_counts, test_owners):
                record["client_accuracy_mean"], record["client_accuracy_worst10"] = among_clients
        if self.engine.context.client.personalize is not None and self.context.classes and self._has_tests():
            with timer.measure("evaluate"):
                server = self.parts.server
                record |= _evaluate_personal_models(self.engine, server, self.context, record["round"], row)
        return record

    def _has_tests(self) -> bool:
        test = self.engine.context.data.test
        return test is not None and len(test) > 0


def _check_no_repeats(engine: Engine, round: int, tasks: list[ClientTask]) -> None:
    """Reject two tasks for a client with state, or with one memory for their results.

    Engines differ in whether the second task sees the new state.
    """
    client_ids = [task.client_id for task in tasks]
    if engine.client_states.shapes and len(set(client_ids)) < len(client_ids):
        twice = next(client_id for client_id in client_ids if client_ids.count(client_id) > 1)
        raise FedloomError(
            f"round {round + 1}: the server sends client {twice} several tasks, but clients of this method keep "
            "state between rounds; send one task to a client that is drawn twice, and count its update twice."
        )
    result_rows = [task.result_row.data_ptr() for task in tasks if task.result_row is not None]
    if len(set(result_rows)) < len(result_rows):
        raise FedloomError(
            f"round {round + 1}: two tasks of the server have the same `result_row`, where their clients would "
            "overwrite each other's model; give each task a row of its own, or None."
        )


def _evaluate_personal_models(
    engine: Engine, server: Server[Any], context: MethodContext, played: int, row: Tensor
) -> dict[str, Any]:
    """Evaluate the personal models, of the same clients every time."""
    num_clients = context.num_clients
    client_ids: Sequence[int] = range(num_clients)
    if num_clients > MOST_PERSONAL:
        rng = context.rng_streams.numpy("personal")
        client_ids = sorted(int(c) for c in rng.choice(num_clients, MOST_PERSONAL, replace=False))
    rows = dict[int, Tensor]()
    for client_id in client_ids:
        personal_model = server.personal_model(client_id)
        rows[client_id] = row if personal_model is None else personal_model
    accuracies = engine.evaluate_clients(
        [ClientTask(client_id, rows[client_id], round=played) for client_id in client_ids]
    )
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    if not known:
        return {}
    mean, worst = mean_and_worst_decile(known)
    return {"personal_accuracy_mean": mean, "personal_accuracy_worst10": worst, "personal_clients": len(known)}


def _evaluate_held_out_clients(engine: Engine, played: int, row: Tensor) -> dict[str, Any]:
    """Evaluate clients that never train, the same ones every time. The server keeps no model for them."""
    held_out, first = engine.context.held_out, len(engine.context.data)
    if held_out is None:
        return {}
    client_ids = range(first, first + min(len(held_out), MOST_PERSONAL))
    accuracies = engine.evaluate_clients([ClientTask(client_id, row, round=played) for client_id in client_ids])
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    if not known:
        return {"held_out_scored": 0}
    mean, worst = mean_and_worst_decile(known)
    return {"held_out_accuracy_mean": mean, "held_out_accuracy_worst10": worst, "held_out_scored": len(known)}


def _find_update_fault(update: ClientUpdate, layout: Layout, upload_shapes: Shapes) -> str | None:
    """Validate an update before it reaches a model. Return what is wrong with it, or None."""
    if update.row.shape != (layout.size,) or update.row.dtype is not layout.dtype:
        return f"its model has {tuple(update.row.shape)} numbers, not {layout.size}"
    if not update.finite and not layout.is_finite(update.row):
        return "its model is not finite"
    if update.extras.keys() != upload_shapes.keys():
        return f"it sent {sorted(update.extras)} beside its model, not {sorted(upload_shapes)}"
    for name, tensor in update.extras.items():
        if tuple(tensor.shape) != tuple(upload_shapes[name]):
            return f"its {name} has shape {tuple(tensor.shape)}, not {tuple(upload_shapes[name])}"
        if not update.finite and not all_finite(tensor):
            return f"its {name} is not finite"
    for name, tensor in update.client_state.items():
        if not update.finite and not all_finite(tensor):
            return f"its client state {name.removeprefix('@')} is not finite"
    if update.num_examples < 0:
        return f"it claims {update.num_examples} samples"
    return None
