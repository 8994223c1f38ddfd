"""Rounds of the Flower engine with models that the server cannot open."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_runs import SECURE, federate, nodes, on_host, pieces, recorded, run_of
from fake import FakeLink, make_sites, reach

from fedloom.api import Silent, Stopped, execute, resume
from fedloom.engines.flower import FlowerEngine
from fedloom.errors import FedloomError
from fedloom.experiment import build
from fedloom.flower.parcel import Block, Parcel
from fedloom.flower.sealed import Opener, Session
from fedloom.flower.site import Site
from fedloom.flower.vault import Vault
from fedloom.request import replace_config


def key_of(certificates: Path) -> dict[str, str]:
    return {"models-key": str(certificates / "models.key")}


@pytest.mark.parametrize(
    "options",
    [
        {"secure": True},
        {"secure": True, "mixed": True, "granularity": "tensor", "send_probability": 0.9},
        {"secure": True, "granularity": "segment:0.5", "first_stage": 1},
    ],
)
def test_the_result_has_the_bits_of_the_host(certificates: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    config = run_of(options={"fedmr": options})
    finished, link = federate(config, certificates, tmp_path, **key_of(certificates))
    assert finished.summary["lost"] == 0
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]
    first = options.get("first_stage", 0)
    trained = [parcel for parcel in link.asked if parcel.kind == "mix/train"]
    assert [("row" in parcel.blocks, "model" in parcel.blocks) for parcel in trained[:5]] == [(True, False)] * 5
    assert [("row" in parcel.blocks, "model" in parcel.blocks) for parcel in trained[5:]] == (
        [(False, True)] * 5 * (2 - first)
    )


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

    class Two(Silent):
        rounds = 0

        def record(self, record: Any) -> None:
            self.rounds = record["round"]

        def wants_stop(self) -> bool:
            return self.rounds == 2

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
    assert sent[2, lost].header["sealed_round"] == 0
    assert {sent[2, slot].header["sealed_round"] for slot in range(4) if slot != lost} == {1}


def test_a_site_that_is_gone_when_means_are_computed_is_not_missed(certificates: Path, tmp_path: Path) -> None:
    config = run_of(rounds=2, deadline=0.4)

    def silent(link: FakeLink) -> None:
        link.meddle = lambda node, question, answer: (
            None if question.kind == "mix/mean" and node in (100, 103) else answer
        )

    finished, _ = federate(config, certificates, tmp_path, silent, **key_of(certificates))
    assert finished.summary["lost"] == 0
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]


def test_a_mean_that_is_not_finite_is_not_taken(certificates: Path, tmp_path: Path) -> None:
    config = run_of(rounds=1, min_clients=0)

    def spoil(link: FakeLink) -> None:
        def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel:
            if answer.kind != "mix/mean":
                return answer
            nan = torch.full((1,), float("nan")).numpy().tobytes()
            blocks = {name: Block.raw(nan + bytes(block.data)[4:]) for name, block in answer.blocks.items()}
            return Parcel(answer.kind, answer.header, blocks)

        link.meddle = meddle

    finished, _ = federate(config, certificates, tmp_path, spoil, **key_of(certificates))
    assert finished.history[-1]["lost"] == 5
    assert "not finite" in finished.history[-1]["lost_clients"]["0"]


# Who has which key


def fails(config: Any, tmp_path: Path, configured: list[dict[str, Any]]) -> str:
    link, out = FakeLink(make_sites(config, tmp_path, configured)), tmp_path / "run"
    with pytest.raises(FedloomError) as error:
        execute(config, out=out, sites=reach(link, config, out))
    assert not any(parcel.kind == "mix/train" for parcel in link.asked)
    return str(error.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([1, 1, None], "client 2 has no models key, but client 0 has one; all sites must have the same"),
        ([None, 1, 1], "client 1 has a models key, but client 0 has none; all sites must have the same"),
        ([1, 2, 1], "client 1 has a models key, but client 0 has another one; all sites must have the same"),
    ],
)
def test_all_sites_have_the_same_key_or_none(
    certificates: Path, tmp_path: Path, keys: list[int | None], words: str
) -> None:
    (tmp_path / "2").write_bytes(Opener().private_bytes())
    paths = {1: str(certificates / "models.key"), 2: str(tmp_path / "2")}
    configured = [
        {**node, **({"models-key": paths[key]} if key else {})}
        for node, key in zip(nodes(certificates, 3), keys, strict=True)
    ]
    assert words in fails(run_of(clients=3, per_round=3), tmp_path, configured)


def test_a_key_that_cannot_be_read_is_named(certificates: Path, tmp_path: Path) -> None:
    configured = nodes(certificates, 3, **{"models-key": str(tmp_path / "nowhere")})
    words = fails(run_of(clients=3, per_round=3), tmp_path, configured)
    assert "client 0 cannot take part in the secure exchange" in words
    assert "cannot read the models key" in words


def test_a_refiner_cannot_work_on_models_that_are_sealed(certificates: Path, tmp_path: Path) -> None:
    configured = nodes(certificates, 3, **key_of(certificates))
    config = run_of(method="fedmr+dynafed", clients=3, per_round=3)
    words = fails(config, tmp_path, configured)
    assert "the server refines models one by one, which it cannot where sites seal them for each other" in words


@pytest.fixture
def asked(certificates: Path, tmp_path: Path) -> tuple[Site, Parcel]:
    """A site that has played two rounds, and what it was asked first in the second."""
    config = run_of(clients=3, per_round=3, rounds=2)
    _, link = federate(config, certificates, tmp_path, **key_of(certificates))
    question = next(
        parcel
        for parcel in link.asked
        if (parcel.kind, parcel.header["client"], parcel.header["round"]) == ("mix/train", 0, 1)
    )
    return link.sites[100], question


def block(change: Callable[[bytes], bytes]) -> Callable[[Parcel], Parcel]:
    def changed(question: Parcel) -> Parcel:
        sealed = Block.raw(change(bytes(question.blocks["model"].data)))
        return replace(question, blocks={**question.blocks, "model": sealed})

    return changed


def header(**values: Any) -> Callable[[Parcel], Parcel]:
    return lambda question: replace(question, header={**question.header, **values})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (block(lambda sealed: sealed[:-1]), "the model in the question has"),
        (block(lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1])), "is not sealed for this key, this round"),
        (header(sealed_round=1), "layer 0 is not sealed for this key, this round and this place"),
        (header(sealed_attempt=1), "layer 0 is not sealed for this key, this round and this place"),
        (header(sealed_round=None), "the question does not say when its model was sealed"),
        (header(sealed_attempt="0"), "the question does not say when its model was sealed"),
        (
            lambda question: replace(question, blocks={**question.blocks, "opener": Block.raw(Opener().public)}),
            "it seals its layers for the sites' models key, and was asked to do so for another",
        ),
        (
            lambda question: replace(
                question, blocks={name: one for name, one in question.blocks.items() if name != "model"}
            ),
            "there is no model in the question",
        ),
    ],
)
def test_questions_that_are_not_right(
    asked: tuple[Site, Parcel], change: Callable[[Parcel], Parcel], words: str
) -> None:
    site, question = asked
    later = replace(question, header={**question.header, "round": 6})  # it has committed itself in the rounds before
    answer = site.answer(change(later))
    assert answer.kind == "failed"
    assert words in answer.header["reason"]
    again = replace(question, header={**question.header, "round": 6})
    assert site.answer(again).kind == "mix/hello", "and then the right one"


def other_row(question: Parcel, certificates: Path, tmp_path: Path, away: float) -> Parcel:
    """A question with the initial model, moved by so much, in place of a sealed one."""
    (tmp_path / "third").mkdir()
    site = make_sites(run_of(clients=3, per_round=3), tmp_path / "third", nodes(certificates, 3))[100]
    site.build()
    row = site.initial.clone()
    row[: site.layout.trainable] += away
    blocks = {name: one for name, one in question.blocks.items() if name != "model"}
    return replace(question, blocks={**blocks, "row": site.travel.pack(row)})


@pytest.mark.parametrize(("away", "kind"), [(0.0, "mix/hello"), (1e-7, "mix/hello"), (0.01, "failed")])
def test_a_site_trains_no_model_of_the_server_s_own_making(
    asked: tuple[Site, Parcel], certificates: Path, tmp_path: Path, away: float, kind: str
) -> None:
    """Or the server might send all others a model that nobody learns anything from, and have the mean to itself."""
    site, question = asked
    changed = other_row(question, certificates, tmp_path, away)
    later = replace(changed, header={**changed.header, "round": 7})
    answer = site.answer(later)
    assert answer.kind == kind
    if kind == "failed":
        words = "the model in the question is neither sealed nor the one that this run begins with"
        assert words in answer.header["reason"]


def test_after_rounds_in_the_open_it_takes_what_the_server_has_made(certificates: Path, tmp_path: Path) -> None:
    config = run_of(clients=3, per_round=3, rounds=2, options={"fedmr": {"secure": True, "first_stage": 1}})
    finished, _ = federate(config, certificates, tmp_path, **key_of(certificates))
    assert finished.summary["lost"] == 0


# A server that is started again


def test_a_server_that_dies_after_its_sites_have_committed_gets_what_it_had(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody trains anew, and the run has the bits that it would have had."""
    config, out = run_of(rounds=3), tmp_path / "run"
    link = FakeLink(make_sites(config, tmp_path, nodes(certificates, 5, **key_of(certificates))))

    def die(node: int, question: Parcel, answer: Parcel) -> Parcel:
        if (question.kind, question.header["round"]) == ("mix/mean", 1):
            raise KeyboardInterrupt
        return answer

    link.meddle = die
    with pytest.raises(KeyboardInterrupt):
        execute(config, out=out, sites=reach(link, config, out))
    link.meddle, trained = None, recorded(monkeypatch)
    finished = resume(out, sites=reach(link, config, out))
    assert finished.summary["lost"] == 0
    assert sorted({round for round, _, _ in trained}) == [2]
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]


def test_a_client_commits_itself_once_in_a_round(asked: tuple[Site, Parcel]) -> None:
    site, question = asked
    first = site.answer(question)
    assert first.kind == "mix/hello"
    assert site.answer(replace(question, header={**question.header, "nonce": "0" * 32})).blocks == first.blocks
    elsewhere = (question.header["slot"] + 1) % 3
    for change in ({"slot": elsewhere}, {"sealed_round": 0, "sealed_attempt": 1}, {"accepted": "1" * 32}):
        answer = site.answer(replace(question, header={**question.header, **change}))
        assert "it has committed itself in round 2, and does so once" in answer.header["reason"]
    # Not even after it was asked about other rounds, of which it remembers the last alone.
    later = replace(question, header={**question.header, "round": 5})
    assert site.answer(later).kind == "mix/hello"
    for round in (0, 1):
        answer = site.answer(replace(question, header={**question.header, "round": round}))
        assert f"it has committed itself in round {round + 1}, and does so once" in answer.header["reason"]


def test_a_site_without_the_key_says_so(asked: tuple[Site, Parcel], certificates: Path, tmp_path: Path) -> None:
    _, question = asked
    config = run_of(clients=3, per_round=3, rounds=2)
    (tmp_path / "other").mkdir()
    site = make_sites(config, tmp_path / "other", nodes(certificates, 3))[100]
    answer = site.answer(question)
    assert "the model in the question is sealed, and this site has no models key" in answer.header["reason"]


# The vault

SESSION = Session("ab" * 16, 2, 1)


def row(number: float) -> Block:
    return Block.raw(torch.full((3,), number).numpy().tobytes())


def test_what_a_round_brings_counts_when_it_is_accepted() -> None:
    vault = Vault()
    vault.begin("aa")
    vault.bring(0, b"first", SESSION, row(1))
    assert vault.find(0, row(0)) is None
    vault.accept(0)
    vault.accept(1)
    found = vault.find(0, row(1))
    assert found is not None
    assert (found.content, found.session) == (b"first", SESSION)
    assert vault.find(1, row(1)) is None
    vault.begin("aa")
    vault.bring(0, b"second", SESSION, row(2))
    vault.begin("aa")
    vault.accept(0)
    assert vault.find(0, row(1)) == found, "what was not accepted in its round never is"


def test_a_model_that_was_changed_while_nobody_could_open_it_is_an_error() -> None:
    vault = Vault()
    vault.begin("aa")
    vault.bring(3, b"first", SESSION, row(1))
    vault.accept(3)
    with pytest.raises(FedloomError, match="the model of slot 3 was changed, but it is sealed"):
        vault.find(3, row(1.5))


def test_a_vault_says_again_what_it_held() -> None:
    vault, other = Vault(), Vault()
    vault.begin("aa")
    for slot in (0, 11):
        vault.bring(slot, bytes([slot] * 5), SESSION, row(slot))
        vault.accept(slot)
    other.load(vault.state())
    for slot in (0, 11):
        assert other.find(slot, row(slot)) == vault.find(slot, row(slot)) is not None
    state = vault.state()
    tensors = [model.pop("content") for model in state["models"].values()]
    assert all(tensor.dtype is torch.uint8 for tensor in tensors)
    assert json.loads(json.dumps(state)) == state
    with pytest.raises(FedloomError, match="sealed for a key that its sites no longer have"):
        other.begin("")
