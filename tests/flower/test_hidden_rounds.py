"""Rounds of the Flower engine with models that the server cannot open."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_runs import SECURE, Two, federate, key_of, nodes, on_host, pieces, recorded, run_of
from fake import FakeLink, make_sites, reach

from fedloom.api import execute, resume
from fedloom.engines.flower import FlowerEngine
from fedloom.experiment import build
from fedloom.flower.parcel import Block, Parcel
from fedloom.request import replace_config
from fedloom.watching import Stopped


def listed(question: Parcel) -> dict[str, list[Any]]:
    """The sites' inventory: by slot when a model was sealed, and hashes of its layers."""
    found: dict[str, list[Any]] = json.loads(bytes(question.blocks["inventory"].data)[32:])["models"]
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"secure": True},
        {"secure": True, "mixed": True, "granularity": "tensor", "send_probability": 0.9},
        {"secure": True, "granularity": "segment:0.5"},
    ],
)
def test_the_result_has_the_bits_of_the_host(certificates: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    config = run_of(options={"fedmr": options})
    finished, link = federate(config, certificates, tmp_path, **key_of(certificates))
    assert finished.summary["lost"] == 0
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]
    trained = [parcel for parcel in link.asked if parcel.kind == "mix/train"]
    assert [("row" in parcel.blocks, "model" in parcel.blocks) for parcel in trained[:5]] == [(True, False)] * 5
    assert [("row" in parcel.blocks, "model" in parcel.blocks) for parcel in trained[5:]] == ([(False, True)] * 5 * 2)


def test_with_what_stays_at_home(certificates: Path, tmp_path: Path) -> None:
    """FedRep's heads do not travel, and so are not sealed either; the mean of the rest is the host's."""
    config = run_of(method="fedmr+fedrep", options={**SECURE, "fedrep": {"head_epochs": 1}})
    deployed = []
    link = FakeLink(make_sites(config, tmp_path, nodes(certificates, 5, **key_of(certificates))))
    for sites in (None, reach(link, config, tmp_path / "run")):
        settings = {} if sites else {"engine": "plain", "deadline": 600.0}
        experiment = build(replace_config(config, **settings), sites=sites)
        with experiment.engine:
            for round in range(3):
                assert experiment.rounds.play(round)["lost"] == 0
            deployed.append(experiment.rounds.parts.server.deploy().clone())
            stays = experiment.rounds.parts.local.stays_home(experiment.layout)
    assert stays
    for columns in stays:
        deployed[0][columns] = deployed[1][columns] = 0
    assert torch.equal(*deployed)


def test_nothing_that_the_server_gets_or_keeps_holds_a_layer(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trained, held = recorded(monkeypatch), list[bytes]()
    update = FlowerEngine._update

    def keep(engine: FlowerEngine, job: Any, answer: Parcel) -> Any:
        made = update(engine, job, answer)
        held.append(made.row.numpy().tobytes())
        held.append(job.row.numpy().tobytes())
        return made

    monkeypatch.setattr(FlowerEngine, "_update", keep)
    config = run_of(keep_checkpoints=10)
    finished, link = federate(config, certificates, tmp_path, **key_of(certificates))
    assert finished.summary["lost"] == 0
    experiment = build(replace_config(config, engine="plain"))
    layers = experiment.rounds.parts.server.layers  # type: ignore[attr-defined]
    experiment.engine.close()
    for parcel in [*link.asked, *link.answered]:
        held.append(repr(dict(parcel.header)).encode())
        held.extend(bytes(block.data) for block in parcel.blocks.values())
    held.extend(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    content = b"".join(held) + caplog.text.encode()
    assert len(trained) == 15
    # Numbers that several clients trained to the same, such as those of a dead unit, are in their mean too.
    found = Counter(piece for _, _, row in trained for piece in set(pieces(row, layers)))
    searched = [piece for piece, times in found.items() if times == 1]
    assert len(searched) > 200
    assert not [piece for piece in searched if piece in content]
    files = [path for path in (tmp_path / "run").rglob("*.safetensors") if "checkpoint" in str(path)]
    assert files, "and checkpoints were among what was looked through"


def test_a_run_goes_on_from_its_checkpoint_with_models_that_nobody_has_seen(certificates: Path, tmp_path: Path) -> None:
    config = run_of(rounds=4)

    out = tmp_path / "run"
    link = FakeLink(make_sites(config, tmp_path, nodes(certificates, 5, **key_of(certificates))))
    with pytest.raises(Stopped):
        execute(config, out=out, sites=reach(link, config, out), watcher=Two())
    finished = resume(out, sites=reach(link, config, out))
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]


def test_a_model_whose_client_is_lost_waits_unopened(certificates: Path, tmp_path: Path) -> None:
    """What is sent in its slot next time is what was sent this time."""
    config = run_of(rounds=3, clients=4, per_round=4, deadline=0.4)

    def second_round(link: FakeLink) -> None:
        def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel | None:
            return None if (question.kind, question.header["round"], node) == ("mix/train", 1, 102) else answer

        link.meddle = meddle

    finished, link = federate(config, certificates, tmp_path, second_round, **key_of(certificates))
    records = [record for record in finished.history if record["round"]]
    assert [record["lost"] for record in records] == [0, 1, 0]
    sent = {
        (parcel.header["round"], parcel.header["slot"]): parcel
        for parcel in link.asked
        if parcel.kind == "mix/train" and "model" in parcel.blocks
    }
    lost = next(slot for (round, slot), parcel in sent.items() if round == 1 and parcel.header["client"] == 2)
    assert bytes(sent[1, lost].blocks["model"].data) == bytes(sent[2, lost].blocks["model"].data)
    for slot in range(4):
        assert listed(sent[2, slot])[str(lost)][0] == 0
        assert {listed(sent[2, slot])[str(other)][0] for other in range(4) if other != lost} == {1}


def test_what_a_second_attempt_sealed_is_opened_in_the_next_round(certificates: Path, tmp_path: Path) -> None:
    config, gone = run_of(rounds=2, clients=4, per_round=4, deadline=0.4), list[int]()

    def once(link: FakeLink) -> None:
        def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel | None:
            if (question.kind, node) != ("mix/lock", 102) or gone:
                return answer
            gone.append(node)
            return None

        link.meddle = meddle

    finished, link = federate(config, certificates, tmp_path, once, **key_of(certificates))
    assert [record["lost"] for record in finished.history if record["round"]] == [1, 0]
    sent = [parcel for parcel in link.asked if parcel.kind == "mix/train" and "model" in parcel.blocks]
    assert len(sent) == 4
    for parcel in sent:
        entries = listed(parcel)
        assert [entry[:2] for entry in entries.values()] == [[0, 1]] * 4
        lost = [slot for slot, entry in entries.items() if len(entry) == 2]
        assert len(lost) == 1, "the slot of the client that was lost goes on from the mean"


def test_a_site_that_is_gone_when_means_are_computed_is_not_missed(certificates: Path, tmp_path: Path) -> None:
    config = run_of(rounds=2, deadline=0.4)

    def silent(link: FakeLink) -> None:
        link.meddle = lambda node, question, answer: (
            None if question.kind == "mix/mean" and node in (100, 103) else answer
        )

    finished, _ = federate(config, certificates, tmp_path, silent, **key_of(certificates))
    assert finished.summary["lost"] == 0
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]


@pytest.mark.parametrize("liars", [{101}, {100, 101, 102, 103, 104}])
def test_a_mean_that_is_not_finite_is_asked_of_another_site(
    certificates: Path, tmp_path: Path, liars: set[int]
) -> None:
    config = run_of(rounds=1)

    def spoil(link: FakeLink) -> None:
        def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel:
            if answer.kind != "mix/mean" or node not in liars:
                return answer
            nan = torch.full((1,), float("nan")).numpy().tobytes()
            blocks = {name: Block.raw(nan + bytes(block.data)[4:]) for name, block in answer.blocks.items()}
            return Parcel(answer.kind, answer.header, blocks)

        link.meddle = meddle

    finished, _ = federate(config, certificates, tmp_path, spoil, **key_of(certificates))
    if len(liars) == 1:
        assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]
    else:
        assert finished.history[-1]["lost"] == 5
        assert "no site gave the mean of the models" in finished.history[-1]["lost_clients"]["0"]


def test_an_answer_that_would_be_refused_is_refused_before_others_layers_are_in_it(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, config = recorded(monkeypatch), run_of(rounds=1)

    def lie(link: FakeLink) -> None:
        def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel:
            if (node, answer.kind) != (101, "mix/hello"):
                return answer
            return replace(answer, header={**answer.header, "samples": answer.header["samples"] + 1})

        link.meddle = meddle

    finished, link = federate(config, certificates, tmp_path, lie, **key_of(certificates))
    assert list(finished.history[-1]["lost_clients"]) == ["1"]
    assert "it says that it trained on" in finished.history[-1]["lost_clients"]["1"]
    offered = [parcel for parcel in link.asked if parcel.kind == "mix/offer"]
    assert len(offered) == 4
    assert all(sum(name.startswith("hello/") for name in parcel.blocks) == 4 for parcel in offered)
    assert len(trained) == 5


def test_a_round_in_which_everybody_is_away_changes_nothing(certificates: Path, tmp_path: Path) -> None:
    config = run_of(rounds=3, clients=3, per_round=3, deadline=0.4)

    def leave(link: FakeLink) -> None:
        def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel:
            if (question.kind, question.header["round"]) == ("mix/mean", 1):
                link.away = set(link.sites)
            return answer

        link.meddle = meddle

    finished, _ = federate(config, certificates, tmp_path, leave, **key_of(certificates))
    assert [record["lost"] for record in finished.history[1:]] == [0, 0, 3]
    assert set(finished.history[-1]["lost_clients"].values()) == {"its site is not connected"}


@pytest.mark.parametrize("granularity", ["module", "tensor"])
def test_networks_with_counters(certificates: Path, tmp_path: Path, granularity: str) -> None:
    """Integers lie in a row as other numbers' bytes, where they may look like anything."""
    options = {"fedmr": {"secure": True, "granularity": granularity}}
    config = run_of(model="cnn:norm=batch", rounds=2, clients=3, per_round=3, options=options, steps=2)
    finished, _ = federate(config, certificates, tmp_path, **key_of(certificates))
    assert finished.summary["lost"] == 0
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]
