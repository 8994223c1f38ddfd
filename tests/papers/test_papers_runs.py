"""Tests that every command of docs/papers.md runs on small files.

They also check that it fits its data in full size.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import save_file

from fedloom.cli import main
from fedloom.config import Config, replace_config
from fedloom.data.dataset import Dataset
from fedloom.data.federated import FederatedDataset
from fedloom.data.partitions import partition_indices
from fedloom.data.partitions.base import PartitionPool
from fedloom.data.registry import load_dataset
from fedloom.data.sources import DATASET_SOURCES
from fedloom.data.transforms import with_normalization
from fedloom.models import build_model as build_network
from fedloom.models import count_parameters
from fedloom.runs import compare, execute
from fedloom.runs.build import build_run
from fedloom.runs.resolve import RunRequest, UserObjects, resolve_run
from tests.support.paper_data_files import write_all
from tests.support.papers_page import Row, read_rows

ROWS = [row for row in read_rows() if row.command]
RUNS = [row for row in ROWS if row.command.split()[1] in ("run", "compare")]

PARSER = typer.main.get_command(main.app)
"""The command's parser; `app` would make it anew for every command."""

CLASSES = {
    "fashion-mnist": (60_000, 10),
    "cifar10": (50_000, 10),
    "cifar100": (50_000, 100),
    "cifar100-coarse": (50_000, 20),
    "cinic10": (90_000, 10),
}
"""Training samples and classes, equally many of each, of the data that are divided by a partition of labels."""

OWNERS = {"femnist": (180, 110), "shakespeare": (128, 5_700), "sent140": (803, 40)}
"""How many clients the papers have, and the fewest samples of each."""

DOMAINS = {
    "digit5": (55_000, 55_000, 73_257, 25_000, 7_438),
    "domainnet": (33_525, 36_023, 50_416, 120_750, 120_906, 48_212),
}

NARROW = {
    "resnet18": "width=2",
    "resnet50": "width=2",
    "resnet20-bottleneck": "width=2",
    "vgg16": "width=2,classifier=512",
    "vit-b16-lora": "width=16,depth=1,heads=2,size=32",
    "lstm-shakespeare": "hidden=4",
    "lstm-sent140": "hidden=4,embedding=3",
}
"""Options that make large networks small."""

SHORT: dict[str, dict[str, Any]] = {
    "diwa": {"models": 2},
    "soups": {"models": 2},
    "dynafed": {
        **{"L": 2, "s": 1, "refine_at_synthesis": True, "iterations": 1, "inner_steps": 1, "images_per_class": 1},
        **{"refine_epochs": 1, "augment": "flip"},
    },
    "fedbabu": {"finetune_epochs": 0},
    "fedbe": {"samples": 1, "epochs": 1},
    "fedcda": {"warmup": 0},
    "feddf": {"steps": 1},
    "fedgen": {"steps": 1},
    "fedlaw": {"epochs": 1},
    "fedrep": {"head_epochs": 1, "body_epochs": 1, "final_epochs": 1},
    "gamf": {"sweeps": 1},
    "lss": {"models": 2},
}  # fmt: skip
"""Options that make methods quick."""


@pytest.fixture(scope="module")  # no longer: other modules read the same data sets
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to work in, with small data and small networks to start from."""
    root = tmp_path_factory.mktemp("papers")
    with pytest.MonkeyPatch.context() as patch:
        for name, source in write_all(root / "data").items():
            patch.setitem(DATASET_SOURCES, name, source)
        patch.setenv("FEDLOOM_DATA", str(root / "data"))
        patch.setenv("FEDLOOM_CACHE", str(root / "cache"))
        patch.chdir(root)
        _write_starts(root)
        yield root


def _write_starts(root: Path) -> None:
    """Narrow networks for a thousand classes, under the names that torchvision and transformers give the tensors."""
    for name in ("resnet18", "resnet50"):
        stem = f"{name}:{NARROW[name]},stem=imagenet"
        tensors = {}
        for key, value in build_network(stem, (3, 64, 64), 1000).state_dict().items():
            old = key.removeprefix("body.").replace(".shortcut.conv.", ".downsample.0.")
            old = old.replace(".shortcut.norm.", ".downsample.1.").replace("head.", "fc.")
            tensors[re.sub(r"(^|\.)norm(\d)\.", r"\1bn\2.", old)] = value.contiguous()
        save_file(tensors, root / f"{name}.safetensors")
    transformers = pytest.importorskip("transformers", reason="transformers (fedloom[vit]) is not installed")
    small = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=16
    )
    transformers.ViTModel(small, add_pooling_layer=False).save_pretrained(root / "vit-base-patch16-224-in21k")


class Understood(Exception):
    """The command line made sense; these are the runs it asks for."""

    def __init__(self, configs: list[Config]) -> None:
        self.configs = configs


@cache
def configs_of(*words: str) -> tuple[Config, ...]:
    """The runs that a command would start, by the real parser."""

    def one(request: RunRequest, **_: Any) -> NoReturn:
        raise Understood([request.config])

    def several(methods: list[str], seeds: int, **more: Any) -> NoReturn:
        options = more.pop("options")
        for name in ("grid", "out", "target", "concurrent_runs", "callbacks"):
            more.pop(name)
        raise Understood(
            [request.config for _, request in compare._plans(methods, seeds, options, more, UserObjects())]
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "app", PARSER)
        patch.setattr(execute, "execute_run", one)
        patch.setattr(compare, "compare", several)
        try:
            main.main(list(words))
        except Understood as understood:
            return tuple(understood.configs)
        except SystemExit as ended:
            pytest.fail(f"{' '.join(words)} ended with exit code {ended.code}")


@cache
def loaded(data: str) -> Dataset:
    return load_dataset(data)


def all_configs() -> list[Config]:
    return [config for row in RUNS for words in row.commands() for config in configs_of(*words)]


@pytest.mark.parametrize("row", RUNS, ids=str)
def test_commands_are_understood(row: Row, place: Path) -> None:
    """By the parser, down to the options of the methods; and the data can be normalised as they say."""
    for words in row.commands():
        for data, how in {(config.data, config.normalize) for config in configs_of(*words)}:
            with_normalization(loaded(data), how)


def configs_from(paper: str) -> list[Config]:
    return [config for row in RUNS if row.paper == paper for words in row.commands() for config in configs_of(*words)]


def test_fedexp_beside_fedmr_adds_a_tenth_for_each_client_of_a_round(place: Path) -> None:
    """As FedMR's code does, where FedExP's paper has one epsilon."""
    found = [config for config in configs_from("FedMR") if config.method == "fedexp"]
    assert {config.clients_per_round for config in found} == {5, 10, 18, 20, 50, 100}
    for config in found:
        assert config.options["fedexp"]["epsilon"] == pytest.approx(config.clients_per_round / 10)


def test_clusamp_and_fedmut_beside_fedmr_are_set_as_in_its_code(place: Path) -> None:
    for method, options in (("clusamp", {"distance": "l1"}), ("fedmut", {"alpha": 5.0, "granularity": "tensor"})):
        found = [config.options[method] for config in configs_from("FedMR") if config.method == method]
        assert found
        assert all(each.items() >= options.items() for each in found), method


def test_clients_beside_dynafed_keep_their_adam(place: Path) -> None:
    assert all(config.keep_optimizer and config.optimizer == "adam" for config in configs_from("DynaFed"))


def pool_at_full_size(data: str) -> PartitionPool:
    """The labels, owners or domains of a data set as it is published."""
    name = data.partition(":")[0]
    if name in CLASSES:
        samples, classes = CLASSES[name]
        return PartitionPool(np.arange(samples) % classes)
    if name in OWNERS:
        clients, least = OWNERS[name]
        return PartitionPool(np.zeros(clients * least, dtype=np.int64), np.repeat(np.arange(clients), least))
    marks = np.repeat(np.arange(len(DOMAINS[name])), DOMAINS[name])
    return PartitionPool(
        np.zeros(len(marks), dtype=np.int64), domains=marks, domain_names=tuple(map(str, DOMAINS[name]))
    )


def test_partitions_can_be_made_at_full_size(place: Path) -> None:
    wanted = {(config.data, config.partition, config.clients) for config in all_configs()}
    assert len(wanted) > 30
    for data, spec, clients in sorted(wanted, key=str):
        parts = partition_indices(spec, pool_at_full_size(data), clients, np.random.default_rng(0))
        assert clients in (None, len(parts)), (data, spec)
        assert min(map(len, parts)) > 0, (data, spec)


@dataclass(frozen=True)
class Task:
    """Data, a kind of partition and a network: what methods are run on one after the other."""

    data: str
    scheme: str
    model: str

    def __str__(self) -> str:
        return f"{self.data}-{self.scheme}-{self.model}"

    @staticmethod
    def of(config: Config) -> "Task":
        return Task(config.data, re.split("[:,]", config.partition)[0], config.model)


def tasks() -> list[Task]:
    """All tasks, read off the words of the commands."""
    found = []
    for words in (words for row in RUNS for words in row.commands()):
        said = {name: value for name, value in pairwise(words) if name.startswith("--")}
        found.append(Task(said["--data"], re.split("[:,]", said["--partition"])[0], said["--model"]))
    return list(dict.fromkeys(found))


def rounds_of(config: Config) -> int:
    """One, or as many as come before something new happens."""
    return 2 if config.method == "dynafed" else 1


def small(config: Config) -> Config:
    """The same run with few clients, a narrow network, one round, and one step wherever that is enough."""
    base, _, options = config.model.partition(":")
    narrow = ",".join(filter(None, (options, NARROW.get(base, ""))))
    clients = {"natural": 2, "domain": config.clients}.get(Task.of(config).scheme, 4)
    given = {name: {**config.options.get(name, {}), **SHORT.get(name, {})} for name in config.method.split("+")}
    return replace_config(
        config,
        **{
            "model": f"{base}:{narrow}" if narrow else base,
            "clients": clients,
            "clients_per_round": 2,
            "options": given,
        },
        **{"rounds": rounds_of(config), "steps": 1, "batch_size": 2, "engine": "sequential"},
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", tasks(), ids=str)
def test_methods_play_a_round(task: Task, place: Path, tmp_path: Path) -> None:
    """All methods on the first partition of a data set and network; on the others, which look alike to them, one."""
    first = next(other for other in tasks() if (other.data, other.model) == (task.data, task.model))
    played: set[str] = set()
    for config in all_configs():
        if Task.of(config) != task or (played and task != first):
            continue
        choices = {
            k: {o: v for o, v in each.items() if isinstance(v, str | bool)} for k, each in config.options.items()
        }
        key = f"{config.method} {json.dumps(choices, sort_keys=True)}"  # numbers do not lead another way
        if key in played:
            continue
        played.add(key)
        finished = execute.execute_run(resolve_run(small(config)), out=tmp_path / f"run{len(played)}", report=False)
        assert finished.summary["rounds"] == rounds_of(config), key
        assert np.isfinite(finished.summary["loss"]), key
        assert finished.summary["failed"] == 0, (key, finished.history[-1]["failed_clients"])
    assert played


def networks() -> list[tuple[str, tuple[int, ...], int]]:
    """All networks, with the shape and the classes of the data that they are for."""
    sources = [(task.model, DATASET_SOURCES[task.data.partition(":")[0]]) for task in tasks()]
    return sorted({(model, source.shape, len(source.class_names)) for model, source in sources})


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "shape", "classes"), networks(), ids=str)
def test_networks_at_full_size_take_a_step(name: str, shape: tuple[int, ...], classes: int) -> None:
    """One client with one sample: the network itself, as wide as the paper has it."""
    if name.startswith("vit"):
        pytest.importorskip("peft", reason="peft (fedloom[vit]) is not installed")
    x = np.zeros((1, *shape), dtype=np.int64 if len(shape) == 1 else np.float32)
    own = FederatedDataset.from_arrays([(x, np.zeros(1, dtype=np.int64))], classes=classes, name="one")
    config = Config(
        data="one", partition="own", clients=1, rounds=1, steps=1, batch_size=1, engine="sequential", model=name
    )
    with build_run(resolve_run(config, UserObjects(data=own))).engine_closed() as experiment:
        assert experiment.layout.trainable == count_parameters(name, shape, classes, own.vocabulary_size)
        before = experiment.rounds.parts.server.global_model().clone()
        experiment.rounds.run_round(0)
        assert not torch.equal(before, experiment.rounds.parts.server.global_model())


@pytest.mark.parametrize("row", [row for row in ROWS if row not in RUNS], ids=str)
def test_other_commands_work(row: Row, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words in row.commands():
        with pytest.raises(SystemExit) as ended:
            main.main([*words, *(("--clients", "4") if words[0] == "partition" else ())])
        assert not ended.value.code, capfd.readouterr().err
        if "--plot" in words:
            assert (place / words[words.index("--plot") + 1]).stat().st_size > 1000
