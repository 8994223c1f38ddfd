"""The CUDA engine on the CPU, compared with another engine."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.data import PartitionedDataset, Samples
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import SmallFederatedDataset
from fedloom.training.context import TrainingContext
from tests.support.task_rounds import in_round


def dense(dropout: float = 0.0) -> nn.Module:
    width = int(np.prod(SmallFederatedDataset().shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 20), nn.Dropout(dropout), nn.ReLU(), nn.Linear(20, 10))


def jobs_for(experiment: BuiltRun, clients: list[int]) -> list[ClientTask]:
    companion = experiment.rounds.parts.extras
    jobs = experiment.rounds.parts.server.dispatch(0, clients)
    return [
        ClientTask(
            j.client_id, j.row, j.model_index, companion.send_to_client(0, j.client_id) if companion else j.extras
        )
        for j in jobs
    ]


def cuda_of(experiment: BuiltRun, slots: int = 0) -> CudaEngine:
    """The engine with the same clients, on the CPU."""
    engine = CudaEngine(experiment.engine.context, "cpu", slots)
    engine.client_states = experiment.engine.client_states
    return engine


Answer = tuple[int, Tensor, dict[str, Tensor], dict[str, Tensor], int, int, float]


def answers(engine: object, jobs: list[ClientTask], round: int = 0) -> list[Answer]:
    result = []
    for u in engine.train(in_round(round, jobs)):  # type: ignore[attr-defined]
        assert isinstance(u, ClientUpdate), u
        extras, home = ({k: v.clone() for k, v in group.items()} for group in (u.extras, u.client_state))
        result.append((u.client_id, u.row.clone(), extras, home, u.num_examples, u.steps, u.loss))
    return result


def assert_alike(ours: list[Answer], theirs: list[Answer], rtol: float = 1e-5) -> None:
    assert [a[0] for a in ours] == [b[0] for b in theirs]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a[1], b[1], rtol=rtol, atol=1e-6, equal_nan=True)
        for mine, other in zip(a[2:4], b[2:4], strict=True):
            assert mine.keys() == other.keys()
            for name in other:
                torch.testing.assert_close(mine[name], other[name], rtol=rtol, atol=1e-5)
        assert a[4:6] == b[4:6]
        np.testing.assert_allclose(a[6], b[6], rtol=1e-5)


def pooled(shop: TrainingContext) -> TrainingContext:
    """The same clients, out of one pool."""
    given = shop.data
    clients = [given.client_samples(k) for k in range(len(given))]
    ends = np.cumsum([len(c) for c in clients])
    pool = PartitionedDataset(
        Samples(torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])),
        [np.arange(end - len(c), end) for end, c in zip(ends, clients, strict=True)],
        classes=given.classes,
        transform=given.transform,
        test=given.test,
    )
    return replace(shop, data=pool)
