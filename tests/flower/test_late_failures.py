"""Exchanges that fail after their sites have committed themselves, where the server cannot open models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_runs import SECURE, federate, key_of, nodes, recorded, run_of
from fake import FakeLink, make_sites, reach

from fedloom.api import execute, resume
from fedloom.errors import FedloomError
from fedloom.flower.diary import MOST_BEGINNINGS
from fedloom.flower.parcel import Parcel, failed
from fedloom.flower.starting import opened, start_of
from fedloom.request import replace_config


class Gone:
    """A site whose commitment never arrives, in some rounds."""

    def __init__(self, *rounds: int) -> None:
        self.rounds = rounds

    def __call__(self, link: FakeLink) -> None:
        def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel | None:
            gone = (question.kind, node) == ("mix/commit", 102) and question.header["round"] in self.rounds
            return None if gone else answer

        link.meddle = meddle


def lost_of(finished: Any) -> list[int]:
    return [record["lost"] for record in finished.history if record["round"]]


def test_a_run_whose_first_exchange_fails_late_begins_with_another_model(
    certificates: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun_with: dict[tuple[int, int], torch.Tensor],
) -> None:
    trained, config = recorded(monkeypatch), run_of(rounds=4, deadline=0.5)
    finished, link = federate(config, certificates, tmp_path, Gone(0), **key_of(certificates))
    assert lost_of(finished) == [5, 0, 0, 0]
    site = link.sites[100]
    for client in range(5):
        assert torch.equal(begun_with[0, client], site.initial)
        assert torch.equal(begun_with[1, client], site.drawn(1))
    # What the server has in the end is the mean of what they trained from that.
    mean = torch.stack([row for round, _, row in trained if round == 3]).mean(0)
    assert len(trained) == 4 * 5
    deployed = site.layout.read(finished.model())
    torch.testing.assert_close(deployed, mean, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(deployed, site.initial, atol=0.01)


def test_no_two_of_these_models_have_much_in_common(certificates: Path, tmp_path: Path) -> None:
    """Or what a client learns from one would be near what it learns from the other, and means could be subtracted."""
    site = make_sites(run_of(clients=3, per_round=3), tmp_path, nodes(certificates, 3, **key_of(certificates)))[100]
    site.build()
    models = [site.initial, *(site.drawn(number) for number in range(1, 4))]
    assert torch.equal(site.drawn(0), site.initial)
    for number, one in enumerate(models):
        for other in models[:number]:
            for mine, theirs in zip(site.layout.views(one), site.layout.views(other), strict=True):
                if mine.ndim > 1:
                    angle = torch.nn.functional.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0)
                    assert abs(float(angle)) < 6 / mine.numel() ** 0.5


def test_it_may_fail_again_and_again(certificates: Path, tmp_path: Path) -> None:
    config = run_of(rounds=5, deadline=0.4)
    finished, _ = federate(config, certificates, tmp_path, Gone(0, 1, 2), **key_of(certificates))
    assert lost_of(finished) == [5, 5, 5, 0, 0]


def test_but_not_for_ever(certificates: Path, tmp_path: Path) -> None:
    config = run_of(rounds=MOST_BEGINNINGS + 1, deadline=0.4)
    finished, _ = federate(config, certificates, tmp_path, Gone(*range(MOST_BEGINNINGS)), **key_of(certificates))
    assert lost_of(finished) == [5] * (MOST_BEGINNINGS + 1)
    reasons = finished.history[-1]["lost_clients"]
    assert f"it has begun anew {MOST_BEGINNINGS} times, and no exchange has succeeded" in reasons["0"]


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("failing", [(1,), (1, 2), (2, 4)])
def test_a_later_exchange_that_fails_late_is_lost_and_the_next_is_not(
    certificates: Path, tmp_path: Path, count: int, failing: tuple[int, ...]
) -> None:
    """Clients are given other models than those that they had in the one that failed."""
    config = run_of(clients=count, per_round=count, rounds=6, deadline=0.4)
    finished, link = federate(config, certificates, tmp_path, Gone(*failing), **key_of(certificates))
    assert lost_of(finished) == [count if round in failing else 0 for round in range(6)]
    models = [
        (parcel.header["client"], bytes(parcel.blocks["model"].data))
        for parcel in link.asked
        if parcel.kind == "mix/train" and "model" in parcel.blocks
    ]
    assert len(set(models)) == len(models) == count * 5


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_minimum_of_answers_does_not_hold_a_run_at_a_round_that_cannot_be_played_again(
    certificates: Path, tmp_path: Path, failing: int, restarted: bool
) -> None:
    """Sites that are still there say again what they said; others have written down that this round is over."""
    config, out = run_of(rounds=4, deadline=0.5, min_clients=2), tmp_path / "run"
    link = FakeLink(make_sites(config, tmp_path, nodes(certificates, 5, **key_of(certificates))))
    Gone(failing)(link)
    with pytest.raises(FedloomError, match=f"round {failing + 1}: 0 of 5 clients answered, but min_clients is 2"):
        execute(config, out=out, sites=reach(link, config, out))
    if restarted:
        link.sites = make_sites(config, tmp_path, nodes(certificates, 5, **key_of(certificates)))
    link.meddle = None
    finished = resume(out, sites=reach(link, config, out))
    assert lost_of(finished)[: failing + 1] == [*[0] * failing, 5 if restarted else 0]
    assert finished.history[-1]["round"] == 4
    assert finished.history[-1]["lost"] < 3
    if restarted:
        reasons = finished.history[failing + 1]["lost_clients"]
        assert all("and trains for a round but once" in reasons[str(client)] for client in range(5))


def test_too_few_answers_stop_a_run_also_when_one_site_says_that_it_never_will(
    certificates: Path, tmp_path: Path
) -> None:
    config = run_of(rounds=2, deadline=0.5, min_clients=3)

    def lie(link: FakeLink) -> None:
        def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel | None:
            if question.kind != "mix/train" or node < 102:
                return answer
            return failed(question, "never", for_good=True) if node == 102 else None

        link.meddle = meddle

    with pytest.raises(FedloomError, match="round 1: 0 of 5 clients answered, but min_clients is 3"):
        federate(config, certificates, tmp_path, lie, **key_of(certificates))


def test_a_model_from_a_file_is_begun_with_once(certificates: Path, tmp_path: Path) -> None:
    first = execute(replace_config(run_of(rounds=1, options={}), method="fedavg", engine="plain", deadline=600.0),
                    out=tmp_path / "first")  # fmt: skip
    config = run_of(rounds=3, deadline=0.5, init=str(first.path / "model.safetensors"), options=SECURE)
    finished, link = federate(config, certificates, tmp_path, Gone(0), **key_of(certificates))
    assert lost_of(finished) == [5, 5, 5]
    assert "it has trained this model before, and trains none twice" in finished.history[-1]["lost_clients"]["0"]
    site = link.sites[100]
    question = next(p for p in link.asked if p.kind == "mix/train" and p.header["round"] == 1)
    assert start_of(site, question, None) == "initial"


def test_without_a_models_key_the_model_in_the_question_is_trained(certificates: Path, tmp_path: Path) -> None:
    site = make_sites(run_of(clients=3, per_round=3), tmp_path, nodes(certificates, 3))[100]
    site.build()
    header = {"run": "ab" * 16, "round": 2, "client": 0, "nonce": "cd" * 16, "slot": 0}
    question = Parcel("mix/train", header, {"row": site.travel.pack(site.initial + 1)})
    assert opened(site, question, None, None, []) is question


@pytest.mark.parametrize("round", [0, 1])
def test_nobody_commits_itself_to_an_exchange_with_too_few_others(
    certificates: Path, tmp_path: Path, round: int
) -> None:
    """Or the run would stop, and the round could not be played again when all are there."""
    config, out = run_of(rounds=3, clients=4, per_round=4, deadline=0.5, min_clients=4), tmp_path / "run"
    link = FakeLink(make_sites(config, tmp_path, nodes(certificates, 4, **key_of(certificates))))

    def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel | None:
        return None if (question.kind, question.header["round"], node) == ("mix/train", round, 103) else answer

    link.meddle = meddle
    stopped = f"round {round + 1}: 0 of 4 clients answered, but min_clients is 4"
    with pytest.raises(FedloomError, match=stopped):
        execute(config, out=out, sites=reach(link, config, out))
    for _ in range(4):  # as often as one likes
        with pytest.raises(FedloomError, match=stopped):
            resume(out, sites=reach(link, config, out))
    link.meddle = None
    assert lost_of(resume(out, sites=reach(link, config, out))) == [0, 0, 0]


def test_a_server_that_dies_in_a_second_attempt_loses_that_round_alone(certificates: Path, tmp_path: Path) -> None:
    config, out = run_of(rounds=3, deadline=0.5, min_clients=3), tmp_path / "run"
    link, gone = FakeLink(make_sites(config, tmp_path, nodes(certificates, 5, **key_of(certificates)))), list[int]()

    def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel | None:
        if question.kind == "mix/mean":
            raise KeyboardInterrupt
        if (question.kind, node) == ("mix/lock", 104) and not gone:
            gone.append(node)
            return None
        return answer

    link.meddle = meddle
    with pytest.raises(KeyboardInterrupt):
        execute(config, out=out, sites=reach(link, config, out))
    link.meddle = None
    assert lost_of(resume(out, sites=reach(link, config, out))) == [5, 0, 0]
