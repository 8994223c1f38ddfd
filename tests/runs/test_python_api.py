"""Tests of fedloom from Python: own modules, losses, data and methods.

None of these objects can be pickled.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedloom
from fedloom import Batch, Client, FederatedDataset, InputError, LocalTrainer, Method, Options, Samples, register
from fedloom.config import make_config
from fedloom.runs.callback import Callback
from fedloom.runs.directory import RunDirectory
from fedloom.runs.execute import _refuse_changes
from tests.support.array_data import SMALL, arrays, network
from tests.support.rewritten_config import rewrite_config


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_everything_of_ones_own_on_worker_processes(tmp_path: Path) -> None:
    """A module, a loss and a federation defined in here: only a fork can hand them to other processes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

    class OnDemand(FederatedDataset):
        classes, shape = 2, (4,)
        test = Samples(torch.randn(40, 4, generator=torch.Generator().manual_seed(9)), torch.arange(40) % 2)

        def __len__(self) -> int:
            return 5

        def client_samples(self, client_id: int) -> Samples:
            x = torch.randn(10 + client_id, 4, generator=torch.Generator().manual_seed(client_id))
            return Samples(x, (x[:, 0] > 0).long())

    smoothing = 0.1

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y, label_smoothing=smoothing)

    runs = [
        fedloom.run(data=OnDemand(), model=Net, loss=loss, out=tmp_path / engine, engine=engine, **SMALL)
        for engine in ("multiprocess", "sequential")
    ]
    assert runs[0].digest == runs[1].digest
    assert runs[0].config.data == "OnDemand"
    assert runs[0].config.model == "Net"
    other = fedloom.run(data=OnDemand(), model=Net, out=tmp_path / "other", **SMALL)
    assert other.digest != runs[0].digest
    lambda_ = fedloom.run(
        data=OnDemand(),
        model=Net,
        loss=lambda output, y: F.cross_entropy(output, y, label_smoothing=smoothing),
        out=tmp_path / "lambda",
        **SMALL,
    )
    assert lambda_.digest == runs[0].digest


def test_the_model_of_a_run_is_an_ordinary_module(tmp_path: Path) -> None:
    data = arrays()
    run = fedloom.run(data=data, model=network, out=tmp_path / "r", **SMALL)
    assert [record["round"] for record in run.history] == [0, 1, 2]
    module = run.model()
    assert not module.training
    assert data.test is not None
    hits = module(data.test.x).argmax(1) == data.test.y
    assert float(hits.double().mean()) == run.accuracy == run.history[-1]["accuracy"]
    before = copied(run.model())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7)
    assert same(copied(run.model()), before)
    pointers = {p.untyped_storage().data_ptr() for p in run.model().parameters()}
    assert not pointers & {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert all(p.requires_grad for p in module.parameters())
    F.cross_entropy(module(data.test.x), data.test.y).backward()  # it can be trained on


def test_the_model_of_a_run_by_name(tmp_path: Path) -> None:
    run = fedloom.run(out=tmp_path / "r", model="logreg", clients=4, rounds=1, report=False)
    assert sum(p.numel() for p in run.model().parameters()) == 650


@pytest.mark.parametrize("engine", ["sequential", "multiprocess"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_callers_module_is_the_start_and_stays_as_it_is(tmp_path: Path, engine: str, wrapped: bool) -> None:
    module = network().train()
    with torch.no_grad():
        module[0].weight.zero_()  # type: ignore[union-attr, operator]
    before, storage = copied(module), module[0].weight.data_ptr()  # type: ignore[union-attr, operator]
    model: Any = (lambda: module) if wrapped else module
    untouched = fedloom.run(data=arrays(), model=model, out=tmp_path / "a", engine=engine, **{**SMALL, "epochs": 0})
    assert same(copied(untouched.model()), before)
    run = fedloom.run(data=arrays(), model=model, out=tmp_path / "b", engine=engine, **SMALL)
    assert not same(copied(run.model()), before)
    assert same(copied(module), before)
    assert module[0].weight.data_ptr() == storage  # type: ignore[union-attr, operator]
    assert module.training
    assert fedloom.verify(run.path, data=arrays(), model=model) == (run.digest, run.digest)


def test_resume_and_verify_want_the_same_objects(tmp_path: Path) -> None:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y)

    run = fedloom.run(data=arrays(), model=network, loss=loss, out=tmp_path / "r", **SMALL)
    given: dict[str, Any] = {"data": arrays(), "model": network, "loss": loss}
    assert fedloom.verify(run.path, **given) == (run.digest, run.digest)
    (run.path / "summary.json").unlink()
    (run.path / "checkpoints" / "round-000002.json").unlink()
    with pytest.raises(InputError, match=r"data and loss and model as Python obj.*data=\.\.\., loss=\.\.\., model="):
        fedloom.resume(run.path)
    with pytest.raises(InputError, match="with loss as Python objects"):
        fedloom.resume(run.path, data=arrays(), model=network)
    with pytest.raises(InputError, match="clients"):
        fedloom.resume(run.path, **{**given, "data": arrays(clients=5)})
    assert fedloom.resume(run.path, **given, report=False).digest == run.digest
    named = fedloom.run(out=tmp_path / "named", model="logreg", clients=4, rounds=1, report=False)
    with pytest.raises(InputError, match="without model as Python objects"):
        fedloom.resume(named.path, model=network)
    with pytest.raises(InputError, match="lr would change the result"):
        fedloom.resume(named.path, lr=1.0)


@pytest.mark.parametrize(
    ("before", "after", "allowed"),
    [
        ("cuda", "cuda:1", True),
        ("cuda:1", "cuda:0, cuda:1", True),
        ("cuda:0,cuda:1", "cuda", True),
        ("cpu", "cuda", False),
        ("cuda", "cpu", False),
        ("cuda", "cudax", False),
    ],
)
def test_a_run_may_go_on_with_other_gpus_but_not_elsewhere(before: str, after: str, allowed: bool) -> None:
    config = make_config({"device": before})
    if allowed:
        _refuse_changes(config, {"device": after, "slots": 3})
    else:
        with pytest.raises(InputError, match=r"device would change the result; only .* and one GPU for another\."):
            _refuse_changes(config, {"device": after})


def test_the_command_says_that_such_a_run_goes_on_in_python(tmp_path: Path, command: Callable[..., Any]) -> None:
    run = fedloom.run(data=arrays(), model=network, out=tmp_path / "r", **SMALL)
    (run.path / "summary.json").unlink()
    ended = command("resume", "r")
    assert ended.code == 2
    assert "fedloom.resume" in ended.err
    assert command("report", "r", "-o", "x.html").code == 0


def test_a_method_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fedloom.methods.methods()
    monkeypatch.setattr("fedloom.methods.registry._methods", dict(fedloom.methods.registry._methods))

    class SignOptions(Options):
        size: float = 1.0

    class Sign(Client[SignOptions]):
        def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
            loss = trainer.loss(batch)
            trainer.backward(loss)
            trainer.gradient.sign_().mul_(self.options.size)
            trainer.optimizer_step()
            return loss

    register(Method(name="sign", summary="", reference="", options=SignOptions, client=Sign))
    runs = [
        fedloom.run("sign", arrays(), network, options={"sign": {"size": s}}, out=tmp_path / str(s), **SMALL)
        for s in (1.0, 0.0)
    ]
    assert runs[0].digest != runs[1].digest
    assert runs[1].history[0]["loss"] == runs[1].history[-1]["loss"]
    with pytest.raises(InputError, match="did you mean 'size'"):
        fedloom.run("sign", arrays(), network, options={"sign": {"sise": 1}}, out=tmp_path / "x", **SMALL)


@pytest.mark.parametrize("engine", ["sequential", "multiprocess"])
def test_regression(tmp_path: Path, engine: str) -> None:
    draw = np.random.default_rng(0)
    w = draw.normal(size=(4, 2))

    def line(n: int) -> tuple[np.ndarray, np.ndarray]:
        x = draw.normal(size=(n, 4)).astype(np.float32)
        return x, (x @ w).astype(np.float32)

    data = FederatedDataset.from_arrays([line(30) for _ in range(4)], line(50))
    assert data.classes == 0
    run = fedloom.run(
        data=data, model=nn.Linear(4, 2), out=tmp_path / "r", rounds=8, epochs=5, clients_per_round=4, engine=engine
    )
    assert run.accuracy is None
    assert run.summary["loss"] < 0.01 < run.history[0]["loss"]
    assert (run.path / "report.html").is_file()
    assert data.test is not None
    assert float(F.mse_loss(run.model()(data.test.x), data.test.y).detach()) == pytest.approx(run.summary["loss"])


def test_targets_of_another_shape_than_the_output_are_refused(tmp_path: Path) -> None:
    """(n, 1) against (n,) would be broadcast to n x n, and train towards the mean of all targets."""
    x, y = np.zeros((8, 4), np.float32), np.zeros(8, np.float32)
    with pytest.raises(InputError, match=r"shape \(2, 1\).*\(2,\)"):
        fedloom.run(data=FederatedDataset.from_arrays([(x, y)], (x, y)), model=nn.Linear(4, 1), out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_batch_norm_and_dropout_agree_on_all_engines(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 10)
        )

    plans: list[dict[str, Any]] = [{"engine": "sequential"}, {"workers": 1}, {"workers": 3}]
    runs = [
        fedloom.run("scaffold", model=make, clients=6, out=tmp_path / str(at), **{**SMALL, **plan})
        for at, plan in enumerate(plans)
    ]
    assert len({run.digest for run in runs}) == 1
    state = runs[0].model().state_dict()
    assert state["1.num_batches_tracked"] > 0
    assert not torch.equal(state["1.running_mean"], torch.zeros(4))


def test_frozen_and_tied_weights(tmp_path: Path) -> None:
    """Frozen weights stay, also tied ones; tied trainable ones stay tied."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(5, 5, bias=False) for _ in range(4))
            self.b.weight = self.a.weight
            self.d.weight = self.c.weight
            self.c.weight.requires_grad_(False)
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.d(self.c(self.b(torch.relu(self.a(x))))))

    module = Tied()
    run = fedloom.run(data=arrays(), model=module, out=tmp_path / "r", **SMALL)
    state = run.model().state_dict()
    assert torch.equal(state["a.weight"], state["b.weight"])
    assert torch.equal(state["c.weight"], module.c.weight)
    assert torch.equal(state["d.weight"], module.c.weight)
    assert not torch.equal(state["a.weight"], module.a.weight)


def test_a_run_says_what_it_is(tmp_path: Path) -> None:
    run = fedloom.run(data=arrays(), model=network, out=tmp_path / "r", **SMALL)
    compared = fedloom.compare(["fedavg"], data=arrays(), model=network, out=tmp_path / "c", **SMALL)
    assert repr(compared) == f"<1 run in {tmp_path / 'c'}: {compared.table.headline}>"
    assert repr(run) == f"<fedavg on own, accuracy {run.accuracy:.4f} after round 2: {tmp_path / 'r'}>"


def test_global_generators_and_threads_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    before = psutil.Process().children()
    for engine in ("sequential", "multiprocess"):
        fedloom.run(data=arrays(), model=network, out=tmp_path / engine, engine=engine, **SMALL)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    assert signal.getsignal(signal.SIGINT) is handler
    assert set(psutil.Process().children()) <= set(before)


def test_a_client_without_samples_is_idle(tmp_path: Path) -> None:
    x, y = np.ones((6, 5), np.float32), np.array([0, 1, 2, 0, 1, 2])
    data = FederatedDataset.from_arrays([(x, y), (x[:0], y[:0]), (x, y)], (x, y))
    run = fedloom.run(data=data, model=network, out=tmp_path / "r", **SMALL)
    assert [(record["idle"], record["failed"]) for record in run.history[1:]] == [(1, 0), (1, 0)]


class Million(FederatedDataset):
    """A million clients, each of whose samples are made when it is asked."""

    classes, shape = 4, (16,)
    test = Samples(torch.zeros(20, 16), torch.arange(20) % 4)

    def __len__(self) -> int:
        return 1_000_000

    def client_samples(self, client_id: int) -> Samples:
        draw = torch.Generator().manual_seed(client_id)
        return Samples(torch.randn(12, 16, generator=draw), torch.randint(4, (12,), generator=draw))


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_million_clients(tmp_path: Path, method: str) -> None:
    seen: list[float] = []

    class Watcher(Callback):
        def on_round_end(self, record: Any) -> None:
            del record
            children = psutil.Process().children(recursive=True)
            uss = sum(child.memory_full_info().uss for child in children)
            seen.append(psutil.Process().memory_info().rss + uss)
            if len(seen) == 1:
                assert time.monotonic() - began < 20

    began = time.monotonic()
    run = fedloom.run(
        method,
        Million(),
        lambda: nn.Linear(16, 4),
        clients_per_round=100,
        rounds=2,
        epochs=1,
        out=tmp_path / "r",
        callbacks=[Watcher()],
        report=False,
    )
    assert [record.get("clients") for record in run.history] == [None, 100, 100]
    assert run.config.clients == 1_000_000
    assert len(seen) == 3
    assert max(seen) < 2 << 30
    assert RunDirectory.open(run.path).python_objects == ("data", "model")
    assert not (run.path / "partition.json").exists()
    size = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
    assert size < 1 << 20


def test_a_run_on_a_gpu_gives_its_model_where_there_is_none(tmp_path: Path) -> None:
    """Precision and order of images are the training's, not the model's."""
    run = fedloom.run("fedavg", model="cnn", out=tmp_path / "run", rounds=1, clients=2, steps=1, report=False)
    rewrite_config(tmp_path / "run", device="cuda", precision="bf16", channels_last=True)
    there = fedloom.resume(tmp_path / "run", report=False)
    assert there.config.precision == "bf16"
    for ours, theirs in zip(there.model().parameters(), run.model().parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_comparison_continues_with_options_that_are_none(tmp_path: Path) -> None:
    """A file of settings cannot hold them, so a run that is read back has fewer."""
    tiny = {"rounds": 1, "steps": 1, "model": "logreg", "clients": 4, "report": False, "out": tmp_path / "c"}
    first = fedloom.compare(["lss"], **tiny)
    assert [run.digest for run in fedloom.compare(["lss"], **tiny).runs] == [run.digest for run in first.runs]
    with pytest.raises(InputError, match=r"holds a run with options .* another --out"):
        fedloom.compare(["lss"], options={"lss": {"epochs": 1}}, **tiny)
