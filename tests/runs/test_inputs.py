"""What a resumed run checks: its config, its data and the machine."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.data import FederatedDataset, PartitionedDataset, Samples
from fedloom.errors import InputError
from fedloom.runs import inputs
from fedloom.runs.callback import Callback
from fedloom.utils.storage import read_json
from tests.support.small_runs import TINY


class Messages(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


def make_data(value: float = 0.0, label: int = 0) -> FederatedDataset:
    draw = np.random.default_rng(0)
    clients = [(draw.normal(size=(12, 5)).astype(np.float32), np.arange(12) % 3) for _ in range(6)]
    clients[4][0][7, 2] += value
    clients[1][1][3] = (clients[1][1][3] + label) % 3
    return FederatedDataset.from_arrays(clients, test=clients[0], classes=3)


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    run = fedloom.run("fedavg", make_data(), out=tmp_path / "r", **{**TINY, "checkpoint_seconds": 0})
    (run.path / "summary.json").unlink()
    return run.path


def test_the_same_data_continue(unfinished: Path) -> None:
    assert fedloom.resume(unfinished, data=make_data()).summary["rounds"] == 3


@pytest.mark.parametrize("changed", [{"value": 1e-3}, {"label": 1}])
def test_changed_data_are_refused(unfinished: Path, changed: dict[str, float]) -> None:
    before = {path: path.read_bytes() for path in unfinished.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"the samples of 'own' changed after .* started.*fedloom run --config"):
        fedloom.resume(unfinished, data=make_data(**changed))
    assert {path: path.read_bytes() for path in before} == before


def test_a_changed_file_of_data_is_refused(tmp_path: Path) -> None:
    lines = [f"{i % 7},{i % 5},{i % 2}" for i in range(200)]
    (tmp_path / "d.csv").write_text("\n".join(["a,b,y", *lines]))
    data = f"{tmp_path / 'd.csv'},label=y"
    run = fedloom.run("fedavg", data, out=tmp_path / "r", **TINY)
    (run.path / "summary.json").unlink()
    (tmp_path / "d.csv").write_text("\n".join(["a,b,y", "6,4,1", *lines[1:]]))
    with pytest.raises(InputError, match=r"(samples|test samples) of .*d\.csv.* changed after"):
        fedloom.resume(run.path)


def test_an_edited_config_names_the_key(unfinished: Path) -> None:
    path = unfinished / "config.toml"
    text = path.read_text()
    path.write_text(text.replace("lr = 0.05", "lr = 0.06"))
    with pytest.raises(InputError, match=r"config\.toml was changed: lr is now 0\.06, but the run started with 0\.05"):
        fedloom.resume(unfinished, data=make_data())
    path.write_text(text + "# mine\n")
    with pytest.raises(InputError, match="though no value differs"):
        fedloom.resume(unfinished, data=make_data())
    path.write_text(text)
    fedloom.resume(unfinished, data=make_data())


def test_another_machine_continues_with_one_warning(unfinished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = Messages()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    fedloom.resume(unfinished, data=make_data(), callbacks=[messages])
    warned = [text for text in messages.texts if "instruction set was" in text]
    assert len(warned) == 1
    assert "ONEDNN_MAX_CPU_ISA was default and is AVX2" in warned[0]
    assert [machine["instruction set"] for machine in read_json(unfinished / "inputs.json")["machines"]][1:] == ["AVX2"]
    monkeypatch.undo()
    assert "instruction set was" in inputs.explain_verify_mismatch(unfinished)
    assert inputs.explain_verify_mismatch(shutil.copytree(unfinished, unfinished.parent / "moved"))


def test_every_part_of_the_data_counts() -> None:
    pool = Samples(torch.arange(40, dtype=torch.float32).view(20, 2), torch.arange(20) % 2)
    halves = [np.arange(10), np.arange(10, 20)]
    plain = inputs._hash_data(PartitionedDataset(pool, halves, classes=2, test=pool[:5]), None)
    other = [np.arange(9), np.arange(9, 20)]
    cases = {
        "partition": (PartitionedDataset(pool, other, classes=2, test=pool[:5]), None),
        "test samples": (PartitionedDataset(pool, halves, classes=2, test=pool[:4]), None),
        "server data": (PartitionedDataset(pool, halves, classes=2, test=pool[:5]), pool[:3]),
    }
    for part, (data, server_data) in cases.items():
        found = inputs._hash_data(data, server_data)
        assert {name for name in found if found[name] != plain.get(name)} == {part}


def test_a_large_tensor_is_hashed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MOST_HASHED", 6400)
    x = torch.zeros(1000, 16)
    rows = torch.cat([torch.arange(1000).view(-1, 1)[block] for block in _spans(x)])
    assert rows.min() == 0
    assert rows.max() == 999
    assert len(rows) * 64 <= 6400


def _spans(x: torch.Tensor) -> list[slice]:
    start = x.data_ptr()
    blocks = list(inputs._blocks(x))
    return [slice(at := (b.data_ptr() - start) // 64, at + len(b)) for b in blocks]


def test_a_mapped_data_set_of_the_size_of_cifar_is_hashed_within_a_second(tmp_path: Path) -> None:
    values = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.uint8, shape=(60_000, 32, 32, 3))
    x = torch.from_numpy(values)
    data = PartitionedDataset(Samples(x, torch.zeros(60_000, dtype=torch.int64)), [np.arange(60_000)], classes=10)
    began = time.process_time()
    inputs._hash_data(data, None)
    assert time.process_time() - began < 1.0
