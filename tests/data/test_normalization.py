"""Tests of normalization by name and of selected classes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedloom.data import Dataset, Samples, load_dataset, select_classes, with_normalization
from fedloom.data.transforms import PRESETS
from fedloom.errors import InputError


def test_owners_and_domains_follow_when_classes_are_picked() -> None:
    x, y = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1), torch.tensor([0, 2, 1, 2, 0, 1])
    samples = Samples(x, y)
    marks = {"owners": np.arange(6) % 3, "owner_names": ("a", "b", "c")}
    marks |= {"domains": np.arange(6) // 3, "domain_names": ("p", "q")}
    marks |= {"test_owners": np.arange(6) % 3 - 1, "test_domains": np.arange(6) // 3 - 1}
    data = Dataset(samples, samples, ("x", "y", "z"), name="tiny", **marks)
    kept = select_classes(data, "0,2")
    assert kept.train.x.flatten().tolist() == [0, 1, 3, 4]
    assert kept.owners is not None
    assert kept.domains is not None
    assert (kept.owners.tolist(), kept.domains.tolist()) == ([0, 1, 0, 1], [0, 0, 1, 1])
    assert kept.test_owners is not None
    assert kept.test_domains is not None
    assert (kept.test_owners.tolist(), kept.test_domains.tolist()) == ([-1, 0, -1, 0], [-1, -1, 0, 0])


def images(channels: int, values: tuple[int, ...] = (0, 51, 255)) -> Dataset:
    """Channel k of all images holds these values times its number, cut off at 255."""
    planes = [torch.tensor(values).mul(k + 1).clamp(max=255).to(torch.uint8) for k in range(channels)]
    x = torch.stack(planes, dim=1).view(len(values), 1, 1, channels)
    samples = Samples(x, torch.zeros(len(values), dtype=torch.int64))
    return Dataset(samples, samples, ("a", "b"), name="tiny")


def test_the_default_is_the_data_sets_own() -> None:
    digits = load_dataset("digits")
    assert with_normalization(digits, "default") is digits


@pytest.mark.parametrize(("name", "expected"), [("unit", [0, 0.2, 1]), ("half", [-1, -0.6, 1])])
def test_presets_on_grey_and_colour(name: str, expected: list[float]) -> None:
    for channels in (1, 3):
        data = with_normalization(images(channels), name)
        assert data.transform(data.train.x)[:, 0].flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_presets_of_three_channels() -> None:
    data = with_normalization(images(3), "cifar")
    got = data.transform(data.train.x)[1].flatten()
    means, deviations = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2023, 0.1994, 0.2010])
    assert got.tolist() == pytest.approx(((np.array([0.2, 0.4, 0.6]) - means) / deviations).tolist(), abs=1e-5)
    with pytest.raises(InputError, match="'imagenet' is for 3 channels; 'tiny' has 1"):
        with_normalization(images(1), "imagenet")


def test_measured_constants_standardise() -> None:
    data = with_normalization(images(3), "mean-std")
    x = data.transform(data.train.x).double()
    assert x.mean(dim=(0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert x.pow(2).mean(dim=(0, 2, 3)).tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    with pytest.raises(InputError, match="a channel that is the same in all images"):
        with_normalization(images(1, (7, 7)), "mean-std")


def test_what_cannot_be_normalised() -> None:
    with pytest.raises(InputError, match="halff"):
        with_normalization(images(1), "halff")
    table = Samples(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    data = replace(images(1), train=table)
    for name in (*PRESETS, "mean-std"):
        with pytest.raises(InputError, match=f"normalize is {name!r}, but 'tiny' has no images"):
            with_normalization(data, name)


@pytest.mark.data("cifar100")
@pytest.mark.parametrize("name", ["cifar100", "cifar100-coarse"])
def test_the_constants_of_cifar100_are_those_measured(name: str) -> None:
    data = load_dataset(name, download=False)
    measured = with_normalization(data, "mean-std").transform
    assert data.transform.mean == pytest.approx(measured.mean, abs=1e-4)
    assert data.transform.std == pytest.approx(measured.std, abs=1e-4)
