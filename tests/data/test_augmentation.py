"""Tests of random crops and flips of images."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data import Augment, make_augment
from fedloom.errors import InputError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int, height: int, width: int, channels: int) -> torch.Tensor:
    return torch.randint(1, 256, (n, height, width, channels), dtype=torch.uint8, generator=generator(9))


def every_outcome(image: torch.Tensor, augment: Augment) -> list[torch.Tensor]:
    """All that can become of one H x W x C image, by slicing."""
    height, width, _ = image.shape
    padded = F.pad(image, (0, 0, 4, 4, 4, 4))
    offsets = range(9) if augment.crop else [4]
    crops = [padded[i : i + height, j : j + width] for i in offsets for j in offsets]
    return crops + [crop.flip(1) for crop in crops] if augment.flip else crops


@settings(max_examples=40, deadline=None)
@given(
    spec=st.sampled_from(["flip", "crop", "crop+flip"]),
    n=st.integers(0, 6),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    channels=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_every_image_becomes_one_of_its_possible_outcomes(
    spec: str, n: int, height: int, width: int, channels: int, seed: int
) -> None:
    augment = make_augment(spec)
    assert augment is not None
    x = images(n, height, width, channels)
    out = augment(x, generator(seed))
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    for before, after in zip(x, out, strict=True):
        assert any(torch.equal(after, outcome) for outcome in every_outcome(before, augment))


@pytest.mark.parametrize(("spec", "outcomes"), [("flip", 2), ("crop", 81), ("crop+flip", 162)])
def test_every_possible_outcome_comes_up_image_by_image(spec: str, outcomes: int) -> None:
    augment = make_augment(spec)
    assert augment is not None
    x = images(1, 5, 6, 1).expand(3000, 5, 6, 1)
    seen = torch.unique(augment(x, generator()), dim=0)
    assert len(seen) == outcomes


@pytest.mark.parametrize("spec", ["flip", "crop", "crop+flip"])
def test_stored_and_prepared_images_change_alike(spec: str) -> None:
    augment, x = make_augment(spec), images(8, 6, 5, 3)
    assert augment is not None
    expected = augment(x, generator()).permute(0, 3, 1, 2).float()
    for layout in (torch.contiguous_format, torch.channels_last):
        floats = x.permute(0, 3, 1, 2).float().contiguous(memory_format=layout)
        out = augment(floats, generator())
        assert torch.equal(out, expected)
        assert out.is_contiguous(memory_format=layout)


def test_draws_come_from_the_generator_alone() -> None:
    augment, x = Augment(crop=True, flip=True), images(8, 6, 6, 1)
    before = torch.get_rng_state()
    first, again, other = augment(x, generator(1)), augment(x, generator(1)), augment(x, generator(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_none_is_nothing_and_other_names_are_refused() -> None:
    assert make_augment("none") is None
    with pytest.raises(InputError, match="did you mean 'crop'"):
        make_augment("cropp")


@pytest.mark.parametrize("x", [torch.zeros(3, 5), torch.zeros(3, 4, 4, 1, dtype=torch.int64)])
def test_only_images_can_be_augmented(x: torch.Tensor) -> None:
    with pytest.raises(InputError, match="only images can be augmented"):
        Augment(flip=True)(x, generator())
