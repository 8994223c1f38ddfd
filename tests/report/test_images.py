"""Tests of synthetic images in a report: reading, layout, valid PNGs."""

import base64
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.errors import InputError
from fedloom.report import make_comparison_table, read_run_record
from fedloom.report.images import MOST_OF_A_CLASS, _png, _SyntheticImages, render_synthetic_images
from fedloom.report.page import _render_report
from fedloom.utils.storage import read_safetensors, write_checked_safetensors
from tests.support.fake_runs import write_run

NAMES = [str(at) for at in range(10)]


def write_set(folder: Path, count: int = 20, channels: int = 1, **more: torch.Tensor) -> None:
    torch.manual_seed(0)
    labels = torch.full((count, 10), 0.01)
    labels[torch.arange(count), torch.arange(count) % 4] = 0.91  # classes 4 to 9 are nobody's
    tensors = {"images": torch.randn(count, channels, 6, 8), "labels": labels, "losses": torch.zeros(0), **more}
    write_checked_safetensors(folder / "synthetic.safetensors", tensors)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", "dynafed", seed=1)


def page(*folders: Path) -> str:
    return render_synthetic_images(make_comparison_table([read_run_record(folder) for folder in folders]).groups)


def pixels(address: str) -> np.ndarray:
    """A PNG decoded by hand: of the kind without filters that is written here."""
    content = base64.b64decode(address.partition(",")[2])
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(content):
        (size,) = struct.unpack(">I", content[at : at + 4])
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + size]
        (check,) = struct.unpack(">I", content[at + 8 + size : at + 12 + size])
        assert check == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + size
    width, height, depth, colour, *_ = struct.unpack(">2I5B", chunks[b"IHDR"])
    assert depth == 8
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, {0: 1, 2: 3}[colour])


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_holds_the_image(channels: int) -> None:
    image = np.random.default_rng(0).random((5, 7, channels))
    assert np.array_equal(pixels(_png(image)), np.rint(image * 255).astype(np.uint8))


def test_nothing_without_a_set(folder: Path) -> None:
    assert page(folder) == ""


def test_every_class_has_its_row_and_the_surest_come_first(folder: Path) -> None:
    write_set(folder, count=80, losses=torch.linspace(1, 0.5, 100))
    shown = page(folder)
    assert shown.count('class="made"') == 10
    assert shown.count("<img") == 4 * MOST_OF_A_CLASS
    assert shown.count("8 more") == 4
    assert shown.count("no samples") == 6
    assert "80 samples" in shown
    assert "from 0.977 to 0.523 in 100 iterations" in shown
    assert set(re.findall(r"<figcaption>(.*?)</figcaption>", shown)) == {"91%"}


def test_images_are_shown_as_the_data_would_look(folder: Path) -> None:
    """Within the range of the data nothing but the normalisation is undone."""
    real = torch.rand(20, 1, 6, 8)
    mean, std = torch.tensor([0.3]), torch.tensor([0.2])
    write_set(folder, mean=mean, std=std, images=(real - 0.3) / 0.2)
    made = _SyntheticImages.read(folder)
    assert made is not None
    np.testing.assert_allclose(made.images, real.permute(0, 2, 3, 1).numpy(), atol=1e-6)


def test_images_beyond_the_range_are_brought_back_into_it(folder: Path) -> None:
    write_set(folder, images=torch.linspace(-3, 5, 20 * 48).view(20, 1, 6, 8))
    made = _SyntheticImages.read(folder)
    assert made is not None
    assert made.images.min() == 0
    assert made.images.max() == 1
    assert all(len(np.unique(image)) > 20 for image in made.images), "and keep their structure"


def test_vectors_are_no_pictures(folder: Path) -> None:
    write_set(folder, images=torch.randn(20, 64))
    assert page(folder) == ""


def test_a_damaged_set_is_named(folder: Path) -> None:
    (folder / "synthetic.safetensors").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"synthetic\.safetensors is damaged"):
        page(folder)


def test_one_set_of_each_method_is_shown_and_the_page_stays_closed_to_the_network(tmp_path: Path) -> None:
    runs = [("dynafed", 0), ("dynafed", 1), ("fedmr+dynafed", 0)]
    folders = [write_run(tmp_path / f"{method}-{seed}", method, seed=seed) for method, seed in runs]
    for folder in folders[1:]:  # the first has none yet
        write_set(folder, channels=3)
    html = _render_report(make_comparison_table([read_run_record(folder) for folder in folders]))
    titles = re.findall(r"<h3>(.*?, seed \d)</h3>", html)
    assert titles == ["dynafed, seed 1", "fedmr+dynafed, seed 0"]
    assert "img-src data: blob:" in html
    assert html.count("<figure>") == 40


def test_samples_that_were_not_optimized_are_left_out(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"dynafed-{seed}", "dynafed", seed=seed) for seed in range(2)]
    for folder in folders:
        write_set(folder)
    tensors = read_safetensors(folders[0] / "synthetic.safetensors")
    write_checked_safetensors(folders[0] / "synthetic.safetensors", {k: v for k, v in tensors.items() if k != "losses"})
    html = _render_report(make_comparison_table([read_run_record(folder) for folder in folders]))
    assert re.findall(r"<h3>(.*?, seed \d)</h3>", html) == ["dynafed, seed 1"]
