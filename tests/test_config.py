"""Tests of the config: error messages, TOML and command line."""

import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedloom.config import (
    EXECUTION_SETTINGS,
    Config,
    config_to_command,
    make_config,
    parse_config_overrides,
    replace_config,
)
from fedloom.errors import FedloomError, InputError, unknown_name_error
from fedloom.utils.settings import read_settings_toml, settings_to_toml

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    TEXT,
    st.lists(st.integers(), max_size=2),
    st.dictionaries(TEXT, st.integers(), max_size=2),
)
OPTION = st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), TEXT)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True)


def attempt(values: dict[str, Any]) -> tuple[Config | None, str]:
    """The config, or the sentence with which the values are refused."""
    try:
        return make_config(values), ""
    except InputError as error:
        return None, str(error)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"rounds": 0}, "rounds must be greater than or equal to 1, not 0."),
        ({"rounds": "x"}, "rounds must be a whole number, not 'x'."),
        ({"rounds": 1.5}, "rounds must be a whole number, not 1.5."),
        ({"rounds": None}, "rounds must be a whole number, not None."),
        ({"lr": "fast"}, "lr must be a number, not 'fast'."),
        ({"lr": float("nan")}, "lr must be a finite number, not nan."),
        ({"lr": -1}, "lr must be greater than or equal to 0, not -1."),
        ({"clip": 0}, "clip must be greater than 0, not 0."),
        ({"momentum": 1.0}, "momentum must be less than 1, not 1.0."),
        ({"nesterov": "maybe"}, "nesterov must be true or false, not 'maybe'."),
        ({"optimizer": "sdg"}, "optimizer must be 'sgd' or 'adam', not 'sdg'."),
        ({"method": 3}, "method must be a valid string, not 3."),
        ({"seed": 2**63}, f"seed must be less than {2**63}, not {2**63}."),
        ({"options": {"fedprox": 3}}, "options.fedprox must be a valid dictionary, not 3."),
        ({"clients_per_round": 30}, "clients_per_round is 30, but there are only 20 clients."),
        ({"min_clients": 11}, "min_clients is 11, but only 10 clients are sampled in a round."),
        ({"nesterov": True}, "nesterov needs a momentum above 0, not 0.0."),
        (
            {"keep_optimizer": True},
            "keep_optimizer needs optimizer state: optimizer adam, or a momentum above 0, not 0.0.",
        ),
        (
            {"engine": "multiprocess", "device": "cuda"},
            "the multiprocess engine computes on the CPU, not on 'cuda'; use --engine cuda.",
        ),
        ({"options": {"\n": 0}}, r"options.'\n' must be a valid dictionary, not 0."),
        ({"imports": ["\0"]}, r"imports must be paths of Python files, not ['\x00']."),
        ({"roundz": 3}, "unknown setting 'roundz'; did you mean 'rounds'?"),
    ],
)
def test_mistakes_are_explained(values: dict[str, Any], sentence: str) -> None:
    assert attempt(values) == (None, sentence)


@given(st.sampled_from(sorted(Config.model_fields)), VALUES)
@settings(deadline=None, max_examples=200)
def test_any_value_makes_a_config_or_one_sentence(name: str, value: Any) -> None:
    config, sentence = attempt({name: value})
    if config is not None:
        assert make_config(config.model_dump()) == config
    else:
        assert sentence.endswith(".")
        assert name in sentence
        assert "\n" not in sentence


def test_unknown_names_get_the_nearest_or_all() -> None:
    assert "did you mean 'fedprox'?" in str(unknown_name_error("method", "fedporx", ["fedavg", "fedprox"]))
    assert str(unknown_name_error("thing", "zzz", ["b", "a"])) == "unknown thing 'zzz'; there are: a, b."
    assert isinstance(unknown_name_error("x", "y", []), FedloomError)
    with pytest.raises(InputError, match=r"unknown setting 'learning_rate'; there are: .*, lr, "):  # not clip_update
        make_config({"learning_rate": 0.1})


def test_a_config_cannot_be_changed_and_has_documented_fields() -> None:
    config = Config()
    with pytest.raises(ValidationError):
        config.rounds = 3  # type: ignore[misc]
    assert all(field.description for field in Config.model_fields.values())
    assert set(Config.model_fields) >= EXECUTION_SETTINGS


@pytest.mark.parametrize(
    ("clients", "clients_per_round", "cohort"), [(20, None, 10), (4, None, 4), (20, 3, 3), (5, 5, 5)]
)
def test_cohort(clients: int, clients_per_round: int | None, cohort: int) -> None:
    assert Config(clients=clients, clients_per_round=clients_per_round).cohort_size == cohort


# settings of methods


def test_settings_are_toml_and_what_is_not_is_a_string() -> None:
    pairs = ["a.x=0.1", "a.y = true", "b.x=3", "a.z=flat", 'a.q="0.1"', "b.list=[1, 2]", "b.e=1e-3", "b.none=", "a.x=2"]
    assert parse_config_overrides(pairs) == {
        "a": {"x": 2, "y": True, "z": "flat", "q": "0.1"},
        "b": {"x": 3, "list": [1, 2], "e": 1e-3, "none": ""},
    }
    assert parse_config_overrides([]) == {}
    assert parse_config_overrides(["fed-x.rule=a=b"]) == {"fed-x": {"rule": "a=b"}}


@pytest.mark.parametrize("pair", ["", "x", "x=1", ".x=1", "a.=1", "=1", "a.b", "fedprox.mu:1"])
def test_other_settings_are_refused(pair: str) -> None:
    with pytest.raises(InputError, match=r"--set takes METHOD\.OPTION=VALUE, such as fedprox\.mu=0\.1, not"):
        parse_config_overrides([pair])


# TOML


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, OPTION, max_size=3), max_size=3))
@settings(deadline=None, max_examples=50)
def test_options_survive_toml(tmp_path_factory: pytest.TempPathFactory, options: dict[str, dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("toml") / "c.toml"
    path.write_text(settings_to_toml({"options": options}), encoding="utf-8")
    assert read_settings_toml(path) == {"options": options}


def test_toml_leaves_out_what_is_none() -> None:
    assert settings_to_toml({"a": None, "b": {"c": None, "d": 1}, "e": "x"}) == 'e = "x"\n\n[b]\nd = 1\n'


@pytest.mark.parametrize("content", [b"a = ", b"\xff\xfe", b"a = 1\na = 2"])
def test_files_that_are_not_toml_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"c\.toml is not TOML"):
        read_settings_toml(path)
    with pytest.raises(InputError, match=r"cannot read .*: No such file"):
        read_settings_toml(tmp_path / "missing.toml")


# the command


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, st.one_of(OPTION, st.none()), max_size=3), max_size=2))
@settings(deadline=None, max_examples=80)
def test_the_command_sets_the_same_options(options: dict[str, dict[str, Any]]) -> None:
    words = shlex.split(config_to_command(Config(options=options)))
    pairs = [word for flag, word in pairwise(words) if flag == "--set"]
    stated = {method: {k: v for k, v in given.items() if v is not None} for method, given in options.items()}
    assert parse_config_overrides(pairs) == {method: given for method, given in stated.items() if given}


def test_the_command_names_what_is_not_a_default() -> None:
    assert config_to_command(Config()) == "fedloom run fedavg --device cpu"
    config = Config(
        method="scaffold",
        lr=0.1,
        clients_per_round=3,
        channels_last=False,
        imports=["/my file.py"],
        options={"m": {"x": 0.5}},
    )
    assert config_to_command(config) == (
        "fedloom run scaffold --lr 0.1 --clients-per-round 3 --device cpu --channels-last no --import '/my file.py' "
        "--set m.x=0.5"
    )


def test_the_cache_is_where_the_run_began_wherever_it_goes_on() -> None:
    assert make_config({"cache_dir": "cache"}).cache_dir == str(Path("cache").absolute())


@pytest.mark.parametrize("field", ["partition", "cache_dir"])
def test_no_path_has_a_zero_byte(field: str) -> None:
    with pytest.raises(InputError, match=f"{field} must be without a zero byte"):
        make_config({field: "file:a\0b"})


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    ("engine", "without", "with_one"),
    [
        ("auto", "cpu", "cuda"),
        ("cuda", "cuda", "cuda"),
        ("sequential", "cpu", "cpu"),
        ("multiprocess", "cpu", "cpu"),
        ("flower", "cpu", "cpu"),
    ],
)
def test_a_gpu_is_taken_where_there_is_one_and_the_engine_may_use_it(
    engine: str, without: str, with_one: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    expected = with_one if there else without
    for said in ({}, {"device": "auto"}):
        config = make_config({"engine": engine, **said})
        assert config.device == expected
        assert f"--device {expected}" in config_to_command(config)  # elsewhere it would be another one
    for device in ("cpu", "cuda:1"):
        assert make_config({"device": device}).device == device


def test_what_was_found_stays_when_other_settings_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = make_config({})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert replace_config(config, rounds=3).device == "cpu"
