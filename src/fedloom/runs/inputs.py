"""Inputs of a run besides its config: the hash of its data, and the machine."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedloom._version import __version__
from fedloom.data import FederatedDataset, InputTransform, PartitionedDataset, Samples
from fedloom.devices.selection import select_device
from fedloom.errors import InputError
from fedloom.runs.build import BuiltRun
from fedloom.runs.callback import Callback
from fedloom.runs.directory import RunDirectory
from fedloom.utils.run_files import CONFIG_FILE

MOST_HASHED = 1 << 30
"""Bytes of a tensor that are hashed, which takes about a second; of a larger one, blocks at equal distances."""
BLOCKS = 64
MOST_CLIENTS = 4
"""Clients whose samples are hashed if samples are made on demand."""
MATH_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
"""Environment variables that select other kernels."""


def hash_built_run(built_run: BuiltRun) -> dict[str, str]:
    """Return the SHA-256 of each part of the data of a run, by the name of the part."""
    return _hash_data(built_run.data.federated_data, built_run.rounds.context.server.data)


def _hash_data(federated_data: FederatedDataset, server_data: Samples | None) -> dict[str, str]:
    """Return the hashes of the samples on this machine. Of samples made on demand, those of a few clients count."""
    parts = {"samples": _hash(_training_pieces(federated_data))}
    if isinstance(federated_data, PartitionedDataset):
        parts["partition"] = _hash(indices.astype(np.int64).tobytes() for indices in federated_data.client_indices)
    if federated_data.test is not None:
        parts["test samples"] = _hash(_sample_pieces(federated_data.test))
    if federated_data.test_owners is not None:
        parts["owners of the test samples"] = _hash([np.ascontiguousarray(federated_data.test_owners).tobytes()])
    if server_data is not None:
        parts["server data"] = _hash(_sample_pieces(server_data))
    return parts


def _hash(pieces: Iterator[bytes | memoryview] | Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


def _training_pieces(federated_data: FederatedDataset) -> Iterator[bytes | memoryview]:
    yield f"{len(federated_data)} {federated_data.classes} {tuple(federated_data.shape)}".encode()
    if isinstance(federated_data.transform, InputTransform):
        # Means of float64 depend on the number of threads in the last digits; the network sees float32.
        constants = (*federated_data.transform.mean, *federated_data.transform.std)
        yield " ".join(f"{value:.6g}" for value in constants).encode()
    if isinstance(federated_data, PartitionedDataset):
        yield from _sample_pieces(federated_data.pool)
        return
    client_ids = list(federated_data.available_client_ids)
    if not federated_data.is_in_memory:
        client_ids = client_ids[:: max(1, -(-len(client_ids) // MOST_CLIENTS))]
    for client_id in client_ids:
        try:
            yield from _sample_pieces(federated_data.client_samples(client_id))
        except Exception:  # code of the user; the round that needs the client reports it
            yield b"unreadable"


def _sample_pieces(samples: Samples) -> Iterator[bytes | memoryview]:
    for tensor in (samples.x, samples.y):
        yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
        for block in _blocks(tensor.detach()):
            dense = block.cpu().contiguous()
            yield dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the rows to hash: all, or of a large tensor BLOCKS blocks from the first to the last row."""
    size, rows = tensor.numel() * tensor.itemsize, len(tensor)
    if size <= MOST_HASHED:
        yield tensor
        return
    length = max(1, MOST_HASHED // BLOCKS * rows // size)
    for start in np.linspace(0, rows - length, BLOCKS).astype(int):
        yield tensor[start : start + length]


def describe_machine(device: str) -> dict[str, str]:
    """Return what the last bits of a result depend on: software, instruction set and GPU, by name."""
    found = {
        "fedloom": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "processor": _processor_name(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": "on" if torch._C._get_mkldnn_enabled() else "off",
        **{name: os.environ.get(name, "default") for name in MATH_VARIABLES},
    }
    selected = select_device(device.split(",")[0])
    if selected.type == "cuda":
        found["GPU"] = torch.cuda.get_device_name(selected)
        found["CUDA"] = str(torch.version.cuda)
        found["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return found


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def check_inputs(directory: RunDirectory, hashes: Mapping[str, str], callback: Callback) -> None:
    """Check that a run continues with the same data, and warn and record if the machine is another one.

    Raise an InputError if the data have changed.
    """
    inputs = directory.inputs()
    for part, digest in hashes.items():
        if inputs["data"].get(part, digest) != digest:
            raise InputError(
                f"the {part} of {directory.config.data!r} changed after {directory.path} started, so the run cannot "
                f"continue. Restore them, or start a new run with: fedloom run --config {directory.path / CONFIG_FILE}"
            )
    machine, last = describe_machine(directory.config.device), inputs["machines"][-1]
    if changes := _describe_machine_changes(last, machine):
        callback.on_message(
            f"{directory.path} continues where other bits may come out: {changes}. The result may differ from that of "
            "an uninterrupted run."
        )
        directory.add_machine(machine)


def _describe_machine_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return what differs between two machines, such as `torch was 2.12.0 and is 2.13.0`; empty if nothing does."""
    names = dict.fromkeys([*before, *now])
    changed = [name for name in names if before.get(name) != now.get(name)]
    return ", ".join(f"{name} was {before.get(name, 'none')} and is {now.get(name, 'none')}" for name in changed)


def explain_verify_mismatch(path: Path) -> str:
    """Return what differs between the machines of a run, or between them and this one; empty if nothing does."""
    directory = RunDirectory.open(path)
    *earlier, last = directory.inputs()["machines"]
    moves = [_describe_machine_changes(machine, last) for machine in earlier]
    return ", ".join(filter(None, [*moves, _describe_machine_changes(last, describe_machine(directory.config.device))]))
