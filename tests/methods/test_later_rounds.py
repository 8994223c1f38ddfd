"""Tests that steps that change after the first round are captured and replayed.

Examples are means, a generator, or the past of a client.
"""

import pytest
import torch
from torch import Tensor

from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.engines.base import Engine
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.testing.fixtures import batch_norm_network, build_small_run, simple_network
from tests.support.fake_graphs import fake_tape
from tests.support.task_rounds import in_round

Answer = dict[str, Tensor]


def answers(engine: Engine, jobs: list[ClientTask], round: int) -> list[Answer]:
    found = []
    for update in engine.train(in_round(round, jobs)):
        assert isinstance(update, ClientUpdate), update
        assert update.steps > 0
        tensors = {"row": update.row, **update.extras, **update.client_state}
        found.append({name: tensor.clone() for name, tensor in tensors.items()})
    return found


@pytest.mark.parametrize("network", [simple_network, batch_norm_network], ids=["plain", "normed"])
@pytest.mark.parametrize("method", ["feddyn", "moon", "fedmix", "naivemix", "fedgen"])
def test_replayed_steps_do_what_was_written(method: str, network: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.engines.cuda.slot.make_graph_runner", fake_tape)
    monkeypatch.setattr("fedloom.engines.cuda.slot.STEPS_PER_GRAPH", 3)
    settings = {"momentum": 0.5, "lr_decay": 0.9, "clients_per_round": 8, "model": network}
    with build_small_run(method, {}, **settings).engine_closed() as plain:
        plain.rounds.run_round(0)  # now every client has been seen
        server, companion = plain.rounds.parts.server, plain.rounds.parts.extras
        engine = CudaEngine(plain.engine.context, "cpu", 2)
        engine.client_states = plain.engine.client_states
        for round in range(1, 4):
            jobs = [
                ClientTask(
                    job.client_id,
                    job.row,
                    job.model_index,
                    companion.send_to_client(round, job.client_id) if companion else {},
                )
                for job in server.dispatch(round, [5, 0, 7, 2, 1, 6])
            ]
            assert all(job.extras for job in jobs) == (companion is not None)
            for ours, theirs in zip(answers(engine, jobs, round), answers(plain.engine, jobs, round), strict=True):
                for name, expected in theirs.items():
                    torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert sum(slot.graph_runner.replayed for slot in engine.slots) > sum(
        slot.graph_runner.captured for slot in engine.slots
    )
