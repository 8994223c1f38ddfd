"""The settings that a site serves, in a form that its operator can read and agree to beforehand.

The server chooses a run's settings, and with odd ones it learns more of a site's data than it should: one batch of one
sample trained in one step, say, shows in the model. No rule tells odd settings from sensible ones, but a person can. So
a node's configuration may say which settings its operator agreed to, `agreed`: a file as `fedloom flower agreement`
writes it, or its fingerprint. Such a site serves no others, whatever is asked of it.
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
from fedloom.utils.settings import flatten_settings, read_settings_toml
from fedloom.utils.storage import write_atomically

Told = Mapping[str, Any]
"""What a site is told of a run, by the names of its settings."""

OF_THE_MACHINE = {
    "engine", "device", "nodes", "deadline", "slots", "workers", "checkpoint_seconds", "keep_checkpoints", "cache_dir",
    "imports",
}  # fmt: skip
"""Settings that may differ between sites."""
SHOWN = 3
"""How many settings a refusal names before it says how many more there are."""
LONGEST = 24
"""Characters of a value in a refusal."""


def agreement_settings(config: Config) -> dict[str, Any]:
    """The settings of a run that all sites must have in common; of a file to begin with, what is in it."""
    told = config.model_dump(exclude=OF_THE_MACHINE)
    if config.init is not None:
        told["init"] = config.init_sha256 or read_initial_weights(Path(config.init)).sha256
    return told


def agreement_settings_from_app(app: Path, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What sites will be told by the app in this folder; `changes` are those of `flwr run --run-config`."""
    found: Any = read_settings_toml(app / "pyproject.toml")
    for name in ("tool", "flwr", "app", "config"):
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        raise InputError(f"{app} is no app that fedloom wrote: its pyproject.toml has no [tool.flwr.app.config].")
    return agreement_settings(
        resolve_app_config(
            {**flatten_settings(found), **(changes or {})}, app, read_site_data_spec(import_site_data_file(app))
        )
    )


def agreement_fingerprint(told: Told) -> str:
    """By what a person can compare settings, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def format_agreement(told: Told) -> str:
    """Settings as a person reads them, and `Agreed.read` too."""
    return json.dumps(told, indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True)
class Agreement:
    """The settings that an operator agreed to."""

    fingerprint: str
    settings: Told | None = None
    """None where the fingerprint is all that is known."""

    @classmethod
    def read(cls, given: str) -> "Agreement":
        """From what a node's configuration says: a file, or a fingerprint."""
        if is_agreement_fingerprint(given):
            return cls(given.lower())
        path = Path(given)
        try:
            found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
        except OSError as error:
            hint = "; a fingerprint has 64 hexadecimal digits" if re.fullmatch(r"[0-9a-fA-F]+", path.name) else ""
            raise InputError(f"cannot read the settings agreed on, {path}: {error.strerror or error}{hint}.") from None
        except _Twice as error:  # whoever reads it might see the one, and the site go by the other
            raise InputError(f"{path} names {error} twice.") from None
        except (ValueError, RecursionError):
            raise InputError(f"{path} is not JSON as `fedloom flower agreement` writes it.") from None
        _check(found, path)
        return cls(agreement_fingerprint(found), found)

    def refusal_of(self, told: Told) -> str | None:
        """Why settings are refused, as what a site says of itself; None where these are the ones agreed on."""
        here = agreement_fingerprint(told)
        if here == self.fingerprint:
            return None
        if self.settings is None:  # there is nothing to compare
            short = f"settings whose fingerprint begins with {self.fingerprint[:12]}"
            return f"its operator agreed to {short}, and that of this run's settings with {here[:12]}"
        wanted, found = agreement_difference(self.settings, told) or ("others", "these")
        return f"its operator agreed to {wanted}, and this run has {found}"


def agreement_difference(one: Told, other: Told) -> tuple[str, str] | None:
    """In what settings two runs differ, in few words for each, such as `lr 0.01` and `lr 0.5`; None where in none."""
    first, second = _words(one), _words(other)
    names = [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]
    if not names:
        return None
    before, now = (_listed([_said(name, has) for name in names[:SHOWN]]) for has in (first, second))
    return before, now + (f"; {len(names) - SHOWN} more differ" if len(names) > SHOWN else "")


def check_agreement(node: Mapping[str, Any], folder: Path, told: Told) -> None:
    """Refuse settings that the site's operator did not agree to. Call it before any data are read.

    What the server told the site instead is written to the site's folder, and its log says so, once.
    """
    refusal = Agreement.read(str(node["agreed"])).refusal_of(told) if "agreed" in node else None
    if refusal is None:
        return
    path, content = folder / f"settings-{agreement_fingerprint(told)[:12]}.json", format_agreement(told).encode()
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content)
        print(f"refused: {refusal}. All settings of that run are in {path}.", file=sys.stderr, flush=True)
    raise MessageRejectedPermanently(refusal)


def is_agreement_fingerprint(text: str) -> bool:
    return re.fullmatch(r"[0-9a-fA-F]{64}", text) is not None


NAMES = {*Config.model_fields} - OF_THE_MACHINE
"""Every setting that can be agreed to."""


def _check(found: Any, path: Path) -> None:
    """Refuse what does not name every setting, and nothing else."""
    options = found.get("options", {}) if isinstance(found, dict) else None
    if not isinstance(options, dict) or not all(isinstance(pairs, dict) for pairs in options.values()):
        raise InputError(f"{path} is not JSON as `fedloom flower agreement` writes it.")
    for name in found:
        if name not in NAMES:
            raise InputError(f"{path}: {unknown_name_error('setting', name, NAMES)}")
    missing = sorted(NAMES - set(found))
    if missing:
        more = [f"{len(missing) - SHOWN} more"] if len(missing) > SHOWN else []
        raise InputError(f"{path} says nothing of {_listed([*missing[:SHOWN], *more])}; it must name every setting.")


def _words(told: Told) -> dict[str, str]:
    """Each setting's value as JSON, those of options by METHOD.OPTION."""
    plain = {name: value for name, value in told.items() if name != "options"}
    return {name: json.dumps(value) for name, value in flatten_settings({**plain, **told["options"]}).items()}


def _said(name: str, words: Mapping[str, str]) -> str:
    """A setting with its value in few words, such as `lr 0.01`."""
    plain = name.encode("unicode_escape").decode()  # the server may have named it, and logs have lines
    if name not in words:
        return f"no {plain}"
    value = words[name]
    return f"{plain} {value if len(value) <= LONGEST else f'{value[: LONGEST - 3]}...'}"


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


class _Twice(ValueError):
    """A name that is there twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise _Twice(name)
    return dict(pairs)
