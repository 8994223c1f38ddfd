"""A starting model from a file: what is taken over, what is made new, and what does not fit.

Tensors are matched by name. The classifier alone may have another shape, that of another number of classes; then it
is made new. What the file has besides, or lacks, is told; every other difference is an error. Reading never executes
code: safetensors cannot, and torch files are read with `weights_only=True`.
"""

import hashlib
import io
import json
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from torch import Tensor, nn

from fedloom.core.rng import RngStreams
from fedloom.errors import InputError
from fedloom.utils.storage import MODEL_FILE

WRAPPERS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "weights")
"""Entries under which training scripts put a state dict beside optimisers and counters."""

SHOWN = 8
"""How many names a sentence lists before it says how many more there are."""


@dataclass(frozen=True)
class InitialWeightsFile:
    """A file of named tensors."""

    path: Path
    sha256: str
    tensors: dict[str, Tensor]
    about: dict[str, Any]
    """What `fedloom pretrain` noted down in it; empty for other files."""


@dataclass(frozen=True)
class InitialWeights:
    """How a network was started from a file, by the names of its tensors."""

    file: str
    sha256: str
    matched: tuple[str, ...]
    """Taken over from the file."""
    replaced: tuple[str, ...]
    """The classifier, made new."""
    missing: tuple[str, ...]
    """Not in the file, so as the network is made without one."""
    unexpected: tuple[str, ...]
    """Names in the file that the network has no use for."""
    why: str = ""
    """Why the classifier was made new."""
    advice: str = ""

    def sentence(self) -> str:
        """The lists in one line."""
        total = len(self.matched) + len(self.replaced) + len(self.missing)
        parts = [f"{len(self.matched)} of {total} tensors taken from {self.file}"]
        if self.replaced:
            parts.append(f"new classifier {_listed(self.replaced)} ({self.why})")
        parts.append(f"missing in the file: {_listed(self.missing)}")
        parts.append(f"unexpected in it: {_listed(self.unexpected)}")
        return "; ".join(parts) + "." + (f" {self.advice}" if self.advice else "")

    def record(self) -> dict[str, Any]:
        """All of it as plain data."""
        lists = {name: list(getattr(self, name)) for name in ("matched", "replaced", "missing", "unexpected")}
        return {"file": self.file, "init_sha256": self.sha256, **lists, "why": self.why}


def initial_weights_sha256(path: Path) -> str:
    """The SHA-256 of the file that `read_source` would read."""
    return hashlib.sha256(_content(_file_of(path))).hexdigest()


def read_initial_weights(path: Path, sha256: str | None = None) -> InitialWeightsFile:
    """The tensors of a safetensors file, of a torch state dict, or of the deployed model in a run's folder.

    With `sha256` a file with another checksum is refused.
    """
    file = _file_of(path)
    content = _content(file)
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise InputError(f"{file} is not the file that was meant: its SHA-256 is {found}, not {sha256}.")
    if content[8:9] == b"{" or file.suffix == ".safetensors":
        tensors, about = _parse_safetensors(content, file)
    elif content[:4] == b"PK\x03\x04" or content[:1] == b"\x80":
        tensors, about = _parse_torch(content, file), {}
    else:
        raise InputError(f"{file} is neither a safetensors file nor a torch state dict.")
    if not tensors:
        raise InputError(f"{file} holds no named tensors; expected the state dict of a model.")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} in {file} holds numbers that are not finite.")
    return InitialWeightsFile(file, found, tensors, about)


def load_initial_weights(
    module: nn.Module,
    source: InitialWeightsFile,
    streams: RngStreams,
    network: str = "model",
    new_head: bool = False,
    class_names: Sequence[str] = (),
) -> InitialWeights:
    """Fill `module` from `source`; the classifier is made new where its number of classes differs, or if asked to.

    A module may say under which other names files know its tensors: `old_names`, pairs of a pattern and what to put
    in its place, are applied to the names on both sides.
    """
    wanted: dict[str, Tensor] = module.state_dict()
    pairs, unexpected = _pair(wanted, source.tensors, getattr(module, "old_names", ()))
    head = _classifier(module)
    of_head = [name for name in (f"{head}.weight", f"{head}.bias") if head is not None and name in wanted]
    why = _why_new(wanted, {name: source.tensors[pairs[name]] for name in of_head if name in pairs}, of_head, new_head)
    replaced = of_head if why else []
    matched = [name for name in wanted if name in pairs and name not in replaced]
    _refuse_misfits(matched, wanted, source, pairs, network)
    if not matched:
        raise InputError(
            f"{source.path} has nothing for the network {network!r}{_made_as(source)}: it holds "
            f"{_listed(source.tensors)}, and the network {_listed(wanted)}."
        )
    with torch.no_grad():
        for name in matched:
            wanted[name].copy_(source.tensors[pairs[name]])
    if replaced and head is not None:
        layer = module.get_submodule(head)
        assert isinstance(layer, nn.Linear), "only a linear layer is taken for the classifier"
        with streams.globally("head"):
            layer.reset_parameters()
    begun = InitialWeights(
        file=str(source.path),
        sha256=source.sha256,
        matched=tuple(matched),
        replaced=tuple(replaced),
        missing=tuple(name for name in wanted if name not in pairs and name not in replaced),
        unexpected=tuple(unexpected),
        why=why,
    )
    theirs = source.about.get("class_names")
    if theirs and class_names and list(theirs) != list(class_names) and set(of_head) & set(matched):
        advice = f"Its classifier was trained to tell {_listed(theirs)} apart; --new-head starts with a new one."
        begun = replace(begun, advice=advice)
    return begun


def _file_of(path: Path) -> Path:
    try:
        if not path.is_dir():
            return path
        if (path / MODEL_FILE).is_file():
            return path / MODEL_FILE
        run, finished = (path / "config.toml").is_file(), (path / "summary.json").is_file()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}.") from error
    if run and finished:
        raise InputError(f"{path / MODEL_FILE} is gone; write it again with: fedloom resume {path}")
    if run:
        raise InputError(f"{path} has no {MODEL_FILE}, for the run has not finished; go on with: fedloom resume {path}")
    raise InputError(f"there is no {MODEL_FILE} in {path}; expected the folder of a run, or a file.")


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise InputError(f"cannot read {str(file)!r}: {getattr(error, 'strerror', None) or error}.") from error


def _parse_safetensors(content: bytes, file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        tensors = parse_tensors(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = json.loads(header.get("__metadata__", {}).get("fedloom", "{}"))
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"{file} is not a whole safetensors file: {' '.join(str(error).split())}.") from error
    return tensors, about if isinstance(about, dict) else {}


def _parse_torch(content: bytes, file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings(action="ignore"):  # what it warns of, it then also refuses
            value: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{file} holds more than tensors, and to load that could execute code; save the state dict alone, with "
            "torch.save(model.state_dict(), FILE), or as safetensors."
        ) from error
    except Exception as error:  # a damaged archive ends in whatever its reader stumbles over
        raise InputError(f"{file} is not a whole torch file: {_first_line(error)}.") from error
    for _ in range(3):
        inner = next((value[key] for key in WRAPPERS if isinstance(value, Mapping) and _is_mapping(value, key)), None)
        if inner is None:
            break
        value = inner
    if not isinstance(value, Mapping):
        raise InputError(f"{file} holds a {type(value).__name__}; expected the state dict of a model.")
    return {str(name): tensor.detach() for name, tensor in value.items() if isinstance(tensor, Tensor)}


def _is_mapping(value: Mapping[Any, Any], key: str) -> bool:
    return isinstance(value.get(key), Mapping)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _pair(
    wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], old_names: Iterable[tuple[str, str]]
) -> tuple[dict[str, str], list[str]]:
    """Which name in the file belongs to which of the network, and the names that belong to none.

    A prefix that the file's names have in front (`module.`, `model.`, two of them) is taken off where more names match
    without it.
    """
    renames = [(re.compile(pattern), text) for pattern, text in old_names]

    def plain(name: str) -> str:
        for pattern, text in renames:
            name = pattern.sub(text, name)
        return name

    mine = {plain(name): name for name in wanted}
    prefixes = {""} | {name[: m.end()] for name in found for m in list(re.finditer(r"\.", name))[:2]}

    def without(prefix: str) -> dict[str, str]:
        taken = {plain(name.removeprefix(prefix)): name for name in found}
        return {mine[key]: name for key, name in taken.items() if key in mine}

    best = max(sorted(prefixes, key=lambda p: (len(p), p)), key=lambda prefix: len(without(prefix)))
    pairs = without(best)
    used = set(pairs.values())
    return pairs, [name for name in found if name not in used]


def _classifier(module: nn.Module) -> str | None:
    """The name of the layer that scores classes: the linear layer called `head`, or else the last one."""
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and name]
    heads = [name for name in linear if name.rpartition(".")[2] == "head"]
    found = heads or linear
    return found[-1] if found else None


def _why_new(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], of_head: list[str], new_head: bool) -> str:
    """Why the classifier is made new; empty where it is not."""
    if not found:
        return ""
    if new_head:
        return "as was asked"
    for name in of_head:
        if (
            name in found
            and found[name].dim() == wanted[name].dim()
            and found[name].shape[1:] == wanted[name].shape[1:]
        ):
            here, there = len(wanted[name]), len(found[name])
            if here != there:
                return f"{there} classes there, {here} here"
    return ""


def _refuse_misfits(
    matched: Iterable[str],
    wanted: Mapping[str, Tensor],
    source: InitialWeightsFile,
    pairs: Mapping[str, str],
    network: str,
) -> None:
    wrong = []
    for name in matched:
        theirs, ours = source.tensors[pairs[name]], wanted[name]
        if theirs.shape != ours.shape:
            wrong.append(f"{name} is {_shape(theirs)} in the file and {_shape(ours)} in the network")
        elif theirs.is_floating_point() != ours.is_floating_point() or theirs.is_complex():
            wrong.append(f"{name} is {theirs.dtype} in the file and {ours.dtype} in the network")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise InputError(f"{source.path}{_made_as(source)} does not fit the network {network!r}: {wrong[0]}{more}.")


def _made_as(source: InitialWeightsFile) -> str:
    return f" (the network {source.about['model']!r})" if "model" in source.about else ""


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "one number"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) + more) or "none"
