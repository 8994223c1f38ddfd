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

from fedloom.config import Config, read_toml
from fedloom.errors import InputError, unknown
from fedloom.flower.app import load_site_data, read_settings, task_of, with_task
from fedloom.flower.data import Task, described
from fedloom.flower.parcel import RefusedForGood
from fedloom.initial import read_source
from fedloom.request import Own, check, pin_partition, replace_config, with_server_data
from fedloom.storage import write_atomically

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


def settled(given: Mapping[str, Any], app: Path, task: Task | None, node: Mapping[str, Any] | None = None) -> Config:
    """The run that Flower's run config tells, with nothing left open. No data are read for it.

    `node` is the configuration of a site's node, where this is one: a file to begin with may lie elsewhere there.
    """
    config = with_task(read_settings(given, app)[0], task)
    if config.clients is None:
        raise InputError("a run over sites must say how many clients there are; give --clients.")
    if config.init is not None and node is not None and "init" in node:
        config = replace_config(config, init=str(node["init"]))
    if config.partition_sha256 is None:  # else it is looked at when it is used, and may not be here
        config = pin_partition(config)
    return with_servers_data(config, task)


def with_servers_data(config: Config, task: Task | None) -> Config:
    """The config with data for the server where the method needs some: the task's own, if it has any."""
    return with_server_data(config, Own() if task is None else Own(data=described(task)), [check(config)])


def told_by(config: Config) -> dict[str, Any]:
    """The settings of a run that all sites must have in common; of a file to begin with, what is in it."""
    told = config.model_dump(exclude=OF_THE_MACHINE)
    if config.init is not None:
        told["init"] = config.init_sha256 or read_source(Path(config.init)).sha256
    return told


def told_by_app(app: Path, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What sites will be told by the app in this folder; `changes` are those of `flwr run --run-config`."""
    found: Any = read_toml(app / "pyproject.toml")
    for name in ("tool", "flwr", "app", "config"):
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        raise InputError(f"{app} is no app that fedloom wrote: its pyproject.toml has no [tool.flwr.app.config].")
    return told_by(settled({**flat(found), **(changes or {})}, app, task_of(load_site_data(app))))


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings by one name each, as Flower hands them to an app."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


def fingerprint(told: Told) -> str:
    """By what a person can compare settings, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def readable(told: Told) -> str:
    """Settings as a person reads them, and `Agreed.read` too."""
    return json.dumps(told, indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True)
class Agreed:
    """The settings that an operator agreed to."""

    fingerprint: str
    settings: Told | None = None
    """None where the fingerprint is all that is known."""

    @classmethod
    def read(cls, given: str) -> "Agreed":
        """From what a node's configuration says: a file, or a fingerprint."""
        if is_fingerprint(given):
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
        return cls(fingerprint(found), found)

    def refusal_of(self, told: Told) -> str | None:
        """Why settings are refused, as what a site says of itself; None where these are the ones agreed on."""
        here = fingerprint(told)
        if here == self.fingerprint:
            return None
        if self.settings is None:  # there is nothing to compare
            short = f"settings whose fingerprint begins with {self.fingerprint[:12]}"
            return f"its operator agreed to {short}, and that of this run's settings with {here[:12]}"
        wanted, found = apart(self.settings, told) or ("others", "these")
        return f"its operator agreed to {wanted}, and this run has {found}"


def apart(one: Told, other: Told) -> tuple[str, str] | None:
    """In what settings two runs differ, in few words for each, such as `lr 0.01` and `lr 0.5`; None where in none."""
    first, second = _words(one), _words(other)
    names = [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]
    if not names:
        return None
    before, now = (_listed([_said(name, has) for name in names[:SHOWN]]) for has in (first, second))
    return before, now + (f"; {len(names) - SHOWN} more differ" if len(names) > SHOWN else "")


def heed(node: Mapping[str, Any], folder: Path, told: Told) -> None:
    """Refuse settings that the site's operator did not agree to. Call it before any data are read.

    What the server told the site instead is written to the site's folder, and its log says so, once.
    """
    refusal = Agreed.read(str(node["agreed"])).refusal_of(told) if "agreed" in node else None
    if refusal is None:
        return
    path, content = folder / f"settings-{fingerprint(told)[:12]}.json", readable(told).encode()
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content)
        print(f"refused: {refusal}. All settings of that run are in {path}.", file=sys.stderr, flush=True)
    raise RefusedForGood(refusal)


def is_fingerprint(text: str) -> bool:
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
            raise InputError(f"{path}: {unknown('setting', name, NAMES)}")
    missing = sorted(NAMES - set(found))
    if missing:
        more = [f"{len(missing) - SHOWN} more"] if len(missing) > SHOWN else []
        raise InputError(f"{path} says nothing of {_listed([*missing[:SHOWN], *more])}; it must name every setting.")


def _words(told: Told) -> dict[str, str]:
    """Each setting's value as JSON, those of options by METHOD.OPTION."""
    plain = {name: value for name, value in told.items() if name != "options"}
    return {name: json.dumps(value) for name, value in flat({**plain, **told["options"]}).items()}


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
