"""Keys and sites that several test files want."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exchange_runs import Two, asked_of, key_of, nodes, run_of
from fake import FakeLink, make_sites, reach

from fedloom.api import execute
from fedloom.flower.certificates import make, node_names
from fedloom.flower.parcel import Parcel
from fedloom.flower.site import Site
from fedloom.watching import Stopped


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make(folder, node_names(5))
    return folder


@pytest.fixture
def played(certificates: Path, tmp_path: Path) -> FakeLink:
    """Three sites that have played two of nine rounds."""
    config, out = run_of(clients=3, per_round=3, rounds=9), tmp_path / "run"
    link = FakeLink(make_sites(config, tmp_path, nodes(certificates, 3, **key_of(certificates))))
    with pytest.raises(Stopped):
        execute(config, out=out, sites=reach(link, config, out), watcher=Two())
    return link


@pytest.fixture
def asked(played: FakeLink) -> tuple[Site, Parcel]:
    """The first site, and what it was asked."""
    return played.sites[100], asked_of(played, 0)


@pytest.fixture
def fresh(played: FakeLink) -> tuple[Site, Parcel]:
    """The first site, and a question of a later round with a model that it has not trained yet."""
    mine, other = asked_of(played, 0), asked_of(played, 1)
    return played.sites[100], replace(other, header={**mine.header, "round": 6, "slot": other.header["slot"]})


@pytest.fixture
def begun_with(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], torch.Tensor]:
    """By round and client: the model that it was given to train."""
    found, received = dict[tuple[int, int], torch.Tensor](), Site._received

    def listen(site: Site, question: Parcel) -> torch.Tensor:
        row = received(site, question)
        found[question.header["round"], question.header["client"]] = row.clone()
        return row

    monkeypatch.setattr(Site, "_received", listen)
    return found
