"""Tests of vision transformers and LoRA: trained tensors, memory, averaging."""

import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedloom
from fedloom.config import make_config
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.data import FederatedDataset
from fedloom.engines.multiprocess.engine import MultiprocessEngine
from fedloom.errors import InputError
from fedloom.models import build_model, count_parameters
from fedloom.models.initial_weights import load_initial_weights, read_initial_weights
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.resolve import resolve_run

peft = pytest.importorskip("peft", reason="peft (the extra fedloom[vit]) is not installed")
transformers = pytest.importorskip("transformers", reason="transformers (the extra fedloom[vit]) is not installed")

SMALL = "depth=2,width=32,heads=2"


def trainable(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("vit-tiny", (1, 28, 28), 10),
        ("vit-tiny-lora", (3, 32, 32), 7),
        (f"vit-tiny-lora:{SMALL},rank=3", (1, 8, 8), 5),
        ("vit-b16", (3, 32, 32), 1000),
        ("vit-b16-lora:rank=16", (1, 28, 28), 10),
    ],
)
def test_the_counts_are_right(name: str, shape: tuple[int, ...], classes: int) -> None:
    with torch.device("meta"):
        module = build_model(name, shape, classes)
    made = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert count_parameters(name, shape, classes) == made
    if name == "vit-b16":
        assert made == 86_567_656  # as published
    if name.startswith("vit-b16-lora"):
        assert made == 36_864 * 16 + 7_690


def test_counts_for_ten_classes() -> None:
    """The body alone has 85,798,656; LoRA has 36,864 for each of its ranks."""
    assert count_parameters("vit-b16", (3, 32, 32), 10) == 85_798_656 + 7_690
    assert [count_parameters(f"vit-b16-lora:rank={r}", (3, 32, 32), 10) - 7_690 for r in (4, 8, 16)] == [
        147_456,
        294_912,
        589_824,
    ]


def test_only_lora_and_head_are_rows() -> None:
    module = build_model(f"vit-tiny-lora:{SMALL},rank=3", (1, 8, 8), 5)
    layout = Layout.of(module)
    assert {entry.name for entry in layout.entries} == set(trainable(module))
    assert all(".lora_" in name or name.startswith("head.") for name in trainable(module))
    assert layout.size == 4 * 2 * 32 * 3 + 32 * 5 + 5
    assert len(layout.frozen) == len(list(module.parameters())) - len(trainable(module))
    projections = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in trainable(module) if ".lora_" in name}
    assert projections in ({"q_proj", "v_proj"}, {"query", "value"})
    units = layout.layer_columns()  # what FedMR may exchange: A never without its B
    assert sorted(len(columns) for columns in units.values()) == [2] * 5
    assert {unit.rpartition(".")[2] for unit in units} == {*projections, "head"}


def test_the_start_of_lora_is_the_frozen_network() -> None:
    """B is zero at first, whatever alpha."""
    torch.manual_seed(0)
    whole = build_model(f"vit-tiny:{SMALL}", (1, 8, 8), 5).eval()
    adapted = build_model(f"vit-tiny-lora:{SMALL},alpha=64", (1, 8, 8), 5).eval()
    source = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    renamed = {name: source[name.replace(".base_layer", "")] for name in adapted.state_dict() if ".lora_" not in name}
    adapted.load_state_dict(renamed, strict=False)
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(adapted(x), whole(x))


def test_what_lora_adds_is_the_product_times_alpha_over_rank() -> None:
    torch.manual_seed(0)
    adapted = build_model(f"vit-tiny-lora:{SMALL},rank=4,alpha=6", (1, 8, 8), 5).eval()
    (first, *_) = [part for part in adapted.modules() if hasattr(part, "lora_A")]
    A, B = first.lora_A["default"].weight, first.lora_B["default"].weight
    nn.init.normal_(B)
    x = torch.randn(3, 32)
    torch.testing.assert_close(first(x) - first.base_layer(x), 6 / 4 * (x @ A.T @ B.T), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vit-tiny", "vit-tiny-lora"])
def test_nothing_is_dropped_in_training_unless_asked_for(name: str) -> None:
    torch.manual_seed(0)
    module, x = build_model(f"{name}:{SMALL}", (1, 8, 8), 5).train(), torch.randn(3, 1, 8, 8)
    assert torch.equal(module(x), module(x))


def test_grey_images_of_any_size_suit_the_large_one() -> None:
    module = build_model("vit-b16:depth=1,width=24,heads=2,size=32", (1, 28, 28), 4)
    assert module(torch.randn(2, 1, 28, 28)).shape == (2, 4)
    with pytest.raises(InputError, match="takes 1 or 3"):
        build_model("vit-b16", (2, 28, 28), 4)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("vit-tiny-lora:rank=0", (1, 8, 8), "rank must be greater than or equal to 1"),
        ("vit-tiny-lora:rnk=2", (1, 8, 8), "did you mean 'rank'"),
        ("vit-tiny:rank=2", (1, 8, 8), "unknown option of vit-tiny 'rank'"),
        ("vit-tiny:rank", (1, 8, 8), "NAME=VALUE"),
        ("vit-tiny:heads=5", (1, 8, 8), "width of 192 cannot be shared among 5 heads"),
        ("vit-tiny", (1, 30, 30), "vit-tiny:size="),
        ("vit-tiny", (13,), "expects images"),
        ("vit-tny", (1, 8, 8), "did you mean 'vit-tiny'"),
        ("mlp:width=3", (1, 8, 8), "'mlp' has no options"),
    ],
)
def test_wrong_options(name: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_model(name, shape, 5)


def test_without_the_extra_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"'vit-tiny' needs peft.*fedloom\[vit\]"):
        build_model("vit-tiny", (1, 8, 8), 5)


# starts


def test_lora_starts_from_a_pretrained_network(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 3, "rounds": 1, "epochs": 1, "engine": "sequential", "report": False}
    made = fedloom.run("centralized", model=f"vit-tiny:{SMALL}", classes="0-4", out=tmp_path / "start", **settings)
    run = fedloom.run(model=f"vit-tiny-lora:{SMALL}", init=str(made.path), out=tmp_path / "r", **settings)
    before, after = load_file(made.path / "model.safetensors"), load_file(run.path / "model.safetensors")
    body = [name for name in before if not name.startswith("head.")]
    plain = {name.replace(".base_layer", ""): tensor for name, tensor in after.items()}
    assert all(torch.equal(before[name], plain[name]) for name in body), "the body came over and did not move"
    assert any(after[name].any() for name in after if ".lora_B." in name), "and LoRA learned"
    assert fedloom.verify(run.path) == (run.digest, run.digest)
    sent = run.summary["bytes_up"] / 3
    assert sent == 4 * count_parameters(f"vit-tiny-lora:{SMALL}", (1, 8, 8), 10)


@pytest.mark.parametrize("headed", [True, False])
def test_a_checkpoint_of_transformers_is_a_start(tmp_path: Path, headed: bool) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    settings = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=7)
    kind = transformers.ViTForImageClassification if headed else transformers.ViTModel
    torch.manual_seed(3)
    theirs = kind(settings).eval()
    theirs.save_pretrained(tmp_path / "hub")
    module = build_model(f"vit-tiny-lora:{SMALL}", (1, 8, 8), 7).eval()
    begun = load_initial_weights(module, read_initial_weights(tmp_path / "hub"), RngStreams(0))
    assert all(".lora_" in name or (not headed and name.startswith("head.")) for name in begun.missing)
    assert all(name.startswith("pooler.") for name in begun.unexpected)
    x = torch.randn(2, 1, 8, 8)
    if headed:
        torch.testing.assert_close(module(x), theirs(pixel_values=x).logits)
    else:
        ours = module.get_submodule("vit")(pixel_values=x).last_hidden_state
        torch.testing.assert_close(ours, theirs(pixel_values=x).last_hidden_state)


# memory


@pytest.fixture
def experiment() -> Iterator[BuiltRun]:
    config = make_config(
        {"model": "vit-tiny-lora:depth=4", "clients": 4, "clients_per_round": 4, "rounds": 1, "epochs": 1, "workers": 2}
        | {"engine": "multiprocess", "partition": "iid", "classes": "0-1"}
    )
    with build_run(resolve_run(config)).engine_closed() as experiment:
        yield experiment


def pages_of_its_own(pid: int, tensor: Tensor) -> tuple[int, int]:
    """Of the whole pages that a tensor lies on: (how many this process alone has, how many there are)."""
    size = os.sysconf("SC_PAGE_SIZE")
    first = -(-tensor.data_ptr() // size)
    count = (tensor.data_ptr() + tensor.nbytes) // size - first
    if count <= 0:
        return 0, 0
    with Path(f"/proc/{pid}/pagemap").open("rb") as file:
        file.seek(8 * first)
        entries = struct.unpack(f"<{count}Q", file.read(8 * count))
    return sum(bool(entry >> 63 & 1 and entry >> 56 & 1) for entry in entries), count


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="no /proc/PID/pagemap on this system")
def test_frozen_weights_are_in_memory_once_whatever_the_number_of_workers(experiment: BuiltRun) -> None:
    """Bit 56 of a page's entry says that one process alone has it: after training no frozen page is a worker's own."""
    mine = torch.ones(1 << 20)
    own, total = pages_of_its_own(os.getpid(), mine)
    if own != total:
        pytest.skip("/proc/PID/pagemap does not tell here which pages are a process's own")
    experiment.rounds.run_round(0)
    engine = experiment.engine
    assert isinstance(engine, MultiprocessEngine)
    pids = engine.worker_pids()
    assert len(pids) == 2
    module, layout = experiment.model, experiment.layout
    frozen = [module.get_parameter(name) for name in layout.frozen]
    held = [[pages_of_its_own(pid, tensor) for tensor in frozen] for pid in pids]
    for pages in held:
        own, total = (sum(column) for column in zip(*pages, strict=True))
        assert total * os.sysconf("SC_PAGE_SIZE") > 0.9 * sum(tensor.nbytes for tensor in frozen) > 6e6
        assert own == 0


def test_a_refiner_s_copy_of_the_module_shares_the_frozen_weights(experiment: BuiltRun) -> None:
    copy = experiment.rounds.context.make_model()
    for name, parameter in experiment.model.named_parameters():
        shared = copy.get_parameter(name).data_ptr() == parameter.data_ptr()
        assert shared != parameter.requires_grad


# what averaging A and B apart means


@torch.no_grad()
def update(module: nn.Module) -> dict[str, Tensor]:
    """The change BA that LoRA makes to each projection, by name."""
    named = dict(module.named_parameters())
    return {
        name.replace(".lora_A.", "."): named[name.replace(".lora_A.", ".lora_B.")] @ a
        for name, a in named.items()
        if ".lora_A." in name
    }


@pytest.mark.parametrize("equal_a", [False, True])
def test_the_mean_of_products_is_not_the_product_of_means(equal_a: bool) -> None:
    """FedAvg averages the rows, so A and B apart; that is the mean of the clients' BA only where all A are equal."""
    torch.manual_seed(0)
    module = build_model(f"vit-tiny-lora:{SMALL},rank=2", (1, 8, 8), 5)
    layout = Layout.of(module)
    clients = torch.randn(3, layout.size)
    if equal_a:
        for entry in layout.entries:
            if ".lora_A." in entry.name:
                clients[:, entry.columns] = clients[0, entry.columns]
    products = []
    for row in clients:
        layout.bind(module, row)
        products.append(update(module))
    layout.bind(module, clients.mean(dim=0))
    for name, averaged in update(module).items():
        wanted = torch.stack([product[name] for product in products]).mean(dim=0)
        gap = float((averaged - wanted).norm() / wanted.norm())
        assert gap < 1e-5 if equal_a else gap > 0.3


def test_dropout_of_lora_is_exact(tmp_path: Path) -> None:
    """Its draws come from the streams: the engines agree."""
    x, y = torch.randn(24, 1, 8, 8), torch.arange(24) % 3
    data = FederatedDataset.from_arrays([(x[k::2], y[k::2]) for k in range(2)], test=(x, y))
    settings: dict[str, Any] = {"model": f"vit-tiny-lora:{SMALL},dropout=0.5", "rounds": 2, "report": False}
    runs = [
        fedloom.run(data=data, engine=engine, workers=2, out=tmp_path / engine, **settings)
        for engine in ("sequential", "multiprocess")
    ]
    assert runs[0].digest == runs[1].digest
    without = fedloom.run(
        data=data, engine="sequential", out=tmp_path / "w", **settings | {"model": f"vit-tiny-lora:{SMALL}"}
    )
    assert without.digest != runs[0].digest
