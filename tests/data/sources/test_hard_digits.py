"""Hard digits: always the same images, and no test digit in a training image."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from benchmarks.pictures import main as draw_picture
from fedloom.data import Samples, load_dataset
from fedloom.data.sources import hard_digits
from fedloom.data.sources.hard_digits import make_hard_digits
from fedloom.data.sources.mnist import read_sklearn_digits
from fedloom.errors import InputError

SHA256 = "1a5b734ef2d0fb332098c1f68d261827f67d0ea2e2418ef50d60045b39bc760f"


def test_the_images_are_always_the_same() -> None:
    train, test = make_hard_digits()
    digest = sha256()
    for part in (train.x, test.x, train.y, test.y):
        digest.update(part.numpy().tobytes())
    assert digest.hexdigest() == SHA256


def test_a_loaded_data_set_is_standardised() -> None:
    digits = load_dataset("hard-digits")
    assert (digits.name, digits.shape, digits.classes) == ("hard-digits", (1, 16, 16), 10)
    x = digits.transform(digits.train.x)
    assert x.shape == (6000, 1, 16, 16)
    assert float(x.mean()) == pytest.approx(0, abs=1e-3)
    assert float(x.std()) == pytest.approx(1, abs=1e-3)


def test_labels_are_nearly_balanced() -> None:
    for samples in make_hard_digits():
        share = torch.bincount(samples.y, minlength=10) / len(samples)
        assert ((share - 0.1).abs() < 0.01).all()


def test_no_test_digit_is_in_a_training_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other test digits the training images stay the same, and the other way round."""
    parts = read_sklearn_digits()
    made = make_hard_digits.__wrapped__()
    for changed, kept in ((0, 1), (1, 0)):
        other = list(parts)
        other[changed] = Samples(255 - parts[changed].x, parts[changed].y)
        monkeypatch.setattr(hard_digits, "read_sklearn_digits", lambda other=other: other)
        again = make_hard_digits.__wrapped__()
        assert torch.equal(again[kept].x, made[kept].x)
        assert not torch.equal(again[changed].x, made[changed].x)


def test_without_distortion_an_image_is_the_enlarged_digit() -> None:
    grey = np.random.default_rng(0).uniform(size=(1, 8, 8))
    plain = {"angle": np.zeros(1), "shear": np.zeros(1), "scale": np.ones(1), "shift": np.zeros((1, 2))}
    large = hard_digits._resample(grey, **plain)
    # Each pixel of the small image is four of the large one, a quarter of a pixel away from its centre in both ways.
    kernel = np.array([0.75, 0.25])
    expected = kernel @ grey[0, 3:5, 3:5] @ kernel
    assert large[0, 7, 7] == pytest.approx(expected)
    turned = hard_digits._resample(grey, **(plain | {"angle": np.array([np.pi / 2])}))
    assert np.allclose(turned[0], np.rot90(large[0]))
    moved = hard_digits._resample(grey, **(plain | {"shift": np.array([[2.0, -1.0]])}))
    assert np.allclose(moved[0, 2:, :-1], large[0, :-2, 1:])


@pytest.mark.parametrize("model", ["logreg", "mlp", "mlp-128", "lenet", "lenet:padding=2", "cnn"])
def test_networks_train_on_them(model: str) -> None:
    run = fedloom.run(
        data="hard-digits", model=model, partition="dirichlet-equal:0.05", clients=50, clients_per_round=1, rounds=1,
        epochs=1, engine="sequential",
    )  # fmt: skip
    assert run.summary["rounds"] == 1


def test_an_option_is_refused() -> None:
    with pytest.raises(InputError, match="option of 'hard-digits' 'size'"):
        load_dataset("hard-digits:size=32")


def test_the_picture_of_the_documentation_is_up_to_date(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    draw_picture(["--out", str(tmp_path / "drawn.png")])
    shown = Path(__file__).parents[3] / "docs" / "images" / "hard-digits.png"
    assert np.array_equal(np.asarray(image.open(tmp_path / "drawn.png")), np.asarray(image.open(shown)))
