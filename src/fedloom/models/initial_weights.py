"""Initial weights from a file.

Read the file, match its tensors by name, and replace the classifier if needed.

Only the classifier may have another shape, for another number of classes; then a new one replaces it. Names that are
missing in the file or unexpected are reported. Every other difference is an error. Reading never executes code:
safetensors cannot, and torch files are read with `weights_only=True`.
"""

import hashlib
import io
import json
import pickle
import re
import tomllib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from torch import Tensor, nn

from fedloom.core.rng import RngStreams
from fedloom.errors import InputError, first_line_of_error
from fedloom.utils.checksums import has_safetensors_checksum, has_valid_safetensors_checksum
from fedloom.utils.storage import MODEL_FILE

WRAPPERS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "weights")
"""Keys under which training scripts store a state dict, next to optimizers and counters."""

SHOWN = 8
"""Number of names that a message lists; it only counts the rest."""


@dataclass(frozen=True)
class InitialWeightsFile:
    """A file of named tensors."""

    path: Path
    sha256: str
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    """The network and the class names of a run directory; empty for other files."""


@dataclass(frozen=True)
class InitialWeights:
    """How a network was initialized from a file, as names of its tensors."""

    file: str
    sha256: str
    matched: tuple[str, ...]
    """Taken from the file."""
    replaced: tuple[str, ...]
    """The classifier, if a new one replaced it."""
    missing: tuple[str, ...]
    """Not in the file, so initialized as without one."""
    unexpected: tuple[str, ...]
    """Names in the file that the network does not have."""
    new_classifier_reason: str = ""
    """Why a new classifier replaced it."""
    advice: str = ""

    def describe(self) -> str:
        """Return the lists in one line."""
        total = len(self.matched) + len(self.replaced) + len(self.missing)
        parts = [f"{len(self.matched)} of {total} tensors taken from {self.file}"]
        if self.replaced:
            parts.append(f"new classifier {_listed(self.replaced)} ({self.new_classifier_reason})")
        parts.append(f"missing in the file: {_listed(self.missing)}")
        parts.append(f"unexpected in it: {_listed(self.unexpected)}")
        return "; ".join(parts) + "." + (f" {self.advice}" if self.advice else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the lists as plain data."""
        lists = {name: list(getattr(self, name)) for name in ("matched", "replaced", "missing", "unexpected")}
        return {"file": self.file, "init_sha256": self.sha256, **lists, "why": self.new_classifier_reason}


def initial_weights_sha256(path: Path) -> str:
    """Return the SHA-256 of the file that `read_initial_weights` would read."""
    return hashlib.sha256(_content(_file_of(path))).hexdigest()


def read_initial_weights(path: Path, sha256: str | None = None) -> InitialWeightsFile:
    """Read a safetensors file, a torch state dict, or the global model of a run directory.

    With `sha256`, a file with another checksum is refused.
    """
    file = _file_of(path)
    content = _content(file)
    _refuse_damaged(content, file)
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise InputError(f"{file} is not the expected file: its SHA-256 is {found}, not {sha256}.")
    if content[8:9] == b"{" or file.suffix == ".safetensors":
        tensors = _parse_safetensors(content, file)
    elif content[:4] == b"PK\x03\x04" or content[:1] == b"\x80":
        tensors = _parse_torch(content, file)
    else:
        raise InputError(f"{file} is neither a safetensors file nor a torch state dict.")
    if not tensors:
        raise InputError(f"{file} holds no named tensors; expected the state dict of a model.")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} in {file} holds numbers that are not finite.")
    return InitialWeightsFile(file, found, tensors, _read_run_metadata(path) if path.is_dir() else {})


def load_initial_weights(
    module: nn.Module,
    weights_file: InitialWeightsFile,
    rng_streams: RngStreams,
    model_name: str = "model",
    new_head: bool = False,
    class_names: Sequence[str] = (),
) -> InitialWeights:
    """Copy the tensors of `weights_file` into `module`.

    A new classifier replaces that of the file if its number of classes differs, or with `new_head`. A module may have
    `old_names`, pairs of a pattern and its replacement: they are applied to the names on both sides, so that files with
    other names match.
    """
    wanted: dict[str, Tensor] = module.state_dict()
    pairs, unexpected = _pair(wanted, weights_file.tensors, getattr(module, "old_names", ()))
    head = _classifier(module)
    of_head = [name for name in (f"{head}.weight", f"{head}.bias") if head is not None and name in wanted]
    new_classifier_reason = _why_new(
        wanted, {name: weights_file.tensors[pairs[name]] for name in of_head if name in pairs}, of_head, new_head
    )
    replaced = of_head if new_classifier_reason else []
    matched = [name for name in wanted if name in pairs and name not in replaced]
    _refuse_misfits(matched, wanted, weights_file, pairs, model_name)
    if not matched:
        raise InputError(
            f"{weights_file.path} has no tensors for the network {model_name!r}{_made_as(weights_file)}: it "
            f"holds {_listed(weights_file.tensors)}, but the network has {_listed(wanted)}."
        )
    with torch.no_grad():
        for name in matched:
            wanted[name].copy_(weights_file.tensors[pairs[name]])
    if replaced and head is not None:
        layer = module.get_submodule(head)
        assert isinstance(layer, nn.Linear), "only a linear layer is taken for the classifier"
        with rng_streams.seed_global_rng("head"):
            layer.reset_parameters()
    initial_weights = InitialWeights(
        file=str(weights_file.path),
        sha256=weights_file.sha256,
        matched=tuple(matched),
        replaced=tuple(replaced),
        missing=tuple(name for name in wanted if name not in pairs and name not in replaced),
        unexpected=tuple(unexpected),
        new_classifier_reason=new_classifier_reason,
    )
    theirs = weights_file.metadata.get("class_names")
    if theirs and class_names and list(theirs) != list(class_names) and set(of_head) & set(matched):
        advice = f"Its classifier was trained for the classes {_listed(theirs)}; use --new-head for a new one."
        initial_weights = replace(initial_weights, advice=advice)
    return initial_weights


def _file_of(path: Path) -> Path:
    try:
        if not path.is_dir():
            return path
        if (path / MODEL_FILE).is_file():
            return path / MODEL_FILE
        run, finished = (path / "config.toml").is_file(), (path / "summary.json").is_file()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}.") from error
    if run and finished and not _has_global_model(path / "summary.json"):
        raise InputError(f"{path} has no global model, because each client has its own; choose another run.")
    if run and finished:
        raise InputError(f"{path / MODEL_FILE} is gone; write it again with: fedloom resume {path}")
    if run:
        raise InputError(f"{path} has no {MODEL_FILE}: the run has not finished; continue with: fedloom resume {path}")
    raise InputError(f"there is no {MODEL_FILE} in {path}; expected a run directory or a file.")


def _has_global_model(summary_file: Path) -> bool:
    try:
        return bool(json.loads(summary_file.read_bytes()).get("global_model", True))
    except (OSError, ValueError, AttributeError):  # damaged
        return True


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise InputError(f"cannot read {str(file)!r}: {getattr(error, 'strerror', None) or error}.") from error


def _read_run_metadata(folder: Path) -> dict[str, Any]:
    """Return the network and the class names of a run, as far as its directory says them."""
    metadata: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        metadata["class_names"] = json.loads((folder / "partition.json").read_bytes())["class_names"]
    with suppress(OSError, ValueError, KeyError):
        metadata["model"] = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))["model"]
    return metadata


def _refuse_damaged(content: bytes, file: Path) -> None:
    """Raise an InputError if a file of fedloom does not have the content that was written."""
    of_a_run = file.name == MODEL_FILE and (file.parent / "config.toml").is_file()
    if (of_a_run or has_safetensors_checksum(content)) and not has_valid_safetensors_checksum(content):
        raise InputError(f"{file} is damaged: its checksum is not the one that was stored when it was written.")


def _parse_safetensors(content: bytes, file: Path) -> dict[str, Tensor]:
    try:
        return parse_tensors(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"{file} is not a whole safetensors file: {' '.join(str(error).split())}.") from error


def _parse_torch(content: bytes, file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings(action="ignore"):  # an error follows what it warns of
            value: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{file} holds more than tensors, and loading it could execute code; save only the state dict, with "
            "torch.save(model.state_dict(), FILE) or as safetensors."
        ) from error
    except Exception as error:  # a damaged archive may raise any error
        raise InputError(f"{file} is not a whole torch file: {first_line_of_error(error)}.") from error
    for _ in range(3):
        if isinstance(value, Mapping):
            value = next((value[key] for key in WRAPPERS if isinstance(value.get(key), Mapping)), value)
    if not isinstance(value, Mapping):
        raise InputError(f"{file} holds a {type(value).__name__}; expected the state dict of a model.")
    return {str(name): tensor.detach() for name, tensor in value.items() if isinstance(tensor, Tensor)}


def _pair(
    wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], old_names: Iterable[tuple[str, str]]
) -> tuple[dict[str, str], list[str]]:
    """Map names of the network to names in the file, and list the file's names without a match.

    A prefix of the file's names (`module.`, `model.`, two of them) is removed if more names match without it.
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
    """Return the name of the classifier: the linear layer called `head`, or else the last linear layer."""
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and name]
    heads = [name for name in linear if name.rpartition(".")[2] == "head"]
    found = heads or linear
    return found[-1] if found else None


def _why_new(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], of_head: list[str], new_head: bool) -> str:
    """Return why the classifier is replaced by a new one, or an empty string."""
    if not found:
        return ""
    if new_head:
        return "as requested"
    for name in of_head:
        if (
            name in found
            and found[name].dim() == wanted[name].dim()
            and found[name].shape[1:] == wanted[name].shape[1:]
        ):
            here, there = len(wanted[name]), len(found[name])
            if here != there:
                return f"{there} classes in the file, {here} in the network"
    return ""


def _refuse_misfits(
    matched: Iterable[str],
    wanted: Mapping[str, Tensor],
    weights_file: InitialWeightsFile,
    pairs: Mapping[str, str],
    model_name: str,
) -> None:
    wrong = []
    for name in matched:
        theirs, ours = weights_file.tensors[pairs[name]], wanted[name]
        if theirs.shape != ours.shape:
            wrong.append(f"{name} is {_shape(theirs)} in the file and {_shape(ours)} in the network")
        elif theirs.is_floating_point() != ours.is_floating_point() or theirs.is_complex():
            wrong.append(f"{name} is {theirs.dtype} in the file and {ours.dtype} in the network")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise InputError(
            f"{weights_file.path}{_made_as(weights_file)} does not fit the network {model_name!r}: {wrong[0]}{more}."
        )


def _made_as(weights_file: InitialWeightsFile) -> str:
    return f" (the network {weights_file.metadata['model']!r})" if "model" in weights_file.metadata else ""


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "one number"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) + more) or "none"
