"""Measure a training step of Local Superior Soups against a plain step.

The step is that of the last member of a full pool: the interpolation reads all members and the received model, and
writes one vector. `traffic` is the time to copy as many bytes. The target is (lss - traffic) / plain of at most 1.3.

Both kinds of step and the copy take turns, so a busy machine slows down all of them. The benchmark uses one thread and
reports the fastest turn, because other processes only add time.
"""

import itertools
import json
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from benchmarks._common import add_out, command_of, describe_machine, make_parser, write_result
from fedloom.config import TrainingConfig
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.core.tasks import ClientTask, TaskMemory
from fedloom.data import FederatedDataset
from fedloom.methods.base import Client, MethodContext, Options
from fedloom.methods.lss import LSSClient, LSSOptions
from fedloom.models import build_model
from fedloom.training.batches import Batch
from fedloom.training.context import ClientProgram, Numerics, TrainingContext
from fedloom.training.trainer import LocalTrainer

CASES = [("mlp", (1, 28, 28), 64), ("lenet", (1, 28, 28), 64), ("cnn", (1, 28, 28), 20), ("cnn", (1, 28, 28), 64)]
NOTHING: MethodContext = None  # type: ignore[assignment]  # these clients use nothing of the run


def start_client(name: str, shape: tuple[int, ...], size: int) -> tuple[LocalTrainer, Batch]:
    """Return the trainer of a client with one batch, and the batch."""
    torch.manual_seed(0)
    module = build_model(name, shape, 10)
    layout = Layout.of(module, channels_last=True)
    training = TrainingConfig(batch_size=size, lr=0.01)
    data = FederatedDataset.from_arrays([(torch.randn(size, *shape), torch.arange(size) % 10)], classes=10)
    context = TrainingContext(
        model=module,
        layout=layout,
        criterion=F.cross_entropy,
        config=training,
        rng_streams=RngStreams(0),
        data=data,
        client=ClientProgram(Client(NOTHING, Options()).train),
        numerics=Numerics(channels_last=True),
    )
    trainer, samples = LocalTrainer(context), data.client_samples(0)
    task, memory = ClientTask(0, layout.read(module), round=0), TaskMemory(layout.empty())
    trainer.start_task(task, memory, samples)
    return trainer, Batch(data.transform(samples.x, channels_last=True), samples.y)


def measure(name: str, shape: tuple[int, ...], size: int, models: int, steps: int) -> dict[str, float]:
    """Return the fastest times of both kinds of step and of the copy."""
    plain, batch = start_client(name, shape, size)
    ours, _ = start_client(name, shape, size)
    client, soup = Client(NOTHING, Options()), LSSClient(NOTHING, LSSOptions(models=models))
    members = soup.train(ours)
    for steps_of_member in itertools.islice(members, models - 1):
        ours.run_steps(steps_of_member)
    last = next(members)
    moved = models + 2  # the pool, the received model, and the vector that is written
    source = torch.zeros(moved * ours.layout.trainable // 2)
    target = torch.zeros_like(source)
    timed: dict[str, Callable[[], object]] = {
        "plain": lambda: client.training_step(plain, batch),
        "lss": lambda: last.step(ours, batch),
        "traffic": lambda: target.copy_(source),
    }
    times: dict[str, list[float]] = {key: [] for key in timed}
    for _ in range(steps + 3):
        for key, work in timed.items():
            start = time.perf_counter()
            work()
            times[key].append(time.perf_counter() - start)
    result = {key: 1000 * min(values[3:]) for key, values in times.items()}
    return {
        "parameters": ours.layout.trainable,
        **{f"{key} ms": value for key, value in result.items()},
        "(lss - traffic) / plain": (result["lss"] - result["traffic"]) / result["plain"],
    }


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("clients", __doc__)
    parser.add_argument("--models", type=int, default=4, help="members of the pool")
    parser.add_argument("--steps", type=int, default=60, help="steps to time")
    add_out(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result: dict[str, object] = {
        "command": command_of("clients", arguments),
        "machine": describe_machine(),
        "models": options.models,
    }
    for name, shape, size in CASES:
        result[f"{name}, batch {size}"] = measure(name, shape, size, options.models, options.steps)
    print(json.dumps(result, indent=1))
    write_result(result, options.out)
