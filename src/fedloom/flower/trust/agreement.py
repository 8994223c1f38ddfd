"""Agreements: the run settings that a site's operator has read and agreed to.

The server chooses the settings of a run. With odd ones it learns more of a site's data than it should: one training
step on one batch of one sample, for example, shows that sample in the model. No rule tells odd settings from sensible
ones, but a person can. So `agreed` in the node configuration may name the accepted settings: a file that
`fedloom flower agreement` writes, or its fingerprint. Such a site refuses all other settings.
"""

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.config import Config
from fedloom.errors import InputError, unknown_name_error
from fedloom.flower.app import resolve_app_config
from fedloom.flower.message import MessageRejectedPermanently
from fedloom.flower.site_data import import_site_data_file, read_site_data_spec
from fedloom.models.initial_weights import read_initial_weights
from fedloom.utils.formatting import format_list
from fedloom.utils.settings import flatten_settings, read_settings_toml
from fedloom.utils.storage import write_atomically

AgreementSettings = Mapping[str, Any]
"""The settings of a run that a site receives, by name."""

OF_THE_MACHINE = {
    "engine", "device", "nodes", "deadline", "slots", "workers", "checkpoint_seconds", "keep_checkpoints", "cache_dir",
    "imports", "variant", "window",
}  # fmt: skip
"""Settings that may differ between sites, those that only the server reads, and the name of a variant, whose options
and settings are in the others."""
SHOWN = 3
"""Number of settings that a refusal names; it only counts the rest."""
LONGEST = 24
"""Maximum number of characters of a value in a refusal."""


def agreement_settings(config: Config) -> dict[str, Any]:
    """Return the settings that all sites of a run must share. Initial weights appear as the SHA-256 of their file."""
    settings = config.model_dump(exclude=OF_THE_MACHINE)
    if config.init is not None:
        settings["init"] = config.init_sha256 or read_initial_weights(Path(config.init)).sha256
    return settings


def agreement_settings_from_app(app_folder: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings that sites receive from the app in this folder; `overrides`: see `flwr run --run-config`."""
    found: Any = read_settings_toml(app_folder / "pyproject.toml")
    for name in ("tool", "flwr", "app", "config"):
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        raise InputError(
            f"{app_folder} is not an app that fedloom wrote: its pyproject.toml has no [tool.flwr.app.config]."
        )
    return agreement_settings(
        resolve_app_config(
            {**flatten_settings(found), **(overrides or {})},
            app_folder,
            read_site_data_spec(import_site_data_file(app_folder)),
        )
    )


def agreement_fingerprint(settings: AgreementSettings) -> str:
    """Return a fingerprint by which people can compare settings: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def format_agreement(settings: AgreementSettings) -> str:
    """Return settings as text for people and for `Agreement.read`."""
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True)
class Agreement:
    """The settings that an operator agreed to."""

    fingerprint: str
    settings: AgreementSettings | None = None
    """None if only the fingerprint is known."""

    @classmethod
    def read(cls, given: str) -> "Agreement":
        """Read the value in a node configuration: a file, or a fingerprint."""
        if is_agreement_fingerprint(given):
            return cls(given.lower())
        path = Path(given)

        # A person might read one value, and the site use the other.
        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            names = [name for name, _ in pairs]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise InputError(f"{path} names {twice} twice.")
            return dict(pairs)

        try:
            found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
        except OSError as error:
            hint = "; a fingerprint has 64 hexadecimal digits" if re.fullmatch(r"[0-9a-fA-F]+", path.name) else ""
            raise InputError(f"cannot read the agreed settings {path}: {error.strerror or error}{hint}.") from None
        except (ValueError, RecursionError):
            raise InputError(f"{path} is not JSON as `fedloom flower agreement` writes it.") from None
        _check(found, path)
        return cls(agreement_fingerprint(found), found)

    def rejection_reason(self, settings: AgreementSettings) -> str | None:
        """Return why the site refuses settings; None if they are the ones agreed on."""
        here = agreement_fingerprint(settings)
        if here == self.fingerprint:
            return None
        if self.settings is None:  # there are no settings to compare
            short = f"settings whose fingerprint begins with {self.fingerprint[:12]}"
            return f"its operator agreed to {short}, and that of this run begins with {here[:12]}"
        wanted, found = agreement_difference(self.settings, settings) or ("other settings", "these")
        return f"its operator agreed to {wanted}, and this run has {found}"


def agreement_difference(settings: AgreementSettings, other_settings: AgreementSettings) -> tuple[str, str] | None:
    """Return the settings in which two runs differ, such as `lr 0.01` and `lr 0.5`; None if in none."""
    first, second = _words(settings), _words(other_settings)
    names = [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]
    if not names:
        return None
    before, now = (format_list([_said(name, has) for name in names[:SHOWN]]) for has in (first, second))
    return before, now + (f"; {len(names) - SHOWN} more differ" if len(names) > SHOWN else "")


def check_agreement(node_config: Mapping[str, Any], folder: Path, settings: AgreementSettings) -> None:
    """Refuse settings that the site's operator did not agree to. Call it before any data are read.

    The refused settings are written to the site's folder, and logged once.
    """
    reason = Agreement.read(str(node_config["agreed"])).rejection_reason(settings) if "agreed" in node_config else None
    if reason is None:
        return
    path, content = (
        folder / f"settings-{agreement_fingerprint(settings)[:12]}.json",
        format_agreement(settings).encode(),
    )
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content)
        print(f"rejected: {reason}. All settings of that run are in {path}.", file=sys.stderr, flush=True)
    raise MessageRejectedPermanently(reason)


def is_agreement_fingerprint(text: str) -> bool:
    return re.fullmatch(r"[0-9a-fA-F]{64}", text) is not None


NAMES = {*Config.model_fields} - OF_THE_MACHINE
"""All settings that an agreement must name."""


def _check(found: Any, path: Path) -> None:
    """Refuse a file that does not name every setting, or that names anything else."""
    options = found.get("options", {}) if isinstance(found, dict) else None
    if not isinstance(options, dict) or not all(isinstance(pairs, dict) for pairs in options.values()):
        raise InputError(f"{path} is not JSON as `fedloom flower agreement` writes it.")
    for name in found:
        if name not in NAMES:
            raise InputError(f"{path}: {unknown_name_error('setting', name, NAMES)}")
    missing = sorted(NAMES - set(found))
    if missing:
        more = [f"{len(missing) - SHOWN} more"] if len(missing) > SHOWN else []
        raise InputError(f"{path} does not name {format_list([*missing[:SHOWN], *more])}; it must name every setting.")


def _words(settings: AgreementSettings) -> dict[str, str]:
    """Return each setting's value as JSON; options are named METHOD.OPTION."""
    plain = {name: value for name, value in settings.items() if name != "options"}
    return {name: json.dumps(value) for name, value in flatten_settings({**plain, **settings["options"]}).items()}


def _said(name: str, words: Mapping[str, str]) -> str:
    """Return a setting with its shortened value, such as `lr 0.01`."""
    plain = name.encode("unicode_escape").decode()  # a name from the server may break lines, and could forge log lines
    if name not in words:
        return f"no {plain}"
    value = words[name]
    return f"{plain} {value if len(value) <= LONGEST else f'{value[: LONGEST - 3]}...'}"
