"""The rounds: the heart of the program.

    clients = server.select(round)                 # whom to ask
    jobs    = server.dispatch(round, clients)      # a model (and extras) for each of them
    updates = engine.train(jobs)                   # answers come as clients finish
    server.collect(round, updates)                 # new state of the server
    refine(server)                                 # optional
    record(score(server.deploy()))                 # metrics, and the clients' own models where they have some

Rounds count from 0 inside, and a record says after how many rounds it was taken.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.config import Config
from fedloom.core.layout import Layout, all_finite, scatter_columns
from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate, Shapes
from fedloom.engines.base import Engine
from fedloom.errors import FedloomError
from fedloom.methods.base import MethodContext, MethodPart
from fedloom.methods.composition import MethodParts
from fedloom.privacy.mechanism import PrivacyMechanism, common_base_model
from fedloom.runs.metrics import RoundTimer, client_accuracy_metrics, mean_and_worst_decile
from fedloom.training.context import PERSONAL_KEY

MOST_PERSONAL = 100
"""Clients whose own models are scored in one evaluation; where there are more, as many are drawn once for the run."""


@dataclass
class _RoundStatistics:
    """What happened to the jobs of one round."""

    accepted: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    bytes_up: int = 0
    idle: int = 0
    """Clients that have no samples: they are asked, and have nothing to say."""
    lost: dict[int, str] = field(default_factory=dict)
    """Clients that did not answer or whose answer was refused, and why."""
    for_good: int = 0
    """How many of these will not answer in this round, however often it is played."""
    unreached: list[ClientTask] = field(default_factory=list)
    """What was never sent, because nobody was there."""


@dataclass
class RoundRunner:
    """One run's rounds, one after the other."""

    config: Config
    context: MethodContext
    parts: MethodParts
    engine: Engine
    label_counts: np.ndarray | None
    privacy: PrivacyMechanism | None = None
    """Where the server sees a private mean of the answers alone."""
    check: Callable[[], None] = lambda: None
    """Called after each client's answer; an error that it raises ends the round."""

    @property
    def total(self) -> int:
        """How many rounds there will be: those that were asked for, or as many as privacy allows."""
        return self.context.rounds

    @property
    def repeatable(self) -> bool:
        """Whether a round that is played again gives the same bits."""
        return self.privacy is None or self.privacy.repeatable

    def initial_record(self) -> dict[str, Any]:
        """The record of the model before any training, round 0."""
        clock = RoundTimer()
        record = {"round": 0, **(self.privacy.spent(0) if self.privacy else {})}
        return self._score(record, clock) | {"seconds": clock.report()}

    def play(self, round: int) -> dict[str, Any]:
        """Play one round; returns its record."""
        server, companion, refiner = self.parts.server, self.parts.companion, self.parts.refiner
        clock, tally = RoundTimer(), _RoundStatistics()
        with clock.part("select"):
            clients = self._select(round)
        with clock.part("dispatch"):
            jobs = list(server.dispatch(round, clients))
            if companion is not None:
                jobs = [replace(j, extras={**j.extras, **companion.send(round, j.client)}) for j in jobs]
            self._refuse_repeats(round, jobs)
        with clock.part("collect"):
            answers = self._answers(round, jobs, clock, tally)
            if self.privacy is not None:
                answers = self.privacy.mean(round, common_base_model(jobs, server.models()), answers)
            server.collect(round, self._shown(round, answers))
            if companion is not None:
                companion.finish(round)
        clock.add("collect", -clock.seconds.get("train", 0.0))  # collecting waits for training inside
        if refiner is not None:
            with clock.part("refine"):
                refiner.refine(round, server)

        size = self.context.layout.nbytes
        sent = sum(job.nbytes for job in jobs) - sum(job.nbytes for job in tally.unreached)
        bytes_down = sent - self._bytes_at_home() * (len(jobs) - len(tally.unreached))
        record: dict[str, Any] = {
            "round": round + 1,
            "train_loss": tally.loss_sum / tally.samples if tally.samples else None,
            "bytes_down": bytes_down,
            "bytes_up": tally.bytes_up,
            "models_down": bytes_down / size,
            "models_up": tally.bytes_up / size,
            "clients": len(jobs),
            "idle": tally.idle,
            "lost": len(tally.lost),
            "lost_clients": {str(client): reason for client, reason in tally.lost.items()},
        }
        if self.privacy is not None:
            record |= self.privacy.spent(round + 1)
        elif not tally.accepted:
            record["note"] = "no client answered, so the model was kept as it was"
        speaking: list[tuple[str, MethodPart[Any] | Engine]] = [*self.parts.items(), ("engine", self.engine)]
        numbers = {f"{name}.{key}": value for name, part in speaking for key, value in part.diagnostics().items()}
        if numbers:
            record["diagnostics"] = numbers
        if (round + 1) % self.config.eval_every == 0 or round + 1 == self.total:
            record = self._score(record, clock)
        return record | {"seconds": clock.report()}

    def _answers(
        self, round: int, jobs: list[ClientTask], clock: RoundTimer, tally: _RoundStatistics
    ) -> Iterator[ClientUpdate]:
        """The answers that are fit to be used. Everything else is counted and named."""
        asked = []
        for job in jobs:
            if self._goes_missing(round, job):
                tally.lost[job.client] = "did not answer (simulated)"
            else:
                asked.append(job)
        at_home, uploads = self._bytes_at_home(), self.parts.local.uploads(self.context.layout)
        for answer in clock.waiting(self.engine.train(round, asked), "train"):
            self.check()
            if isinstance(answer, ClientFailure):
                tally.lost[answer.job.client] = answer.reason
                tally.for_good += answer.for_good
                if not answer.reached:
                    tally.unreached.append(answer.job)
                continue
            tally.bytes_up += answer.nbytes - at_home
            if fault := _find_update_fault(answer, self.context.layout, uploads):
                tally.lost[answer.client] = f"refused: {fault}"
            elif answer.samples == 0:
                tally.idle += 1
            else:
                tally.accepted += 1
                if np.isfinite(answer.loss):
                    tally.samples += answer.samples
                    tally.loss_sum += answer.samples * answer.loss
                self.engine.accept(answer)
                yield answer
        # A round in which there can never be enough answers any more would hold up the run for ever.
        fewest = self._fewest_answers(len(jobs))
        hopeless = tally.for_good and len(jobs) - tally.for_good < fewest
        if tally.accepted < fewest and not hopeless:
            reasons = "; ".join(f"client {client}: {reason}" for client, reason in list(tally.lost.items())[:3])
            raise FedloomError(
                f"round {round + 1}: {tally.accepted} of {len(jobs)} clients answered, but min_clients is {fewest}"
                f"{' by default' if self.config.min_clients is None else ''} "
                f"({reasons or 'the others have no samples'})."
            )

    def _fewest_answers(self, asked: int) -> int:
        """How many of the clients asked in a round must answer, or else the run ends."""
        if self.config.min_clients is not None:
            return self.config.min_clients
        # A guarantee of privacy does not cover that a run ends, so one must ask for it.
        return 0 if self.privacy is not None and self.privacy.noise else self.engine.fewest_answers(asked)

    def _select(self, round: int) -> list[int]:
        if self.privacy is not None and self.privacy.noise:
            return self.privacy.select(round)
        return self.parts.server.select(round)

    def _shown(self, round: int, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        """The updates on their way to the server, which companion and refiner see first."""
        for update in updates:
            for part in (self.parts.companion, self.parts.refiner):
                if part is not None:
                    part.take(round, update)
            yield update

    def _refuse_repeats(self, round: int, jobs: list[ClientTask]) -> None:
        """What a client keeps changes once a round: a second job would begin with what the first left, or without."""
        clients = [job.client for job in jobs]
        if self.engine.homes.shapes and len(set(clients)) < len(clients):
            twice = next(client for client in clients if clients.count(client) > 1)
            raise FedloomError(
                f"round {round + 1}: the server asks client {twice} more than once, and clients of this method keep "
                "something between rounds; a server that draws a client twice must ask it once and count it twice."
            )

    def _bytes_at_home(self) -> int:
        """The part of every model that does not travel."""
        layout = self.context.layout
        columns: int = sum(part.stop - part.start for part in self.parts.local.stays_home(layout))
        return columns * layout.dtype.itemsize

    def _goes_missing(self, round: int, job: ClientTask) -> bool:
        chance = self.config.lost
        return bool(chance and self.context.streams.numpy("lost", round, job.client).random() < chance)

    def deployed(self) -> Tensor:
        """The model that would be deployed now. What stays with the clients is the mean, by samples, of theirs.

        Without that a network would be deployed with columns that nobody ever trained. It is a simulation's privilege
        to look at them; nothing of it is sent to anybody.
        """
        row, layout, homes = self.parts.server.deploy(), self.context.layout, self.engine.homes
        stays = self.parts.local.stays_home(layout)
        if not stays or not len(homes):
            return row
        mean, theirs, total = row.clone(), row.clone(), 0
        for client in homes.clients():
            count = self.context.samples(client)
            total += count
            scatter_columns(theirs, stays, homes.get(client)[PERSONAL_KEY])
            for columns in stays if count else ():
                floats = slice(columns.start, min(columns.stop, layout.floats))
                mean[floats].lerp_(theirs[floats], count / total)
            for counters, others in zip(*map(layout.integers, (mean, theirs)), strict=True):
                torch.maximum(counters, others, out=counters)
        return mean

    def _score(self, record: dict[str, Any], clock: RoundTimer) -> dict[str, Any]:
        with clock.part("evaluate"):
            row = self.deployed()
            score = self.engine.score(row)
        if score is None:
            return record
        # A loss may overflow where the model is finite; JSON has no number for that.
        record = {**record, "accuracy": score.accuracy, "loss": score.loss if np.isfinite(score.loss) else None}
        owners = self.engine.shop.federation.test_owners
        if among_clients := client_accuracy_metrics(score, self.label_counts, owners):
            record["client_accuracy_mean"], record["client_accuracy_worst10"] = among_clients
        if self.engine.shop.personal is not None and self.context.classes:
            with clock.part("evaluate"):
                record.update(self._score_personal(record["round"], row))
        return record

    def _score_personal(self, played: int, row: Tensor) -> dict[str, Any]:
        """How clients fare with models of their own; the same clients at every evaluation."""
        count = self.context.clients
        clients: Sequence[int] = range(count)
        if count > MOST_PERSONAL:
            draw = self.context.streams.numpy("personal")
            clients = sorted(int(c) for c in draw.choice(count, MOST_PERSONAL, replace=False))
        server, rows = self.parts.server, dict[int, Tensor]()
        for client in clients:
            own = server.own_model(client)
            rows[client] = row if own is None else own
        accuracies = self.engine.score_clients(played, [ClientTask(client, rows[client]) for client in clients])
        known = [accuracy for accuracy in accuracies if accuracy is not None]
        if not known:
            return {}
        mean, worst = mean_and_worst_decile(known)
        return {"personal_accuracy_mean": mean, "personal_accuracy_worst10": worst, "personal_clients": len(known)}


def _find_update_fault(update: ClientUpdate, layout: Layout, uploads: Shapes) -> str | None:
    """Why an update must not reach a model, or None. What comes from outside is checked before it is used."""
    if update.row.shape != (layout.size,) or update.row.dtype is not layout.dtype:
        return f"its model has {tuple(update.row.shape)} numbers, not {layout.size}"
    if not update.finite and not layout.is_finite(update.row):
        return "its model is not finite"
    if update.extras.keys() != uploads.keys():
        return f"it sent {sorted(update.extras)} beside its model, not {sorted(uploads)}"
    for name, tensor in update.extras.items():
        if tuple(tensor.shape) != tuple(uploads[name]):
            return f"its {name} has shape {tuple(tensor.shape)}, not {tuple(uploads[name])}"
        if not update.finite and not all_finite(tensor):
            return f"its {name} is not finite"
    for name, tensor in update.home.items():
        if not update.finite and not all_finite(tensor):
            return f"the {name.removeprefix('@')} that it keeps is not finite"
    if update.samples < 0:
        return f"it claims {update.samples} samples"
    return None
