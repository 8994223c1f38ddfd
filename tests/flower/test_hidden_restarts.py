"""Servers and sites that are started again, and what a models key may be used for twice: nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from exchange_runs import SECURE, federate, key_of, nodes, on_host, recorded, run_of
from fake import FakeLink, make_sites, reach

from fedloom.api import execute, resume
from fedloom.config import Config
from fedloom.flower.diary import Diary
from fedloom.flower.inventory import VOUCHER
from fedloom.flower.parcel import Block, Parcel
from fedloom.flower.relay_site import _known_as, _served, _who
from fedloom.flower.sealed import ModelsKey
from fedloom.flower.site import Site

BACKWARDS = "round 1 cannot begin with models of round 1"


def dead_after_commit(config: Config, certificates: Path, tmp_path: Path) -> FakeLink:
    """Sites of a run whose server died in its second round, when all had committed themselves."""
    link, out = FakeLink(make_sites(config, tmp_path, nodes(certificates, 5, **key_of(certificates)))), tmp_path / "run"

    def die(node: int, question: Parcel, answer: Parcel) -> Parcel:
        if (question.kind, question.header["round"]) == ("mix/mean", 1):
            raise KeyboardInterrupt
        return answer

    link.meddle = die
    with pytest.raises(KeyboardInterrupt):
        execute(config, out=out, sites=reach(link, config, out))
    link.meddle = None
    return link


def test_a_server_that_dies_after_its_sites_have_committed_gets_what_it_had(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody trains anew, and the run has the bits that it would have had."""
    config = run_of(rounds=3)
    link, trained = dead_after_commit(config, certificates, tmp_path), recorded(monkeypatch)
    finished = resume(tmp_path / "run", sites=reach(link, config, tmp_path / "run"))
    assert finished.summary["lost"] == 0
    assert sorted({round for round, _, _ in trained}) == [2]
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]


def test_what_a_client_wants_to_keep_is_ready_for_the_server_that_comes_back(
    certificates: Path, tmp_path: Path
) -> None:
    """It is kept under the name of the last question, which is not that of the first."""
    config = run_of(method="fedmr+fedrep", rounds=3, options={**SECURE, "fedrep": {"head_epochs": 1}})
    link = dead_after_commit(config, certificates, tmp_path)
    finished = resume(tmp_path / "run", sites=reach(link, config, tmp_path / "run"))
    assert [record["lost_clients"] for record in finished.history if record["round"]] == [{}, {}, {}]


def test_nor_does_it_train_another_model_in_place_of_that(asked: tuple[Site, Parcel]) -> None:
    site, question = asked
    model = bytes(question.blocks["model"].data)
    other = replace(question, blocks={**question.blocks, "model": Block.raw(model[::-1])})
    assert "and trains for a round but once" in site.answer(other).header["reason"]
    assert site.answer(question).kind == "mix/hello"


def test_a_client_commits_itself_once_in_a_round(asked: tuple[Site, Parcel], fresh: tuple[Site, Parcel]) -> None:
    site, question = asked
    first = site.answer(question)
    assert first.kind == "mix/hello"
    assert site.answer(replace(question, header={**question.header, "nonce": "0" * 32})).blocks == first.blocks
    elsewhere = (question.header["slot"] + 1) % 3
    for change in ({"slot": elsewhere}, {"accepted": "1" * 32}):
        answer = site.answer(replace(question, header={**question.header, **change}))
        assert "and trains for a round but once" in answer.header["reason"]
    # Not even after it was asked about other rounds, of which it remembers the last alone.
    assert site.answer(fresh[1]).kind == "mix/hello"
    for round, reason in ((0, BACKWARDS), (1, "and trains for a round but once")):
        answer = site.answer(replace(question, header={**question.header, "round": round}))
        assert reason in answer.header["reason"]


def test_a_models_key_serves_one_run_even_when_the_site_is_started_again(
    asked: tuple[Site, Parcel], certificates: Path, tmp_path: Path
) -> None:
    """A server could call the same round another run's, with one client less, and subtract the two means."""
    site, question = asked
    again = Site(site.given, site.node, site.app, site.folder)
    for one in (site, again):
        answer = one.answer(replace(question, header={**question.header, "run": "ef" * 16}))
        assert (
            "its models key has served another run, or this one with other settings, as models-key-"
            in answer.header["reason"]
        )
    for round, reason in ((0, BACKWARDS), (1, "and trains for a round but once")):
        answer = again.answer(replace(question, header={**question.header, "round": round}))
        assert reason in answer.header["reason"]
    answer = site.answer(replace(question, header={**question.header, "round": 9}))
    assert "this run has 9 rounds, and no round 10" in answer.header["reason"]


def test_rounds_are_not_played_backwards(fresh: tuple[Site, Parcel]) -> None:
    """Late in a run models may hardly change: a server that has had them copied there could have them trained again."""
    site, question = fresh
    models = json.loads(bytes(question.blocks["inventory"].data)[VOUCHER:])["models"]
    newest = max(round for round, *_ in models.values())
    answer = site.answer(replace(question, header={**question.header, "round": newest}))
    assert answer.header["reason"] == f"round {newest + 1} cannot begin with models of round {newest + 1}"
    assert site.answer(question).kind == "mix/hello"


@pytest.mark.parametrize("sealed", [False, True])
def test_what_comes_to_nothing_leaves_a_client_as_it_was(certificates: Path, tmp_path: Path, sealed: bool) -> None:
    """A server could have it train a thousand times before anybody commits, until it has nothing to learn any more."""
    options = {**SECURE, "fedrep": {"head_epochs": 1}}
    config = run_of(method="fedmr+fedrep", clients=3, per_round=3, rounds=1, options=options)
    staged: list[tuple[str, bool]] = []

    def look(link: FakeLink) -> None:
        def watch(node: int, question: Parcel, answer: Parcel) -> Parcel:
            if question.kind.startswith("mix/"):
                staged.append((question.kind, any(link.sites[node].kept(question).folder.glob("*.safetensors"))))
            return answer

        link.meddle = watch

    finished, _ = federate(config, certificates, tmp_path, look, **(key_of(certificates) if sealed else {}))
    assert finished.summary["lost"] == 0
    before = {"mix/train", "mix/hello", "mix/offer", "mix/answer", "mix/lock"}
    assert {kind for kind, there in staged if not there} & before == {kind for kind, _ in staged} & before
    assert all(not there for kind, there in staged if kind in before)
    assert all(there for kind, there in staged if kind in ("mix/release", "mix/mean"))
    assert any(kind == "mix/release" for kind, _ in staged)


def test_one_who_trains_under_two_numbers_commits_itself_under_one(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both might have trained before either commits; then the other is there first."""
    config = run_of(clients=3, per_round=3, rounds=1)
    key, answer = ModelsKey.read(certificates / "models.key"), Site.answer

    def other_first(site: Site, question: Parcel) -> Parcel:
        if question.kind == "mix/commit" and question.header["client"] == 0:
            diary, run = Diary(site.folder, key.public), _served(site, question, key)
            if not diary.is_over(run, "0", 0):
                diary.commit(run, "0", 0, "another")
        return answer(site, question)

    monkeypatch.setattr(Site, "answer", other_first)
    finished, link = federate(config, certificates, tmp_path, **key_of(certificates))
    assert "and trains for a round but once" in finished.history[-1]["lost_clients"]["0"]
    said = [p for p in link.answered if p.kind == "mix/commit" and p.header["client"] == 0]
    assert not said, "its key stays with it"


def test_a_number_that_the_server_gives_does_not_make_a_site_another_one(certificates: Path, tmp_path: Path) -> None:
    config = run_of(clients=3, per_round=3, rounds=3)
    configured = nodes(certificates, 3, **key_of(certificates))
    del configured[0]["client"]
    site = make_sites(config, tmp_path, configured)[100]
    for number in (0, 1):
        header = {"run": "ab" * 16, "round": 1, "client": -1, "nonce": "cd" * 16, "assigned": number}
        assert site.answer(Parcel("hello", header)).kind == "hello"
        header = {"run": "ab" * 16, "round": 1, "client": number, "nonce": "cd" * 16, "slot": 0, "attempt": 0}
        opener = Block.raw(_known_as(site, ModelsKey.read(certificates / "models.key")))
        question = Parcel("mix/train", header, {"row": site.travel.pack(site.initial), "opener": opener})
        answer = site.answer(question)
        if number:
            assert "it has committed itself in round 2" in answer.header["reason"]
        else:
            assert answer.kind == "mix/hello"
            key = ModelsKey.read(certificates / "models.key")
            run = _served(site, question, key)
            Diary(site.folder, key.public).commit(run, _who(site, question), 1, "initial")


def test_settings_do_not_change_while_a_run_goes_on(asked: tuple[Site, Parcel], fresh: tuple[Site, Parcel]) -> None:
    """With a rate of nothing from some round on, means would be those of the models that were sealed before."""
    (site, _), (_, question) = asked, fresh
    assert site.answer(question).kind == "mix/hello"
    given = {**site.given, "lr": 1e-30}
    changed = Site(given, site.node, site.app, site.folder)
    header = {**question.header, "nonce": "1" * 32}
    changed.build()
    assert changed.config.lr == 1e-30
    opener = Block.raw(_known_as(changed, ModelsKey.read(Path(str(site.node["models-key"])))))
    answer = changed.answer(replace(question, header=header, blocks={**question.blocks, "opener": opener}))
    assert "or this one with other settings" in answer.header["reason"]


def test_a_site_that_cannot_write_down_its_commitment_hands_out_no_key(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, written = run_of(clients=3, per_round=3, rounds=1), Diary.commit

    def full(diary: Diary, run: str, client: str, round: int, start: str) -> None:
        if client == "0":
            raise OSError(28, "No space left on device")
        written(diary, run, client, round, start)

    monkeypatch.setattr(Diary, "commit", full)
    finished, link = federate(config, certificates, tmp_path, **key_of(certificates))
    assert finished.history[-1]["lost"] == 3
    assert not [parcel for parcel in link.answered if parcel.kind in ("mix/release", "mix/mean")]
    site = link.sites[100]
    commit = next(p for p in link.asked if p.kind == "mix/commit" and p.header["client"] == 0)
    for kind in ("mix/release", "mix/mean"):
        answer = site.answer(replace(commit, kind=kind))
        assert "it has not written down that it has committed itself" in answer.header["reason"]
