"""Tests of agreements: an operator sees what sites get, and changes are rejected."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fedloom.config import Config, replace_config
from fedloom.errors import InputError
from fedloom.flower import commands
from fedloom.flower.app import make_app_run_config, resolve_app_config, write_app
from fedloom.flower.site.handlers import SiteHandler
from fedloom.flower.trust.agreement import (
    NAMES,
    OF_THE_MACHINE,
    Agreement,
    agreement_fingerprint,
    agreement_settings,
    agreement_settings_from_app,
    format_agreement,
)
from fedloom.utils.settings import settings_to_toml
from fedloom.utils.storage import write_safetensors
from tests.support.fake_transport import flat, make_run
from tests.support.flower_apps import OWN, written

MR = {"method": "fedmr", "options": {"fedmr": {"secure": True, "mixed": True}}}


def told(**settings: Any) -> dict[str, Any]:
    return agreement_settings(make_run(**settings))


def agreed_to(folder: Path, settings: dict[str, Any]) -> Agreement:
    (folder / "agreed.json").write_text(format_agreement(settings))
    return Agreement.read(str(folder / "agreed.json"))


def test_what_is_agreed_to_is_not_refused(tmp_path: Path) -> None:
    assert agreed_to(tmp_path, told(**MR)).rejection_reason(told(**MR)) is None
    assert Agreement.read(agreement_fingerprint(told(**MR))).rejection_reason(told(**MR)) is None


def test_every_setting_is_part_of_it_but_those_of_the_machine() -> None:
    assert told().keys() == NAMES == Config.model_fields.keys() - OF_THE_MACHINE
    assert told(deadline=5.0, workers=3, engine="sequential") == told()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": 0.5}, "its operator agreed to lr 0.05, and this run has lr 0.5"),
        ({"clip": 1.5}, "its operator agreed to clip null, and this run has clip 1.5"),
        ({"augment": "flip"}, 'its operator agreed to augment "none", and this run has augment "flip"'),
        (
            {"lr": 0.5, "seed": 7},
            "its operator agreed to lr 0.05 and seed 0, and this run has lr 0.5 and seed 7",
        ),
        (
            {"lr": 0.5, "seed": 7, "momentum": 0.9, "weight_decay": 1.0},
            "its operator agreed to lr 0.05, momentum 0.0 and seed 0, "
            "and this run has lr 0.5, momentum 0.9 and seed 7; 1 more differ",
        ),
        (
            {"options": {"fedmr": {"secure": False, "by": "tensor"}}},
            "its operator agreed to no fedmr.by, fedmr.mixed true and fedmr.secure true, and this run has "
            'fedmr.by "tensor", no fedmr.mixed and fedmr.secure false',
        ),
        (
            {"data": "folder:/" + "x" * 100},
            'its operator agreed to data "digits", and this run has data "folder:/xxxxxxxxxxxx...',
        ),
    ],
)
def test_the_refusal_names_what_differs(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    assert agreed_to(tmp_path, told(**MR)).rejection_reason(told(**{**MR, **settings})) == words


def test_of_a_fingerprint_the_refusal_knows_no_more() -> None:
    before, now = told(), told(lr=0.5)
    words = f"begins with {agreement_fingerprint(before)[:12]}, and that of this run begins with "
    words += agreement_fingerprint(now)[:12]
    for hashed in (agreement_fingerprint(before), agreement_fingerprint(before).upper()):
        assert str(Agreement.read(hashed).rejection_reason(now)).endswith(words)
        assert Agreement.read(hashed).rejection_reason(before) is None


def test_half_a_fingerprint_is_taken_for_a_file_but_not_without_a_word() -> None:
    with pytest.raises(InputError, match=r"No such file or directory; a fingerprint has 64 hexadecimal digits\."):
        Agreement.read(agreement_fingerprint(told())[:40])


def test_what_a_server_calls_a_setting_does_not_break_lines(tmp_path: Path) -> None:
    run = {**told(), "options": {"fedmr": {"a\nINFO: {} all is well": "b\nc"}}}
    refusal = agreed_to(tmp_path, told()).rejection_reason(run)
    assert refusal is not None
    assert "\n" not in refusal
    assert r"fedmr.a\nINFO" in refusal


options = st.dictionaries(
    st.text(max_size=5), st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.none(), max_size=3
)


@given(options, options)
def test_other_options_are_always_noticed_and_the_same_never(
    tmp_path_factory: pytest.TempPathFactory, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """1, 1.0 and true are different settings, though Python finds them equal."""
    one, other = ({**told(), "options": {"fedmr": each}} for each in (first, second))
    agreed = agreed_to(tmp_path_factory.getbasetemp(), one)
    assert agreed.rejection_reason(json.loads(format_agreement(one))) is None
    assume(json.dumps(first, sort_keys=True) != json.dumps(second, sort_keys=True))
    refusal = agreed.rejection_reason(other)
    assert refusal is not None
    assert refusal.startswith("its operator agreed to ")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read the agreed settings .*agreed.json: No such file"),
        ("lr = 0.05", "agreed.json is not JSON as `fedloom flower agreement` writes it"),
        ("[]", "agreed.json is not JSON as `fedloom flower agreement` writes it"),
        (b"\xff\xfe", "agreed.json is not JSON as `fedloom flower agreement` writes it"),
        ("[" * 100_000, "agreed.json is not JSON as `fedloom flower agreement` writes it"),
        ('{"options": {"fedmr": 3}}', "agreed.json is not JSON as `fedloom flower agreement` writes it"),
        ('{"lr": 0.05, "momentun": 0.9}', "agreed.json: unknown setting 'momentun'; did you mean 'momentum'"),
        ('{"lr": 0.05, "deadline": 3}', "agreed.json: unknown setting 'deadline'"),
        ('{"lr": 0.05, "seed": 0, "lr": 0.5}', "agreed.json names lr twice"),
        (
            json.dumps(dict.fromkeys(NAMES - {"lr", "seed"}, 0) | {"options": {}}),
            r"agreed.json does not name lr and seed; it must name every setting\.",
        ),
        ('{"options": {}}', r"does not name augment, batch_size, channels_last and \d+ more; it must"),
    ],
)
def test_a_file_that_is_no_agreement_is_refused(tmp_path: Path, content: str | bytes | None, says: str) -> None:
    path = tmp_path / "agreed.json"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    for read in (Agreement.read, lambda text: commands.build_supernode_command("localhost:8000", {"agreed": text})):
        with pytest.raises(InputError, match=says):
            read(str(path))


def test_a_supernode_is_told_what_was_agreed(tmp_path: Path) -> None:
    agreed_to(tmp_path, told())
    assert (
        f'agreed="{tmp_path}/agreed.json"'
        in commands.build_supernode_command("localhost:1", {"agreed": f"{tmp_path}/agreed.json"})[-1]
    )


@pytest.mark.parametrize("how", [{}, MR, {"method": "feddf", "options": {"feddf": {"steps": 3}}}, {"client_test": 0.2}])
def test_the_command_shows_what_a_site_is_told(
    how: dict[str, Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    write_app(tmp_path / "app", make_run(**how), {"folder": "/somewhere"})
    said = command("flower", "agreement", "app")
    assert said.code == 0
    site = SiteHandler(written(tmp_path / "app"), {"client": 0}, tmp_path / "app", tmp_path / "site")
    site.build()
    assert said.out == format_agreement(site.settings)
    assert said.err.strip() == f"fingerprint {agreement_fingerprint(site.settings)}"
    # What the site trains by says the same, with nothing filled in on the way.
    assert agreement_fingerprint(agreement_settings(site.config)) == agreement_fingerprint(site.settings)


def test_data_of_the_sites_own_are_not_needed_for_it(command: Callable[..., Any], tmp_path: Path) -> None:
    write_app(tmp_path / "app", make_run(partition="own"))
    (tmp_path / "app" / "site_data.py").write_text(OWN)
    assert command("flower", "agreement", "app", "--out", "agreed.json").code == 0
    site = SiteHandler(written(tmp_path / "app"), {"client": 0, "data": "1"}, tmp_path / "app", tmp_path / "site")
    site.build()
    assert Agreement.read(str(tmp_path / "agreed.json")).rejection_reason(site.settings) is None
    assert site.settings["data"] == "flowers"


def test_of_a_file_to_begin_with_the_content_counts_and_not_the_place(tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", 0.0), ("c", 1.0)):
        write_safetensors(tmp_path / name, {"x": torch.full((2,), value)})
    one, same, other = (told(init=str(tmp_path / name)) for name in "abc")
    assert one == same
    assert str(agreed_to(tmp_path, one).rejection_reason(other)).startswith('its operator agreed to init "')


def test_files_whose_checksum_the_app_tells_need_not_be_there(tmp_path: Path) -> None:
    config = make_run(
        init="/nowhere/model", init_sha256="ab" * 32, partition="file:/nowhere/parts", partition_sha256="cd" * 32
    )
    found = agreement_settings(resolve_app_config(flat(make_app_run_config(config, [])), tmp_path, None))
    assert found["init"] == "ab" * 32
    assert found["partition_sha256"] == "cd" * 32


def test_a_partition_of_which_no_checksum_is_told_is_read(tmp_path: Path) -> None:
    (tmp_path / "parts").write_bytes(np.arange(3).tobytes())
    given_ = flat(make_app_run_config(make_run(partition=f"file:{tmp_path}/parts"), []))
    assert agreement_settings(resolve_app_config(given_, tmp_path, None))["partition_sha256"]


def test_a_run_must_say_how_many_clients_there_are(tmp_path: Path) -> None:
    config = flat(
        make_app_run_config(replace_config(make_run(partition="natural"), clients=None, clients_per_round=None), [])
    )
    with pytest.raises(InputError, match="a run over sites must say how many clients there are"):
        resolve_app_config(config, tmp_path, None)


def test_the_command_writes_a_file_once(command: Callable[..., Any], tmp_path: Path) -> None:
    write_app(tmp_path / "app", make_run())
    said = command("flower", "agreement", "app", "--out", "agreed.json")
    assert said.code == 0
    assert agreement_fingerprint(told()) in said.out
    assert Agreement.read(str(tmp_path / "agreed.json")).rejection_reason(told()) is None
    again = command("flower", "agreement", "app", "--out", "agreed.json")
    assert again.code == 2
    assert "agreed.json exists already; --force replaces it" in again.err
    folder = command("flower", "agreement", "app", "--out", ".", "--force")
    assert folder.code == 2
    assert folder.err.splitlines()[-1] == "fedloom: . is a folder; --out takes a file to write."
    assert command("flower", "agreement", "app", "--out", "agreed.json", "--force").code == 0


def test_the_command_takes_what_flwr_run_is_given(command: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    write_app(tmp_path / "app", make_run(**MR))
    said = command("flower", "agreement", "app", "--run-config", 'seed=3 options.fedmr.mixed=false folder="/x"')
    assert json.loads(said.out) == told(method="fedmr", options={"fedmr": {"secure": True, "mixed": False}}, seed=3)
    for wrong in ("seed", "seed=[", "a.toml", "ruonds=3"):
        said = command("flower", "agreement", "app", "--run-config", wrong)
        assert said.code == 2
        assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("project", "says"),
    [
        (None, "cannot read app/pyproject.toml"),
        ({"project": {"name": "x"}}, "app is not an app that fedloom wrote"),
        ({"tool": {"flwr": {"app": {"config": {"ruonds": 3}}}}}, "unknown setting 'ruonds'"),
        ({"tool": {"flwr": {"app": {"config": {"method": "fedavgg"}}}}}, "unknown method 'fedavgg'"),
    ],
)
def test_what_is_no_app_is_said(
    project: dict[str, Any] | None, says: str, command: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "app").mkdir()
    if project is not None:
        (tmp_path / "app" / "pyproject.toml").write_text(settings_to_toml(project))
    said = command("flower", "agreement", "app", "--out", "agreed.json")
    assert said.code == 2
    assert says in said.err
    assert not (tmp_path / "agreed.json").exists()


def test_the_readme_of_an_app_names_the_agreement(tmp_path: Path) -> None:
    write_app(tmp_path / "app", make_run())
    said = (tmp_path / "app" / "README.md").read_text()
    assert "fedloom flower agreement app --out agreed.json" in said
    assert "--agreed agreed.json" in said
    assert agreement_settings_from_app(tmp_path / "app") == told()
