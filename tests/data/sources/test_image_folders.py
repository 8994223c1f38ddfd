"""Tests that read small copies of CINIC-10, DomainNet and PACS."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from PIL import Image

from fedloom.data import load_dataset, registry
from fedloom.data.sources import DATASET_SOURCES
from fedloom.data.sources.image_folders import CINIC10, DOMAINNET, PACS
from fedloom.errors import InputError
from tests.support.damaged_files import attempt, damage

Root = Path


def encoded(seed: int, side: int, form: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def cinic(root: Root, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two images of every class in every part, where CINIC-10 has 9,000."""
    monkeypatch.setitem(DATASET_SOURCES, "cinic10", replace(CINIC10, num_train_examples=20, num_test_examples=20))
    for number, part in enumerate(("train", "valid", "test")):
        for label, name in enumerate(CINIC10.class_names):
            folder = root / "CINIC-10" / part / name
            folder.mkdir(parents=True)
            for i in range(2):
                (folder / f"cifar10-{part}-{i}.png").write_bytes(encoded(100 * number + 10 * label + i, 32))
    return root / "CINIC-10"


def test_cinic10(cinic: Path) -> None:
    data = load_dataset("cinic10")
    assert (len(data.train), len(data.test), data.shape) == (20, 20, (3, 32, 32))
    assert data.train.y.tolist() == [label for label in range(10) for _ in range(2)]
    more = load_dataset("cinic10:valid=train")
    assert (len(more.train), len(more.test)) == (40, 20)
    assert data.train.x.equal(more.train.x[:20])
    assert load_dataset("cinic10:size=16").shape == (3, 16, 16)


def test_cinic10_must_be_whole(cinic: Path) -> None:
    (cinic / "test" / "cat" / "cifar10-test-0.png").unlink()
    with pytest.raises(InputError, match="has 19 test images; CINIC-10 has 20"):
        load_dataset("cinic10")
    for part in ("train", "test"):
        (cinic / part / "cat").rename(cinic / part / "tiger")
    with pytest.raises(InputError, match=r"tiger.*; expected those of CIFAR-10"):
        load_dataset("cinic10")
    with pytest.raises(InputError, match="'test'"):
        load_dataset("cinic10:valid=test")


DOMAINS = ("clipart", "real")
CLASSES = ("The_Eiffel_Tower", "axe", "zebra")
LABELS = {"axe": 0, "The_Eiffel_Tower": 1, "zebra": 2}
"""Not in the order of the names: the lists decide."""


@pytest.fixture
def domainnet(root: Root, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(DATASET_SOURCES, "domainnet", replace(DOMAINNET, classes=3, size=8, shape=(3, 8, 8)))
    folder = root / "domainnet"
    for number, domain in enumerate(DOMAINS):
        lines: dict[str, list[str]] = {"train": [], "test": []}
        for label, name in enumerate(CLASSES):
            (folder / domain / name).mkdir(parents=True)
            for i in range(3 + number):
                file = f"{domain}/{name}/{domain}_{label:03d}_{i:06d}.jpg"
                (folder / file).write_bytes(encoded(100 * number + 10 * label + i, 12, "JPEG"))
                lines["test" if i == 0 else "train"].append(f"{file} {LABELS[name]}")
        for part, listed in lines.items():
            (folder / f"{domain}_{part}.txt").write_text("\n".join(listed) + "\n")
    return folder


def test_domainnet_by_its_lists(domainnet: Path) -> None:
    data = load_dataset("domainnet")
    assert data.class_names == ("axe", "The_Eiffel_Tower", "zebra")
    assert data.domain_names == DOMAINS
    assert data.domains is not None
    assert np.bincount(data.domains).tolist() == [6, 9]
    assert data.train.y[data.domains == 0].tolist() == [1, 1, 0, 0, 2, 2]
    assert data.test.y.tolist() == [1, 0, 2] * 2
    assert data.test_domains is not None
    assert data.test_domains.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.shape == (3, 8, 8)
    assert "without infograph, painting, quickdraw, sketch" in data.notes[0]
    assert load_dataset("domainnet:size=4").shape == (3, 4, 4)


def test_domainnet_without_lists_is_split(domainnet: Path) -> None:
    for path in domainnet.glob("*.txt"):
        path.unlink()
    data = load_dataset("domainnet")
    assert data.class_names == CLASSES
    assert (len(data.train), len(data.test)) == (15, 6)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("real_test.txt", None, r"cannot read .*real_test.txt: No such file"),
        ("real_test.txt", "", "is empty"),
        ("real_test.txt", "real/axe/real_001_000000.jpg 2\n", "gives 'axe' the label 2, which 'zebra' has"),
        ("real_test.txt", "real/axe/real_001_000000.jpg 7\n", "leave labels below 7 out"),
        ("real_test.txt", "real/axe/real_001_000000.jpg 3\n", "give one class two labels"),
        ("real_test.txt", "real/axe/absent.jpg 0\n", "cannot read .*absent.jpg: No such file"),
        ("real_test.txt", "real/axe/\0bsent.jpg 0\n", r"cannot read .*axe/.x00bsent.jpg': this is no name of a file"),
        ("real_test.txt", "real/../secret.jpg 0\n", "expected real/CLASS/FILE LABEL"),
        ("real_test.txt", "clipart/axe/clipart_001_000000.jpg 0\n", "expected real/CLASS/FILE LABEL"),
        ("real_test.txt", "real/axe/real_001_000000.jpg x\n", "expected real/CLASS/FILE LABEL"),
    ],
)
def test_lists_that_are_wrong(domainnet: Path, file: str, text: str | None, message: str) -> None:
    (domainnet / file).unlink() if text is None else (domainnet / file).write_text(text)
    with pytest.raises(InputError, match=message):
        load_dataset("domainnet")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=damage())
def test_broken_lists_are_refused_in_one_sentence(domainnet: Path, change: Callable[[bytes], bytes]) -> None:
    path = domainnet / "real_train.txt"
    whole = "".join(f"real/{name}/real_{k:03d}_000001.jpg {LABELS[name]}\n" for k, name in enumerate(CLASSES)).encode()
    path.write_bytes(change(whole))
    attempt(lambda: DATASET_SOURCES["domainnet"].read(domainnet))


def packed(**changes: np.ndarray) -> bytes:
    """Twelve images of four domains and three of the seven classes."""
    files = [encoded(i, 64, "JPEG") for i in range(12)]
    arrays = {
        "jpeg": np.frombuffer(b"".join(files), np.uint8),
        "offset": np.cumsum([0, *map(len, files)]).astype(np.int32),
        "y": (np.arange(12) // 4).astype(np.uint8),
        "domain": (np.arange(12) % 4).astype(np.uint8),
        "domains": np.array(PACS.domain_names),
        "classes": np.array(PACS.class_names),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **{**arrays, **changes})
    return buffer.getvalue()


@pytest.fixture
def pacs(root: Root, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(DATASET_SOURCES, "pacs", replace(PACS, images_per_domain=(3, 3, 3, 3)))
    (root / "pacs64").mkdir()
    return root / "pacs64" / "pacs64.npz"


def test_pacs_in_one_file(pacs: Path) -> None:
    labels = np.repeat(np.arange(3), 4).astype(np.uint8)
    pacs.write_bytes(packed(y=np.zeros_like(labels)))
    data = load_dataset("pacs")
    assert data.domain_names == PACS.domain_names
    assert data.domains is not None
    assert np.bincount(data.domains).tolist() == [2, 2, 2, 2]
    assert (len(data.test), data.shape) == (4, (3, 64, 64))
    assert data.test_domains is not None
    assert data.test_domains.tolist() == [0, 1, 2, 3]
    with Image.open(io.BytesIO(encoded(0, 64, "JPEG"))) as first:
        assert np.array_equal(data.train.x[0].numpy(), np.asarray(first))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": np.zeros(11, np.uint8)}, "11 labels, 12 domains and 13 offsets"),
        ({"offset": np.arange(13)}, "offsets that do not cut"),
        ({"y": np.full(12, 7, np.uint8)}, "domains or labels that PACS does not have"),
        ({"domains": np.array(["a", "b", "c", "d"])}, "domains or labels that PACS does not have"),
        ({"domain": np.zeros(12, np.uint8)}, r"has \(12, 0, 0, 0\) images by domain; PACS has \(3, 3, 3, 3\)"),
        ({"classes": np.array(PACS.class_names[::-1])}, "PACS has others"),
    ],
)
def test_a_packed_file_that_is_wrong(pacs: Path, changes: dict[str, np.ndarray], message: str) -> None:
    pacs.write_bytes(packed(**changes))
    with pytest.raises(InputError, match=message):
        load_dataset("pacs")


def test_a_broken_image_in_it_is_named(pacs: Path) -> None:
    files = [encoded(i, 64, "JPEG") for i in range(12)]
    files[5] = files[5][: len(files[5]) // 2] + bytes(len(files[5]) - len(files[5]) // 2)
    files[6] = bytes(len(files[6]))
    pacs.write_bytes(packed(jpeg=np.frombuffer(b"".join(files), np.uint8)))
    with pytest.raises(InputError, match=r"cannot decode image [56] of .*pacs64.npz"):
        load_dataset("pacs")


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=damage())
def test_broken_packed_files_are_refused_in_one_sentence(pacs: Path, change: Callable[[bytes], bytes]) -> None:
    pacs.write_bytes(change(packed()))
    attempt(lambda: DATASET_SOURCES["pacs"].read(pacs.parent))


@pytest.mark.parametrize("inside", ["", "kfold"])
def test_pacs_as_folders(root: Root, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    monkeypatch.setitem(DATASET_SOURCES, "pacs", replace(PACS, images_per_domain=(21,) * 4))
    for domain in PACS.domain_names:
        for name in PACS.class_names:
            folder = root / "PACS" / inside / domain / name
            folder.mkdir(parents=True)
            for i in range(3):
                (folder / f"pic_{i}.jpg").write_bytes(encoded(i, 16, "JPEG"))
    data = load_dataset("pacs:size=16")
    assert (len(data.train), len(data.test), data.classes) == (56, 28, 7)
    (root / "PACS" / inside / "photo" / "dog" / "pic_0.jpg").unlink()
    with pytest.raises(InputError, match="has 83 images; PACS has 84"):
        load_dataset("pacs:size=16")


def test_what_must_be_fetched_by_hand_says_how(root: Root) -> None:
    infos = {info.name: info for info in registry.available_datasets()}
    for name in ("cinic10", "femnist", "domainnet", "pacs"):
        assert infos[name].state == "must be downloaded by hand"
        assert "https://" in infos[name].manual_steps or "http://" in infos[name].manual_steps
        with pytest.raises(InputError, match=f"{name!r} must be downloaded by hand: .*FEDLOOM_DATA"):
            load_dataset(name)
    assert infos["digit5"].state == "can be downloaded"
    assert infos["folder:PATH"].state == "your own"


@pytest.mark.data("pacs64")
def test_the_real_pacs() -> None:
    data = load_dataset("pacs", download=False)
    assert (len(data.train), len(data.test)) == (PACS.num_train_examples, PACS.num_test_examples)
    assert data.domains is not None
    # Four fifths of each domain, up to one image for each of its seven classes.
    assert np.bincount(data.domains) == pytest.approx(0.8 * np.array(PACS.images_per_domain), abs=7)
    assert data.shape == (3, 64, 64)
    assert load_dataset("pacs:size=32", download=False).shape == (3, 32, 32)


@pytest.mark.data("cifar100")
def test_the_real_cifar100() -> None:
    fine, coarse = load_dataset("cifar100", download=False), load_dataset("cifar100-coarse", download=False)
    assert (fine.classes, coarse.classes, len(fine.train), len(fine.test)) == (100, 20, 50_000, 10_000)
    assert fine.train.x.equal(coarse.train.x)
    assert np.bincount(fine.train.y).tolist() == [500] * 100
    assert np.bincount(coarse.test.y).tolist() == [500] * 20
    # Every fine class lies in one coarse class, five in each: cattle, the first image, is a large herbivore.
    pairs = {(int(f), int(c)) for f, c in zip(fine.train.y, coarse.train.y, strict=True)}
    assert len(pairs) == 100
    assert (fine.class_names[fine.train.y[0]], coarse.class_names[coarse.train.y[0]]) == (
        "cattle",
        "large omnivores and herbivores",
    )
    of = {fine.class_names[f]: coarse.class_names[c] for f, c in pairs}
    assert [of[name] for name in ("apple", "whale", "worm", "tank", "wolf")] == [
        *("fruit and vegetables", "aquatic mammals", "non-insect invertebrates", "vehicles 2", "large carnivores"),
    ]


@pytest.mark.data("mnist")
def test_the_real_writers_of_mnist() -> None:
    data = load_dataset("mnist", download=False)
    assert data.owners is not None
    counts = np.bincount(data.owners)
    assert (len(data.owner_names), counts.min(), counts.max()) == (539, 19, 131)
