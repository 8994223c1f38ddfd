"""Tests of differential privacy over sites: the bits and epsilon of one process.

Who clips what is as docs/privacy.md says.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.config import Config, replace_config
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.flower.message import MessageArray, SiteMessage
from fedloom.privacy.accountant import PrivacyAccountant
from fedloom.privacy.mechanism import _SeededNoise
from fedloom.runs.execute import execute_run
from fedloom.runs.resolve import resolve_run
from fedloom.runs.result import RunResult
from fedloom.utils.storage import read_safetensors
from tests.support.fake_transport import FakeLink, make_run, make_sites, reach

pytest.importorskip("dp_accounting")

CLIP, NOISE, SEED = 0.2, 0.8, 3
"""The clip is far below what clients change in a round."""


def make(**settings: Any) -> Config:
    private = {"clip_update": CLIP, "noise": NOISE, "seed": SEED}
    return make_run(**{"clients": 5, "clients_per_round": 3, "rounds": 3, "batch_size": 32, **private, **settings})


def play(config: Config, folder: Path, change: Any = None) -> tuple[RunResult, FakeLink]:
    link, out = FakeLink(make_sites(config, folder)), folder / "flower"
    link.meddle = change
    return execute_run(resolve_run(config), out=out, report=False, remote_engine=reach(link, config, out)), link


def plainly(config: Config, folder: Path) -> RunResult:
    return execute_run(
        resolve_run(replace_config(config, engine="sequential")), out=folder / "sequential", report=False
    )


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_private_runs_have_the_same_bits_and_the_same_account(method: str, tmp_path: Path) -> None:
    config = make(method=method, delta=1e-3)
    run, link = play(config, tmp_path)
    plain = plainly(config, tmp_path)
    assert run.digest == plain.digest
    account = PrivacyAccountant(NOISE, 3 / 5, 1e-3)
    spent = [account.epsilon(rounds) for rounds in range(4)]
    assert spent == sorted(set(spent))
    for each in (run, plain):
        assert [(record["epsilon"], record["delta"]) for record in each.history] == [(e, 1e-3) for e in spent]
        assert (each.summary["epsilon"], each.summary["delta"]) == (spent[-1], 1e-3)
    asked = [sorted(p.header["client_id"] for p in link.asked if asked_in(p, round)) for round in range(3)]
    drawn = [_SeededNoise(RngStreams(SEED)).uniform(round, 5) < 3 / 5 for round in range(3)]
    assert asked == [[client for client in range(5) if took_part[client]] for took_part in drawn]
    assert len({len(clients) for clients in asked}) > 1, "how many take part varies"


def asked_in(parcel: SiteMessage, round: int) -> bool:
    return parcel.kind == "train" and parcel.header["round"] == round


def updates_of(link: FakeLink) -> dict[tuple[int, int], Tensor]:
    """By round and client: the way from the model in the question to the one in the answer, as the server gets it."""
    rows = [
        {
            (p.header["round"], p.header["client_id"]): torch.frombuffer(
                bytearray(p.arrays["model"].data), dtype=torch.float32
            )
            for p in parcels
            if p.kind == kind
        }
        for parcels, kind in ((link.asked, "train"), (link.answered, "trained"))
    ]
    assert rows[0].keys() == rows[1].keys()
    return {key: rows[1][key].double() - rows[0][key].double() for key in rows[0]}


def norms(updates: dict[tuple[int, int], Tensor]) -> list[float]:
    return [float(torch.linalg.vector_norm(way)) for way in updates.values()]


def test_the_server_sees_updates_as_they_are(tmp_path: Path) -> None:
    """And so they are those of a run without a clip, in the first round."""
    _, link = play(make(clients_per_round=5, rounds=1), tmp_path)
    (tmp_path / "open").mkdir()
    _, free = play(make(clients_per_round=5, rounds=1, clip_update=None, noise=0), tmp_path / "open")
    ours, theirs = updates_of(link), updates_of(free)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert min(norms(ours)) > 2 * CLIP


def far_off(way: float) -> Any:
    """A site that lies: client 2 sends a model that is that far from the one it got, in every number."""

    def change(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage:
        if question.kind != "train" or question.header["client_id"] != 2:
            return answer
        came = torch.frombuffer(bytearray(question.arrays["model"].data), dtype=torch.float32)
        block = MessageArray("float32", tuple(came.shape), (came + way).numpy().tobytes())
        return SiteMessage(answer.kind, answer.header, {**answer.arrays, "model": block})

    return change


def test_the_server_clips_the_update_of_a_client_that_lies(tmp_path: Path) -> None:
    """With and without the lie all draws are alike, so what is between the two models is the liar's doing."""
    config, models = make(clients_per_round=5, rounds=1), list[Tensor]()
    for name, change in (("honest", None), ("lying", far_off(1.0))):
        (tmp_path / name).mkdir()
        run, link = play(config, tmp_path / name, change)
        assert run.summary["failed"] == 0
        models.append(row_of(run, link.sites[100].layout))
    apart = float(torch.linalg.vector_norm(models[1] - models[0]))
    most = 2 * CLIP / 5  # an update of the length of the clip for another, of five
    assert 0 < apart <= most * (1 + 1e-4)


def row_of(run: RunResult, layout: Layout) -> Tensor:
    """The deployed model's numbers."""
    tensors = read_safetensors(run.path / "model.safetensors")
    return torch.cat([tensors[entry.name].flatten().double() for entry in layout.entries])
