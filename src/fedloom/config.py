"""All settings of a run, with their defaults and help texts.

Loads no torch, so that the help of the command and the client app of a site start quickly.
"""

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from fedloom.devices.selection import select_auto_device
from fedloom.errors import InputError
from fedloom.utils.data_names import PATHS, complete_data_name
from fedloom.utils.result_window import DEFAULT_WINDOW, count_evaluations, limit_window
from fedloom.utils.settings import (
    MAX_CONCURRENCY,
    MAX_COUNT,
    Settings,
    format_toml_value,
    parse_setting_value,
    validate_settings,
)


class TrainingConfig(Settings):
    """Settings of local training."""

    epochs: int = Field(default=2, ge=0, le=MAX_COUNT)
    """local epochs of a client in one round"""
    steps: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """training steps of a client in one round, instead of epochs"""
    batch_size: int = Field(default=20, ge=0, le=MAX_COUNT)
    """samples in a batch; 0: all samples of the client"""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """sgd or adam; a new one for each client and round, unless --keep-optimizer is given"""
    keep_optimizer: bool = False
    """keep each client's optimizer state (momentum or Adam's moments) from one of its rounds to the next"""
    lr: float = Field(default=0.05, ge=0)
    """learning rate of the clients"""
    lr_schedule: Literal["step", "cosine"] = "step"
    """learning rate over the rounds: step (times --lr-decay after every --lr-step rounds, by default constant) or
    cosine (falls to nearly 0)"""
    lr_decay: float = Field(default=1.0, gt=0)
    """factor on the learning rate after every --lr-step rounds"""
    lr_step: int = Field(default=1, ge=1, le=MAX_COUNT)
    """rounds between two changes of the learning rate by --lr-decay"""
    lr_warmup: int = Field(default=0, ge=0, le=MAX_COUNT)
    """rounds at the start in which the learning rate rises linearly"""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """momentum of sgd"""
    nesterov: bool = False
    """use Nesterov momentum"""
    weight_decay: float = Field(default=0.0, ge=0)
    """weight decay, added to the gradient"""
    clip: float | None = Field(default=None, gt=0)
    """maximum norm of a gradient; larger gradients are scaled down"""
    augment: str = "none"
    """augmentation of training images: none, flip, crop, crop+flip"""
    statistics: Literal["running", "estimated"] = "running"
    """batch norm statistics that a client sends: the running ones of training, or estimated again on its samples"""
    validation: float = Field(default=0.0, ge=0, lt=1)
    """share of each client's samples held out from training, for methods that choose models by validation"""

    @model_validator(mode="after")
    def _remembers(self) -> "TrainingConfig":
        if self.keep_optimizer and self.optimizer == "sgd" and not self.momentum:
            raise ValueError("keep_optimizer needs optimizer state: optimizer adam, or a momentum above 0, not 0.0.")
        return self

    @model_validator(mode="after")
    def _schedules(self) -> "TrainingConfig":
        if self.lr_step != 1 and self.lr_decay == 1:
            raise ValueError(f"lr_step is {self.lr_step}, but lr_decay is 1, so the learning rate would not change.")
        if self.lr_schedule == "cosine" and self.lr_decay != 1:
            raise ValueError(f"lr_decay is {self.lr_decay:g}, but the schedule cosine has no factor; leave out one.")
        return self

    def lr_at(self, round: int) -> float:
        """Return the learning rate in round `round`, counted from 0."""
        past = round - self.lr_warmup
        if past < 0:
            return self.lr * (round + 1) / (self.lr_warmup + 1)
        if self.lr_schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * past / (self._num_rounds - self.lr_warmup))) / 2
        return float(self.lr * self.lr_decay ** (past // self.lr_step))

    @property
    def _num_rounds(self) -> int:
        """Number of rounds, which the settings of a run know."""
        raise InputError("the schedule cosine needs the number of rounds, which is a setting of a run.")


class Config(TrainingConfig):
    """All settings of a run. The fields are the options of `fedloom run` and the entries of `config.toml`."""

    method: str = "fedavg"
    """method, or several joined by +"""
    data: str = "digits"
    """data set (`fedloom list datasets`), or your own: a .csv, .parquet or .npz file, or a folder/ of images"""
    classes: str | None = None
    """classes of the data set to keep, such as 0-4 or 0,2,7; by default all"""
    normalize: str = "default"
    """normalization of images: default (that of the data set), mean-std, unit, half, mnist, cifar, imagenet"""
    partition: str = "dirichlet:0.3"
    """partition of the samples among the clients (`fedloom list partitions`)"""
    partition_sha256: str | None = None
    """with --partition file:...: accept only a file with this SHA-256; every run records it"""
    client_test: float = Field(default=0.0, ge=0, lt=1)
    """share of each client's samples to test on, out of training and test samples together; 0: the common test set"""
    server_data: str | None = None
    """data on the server: split:X takes a share (0.05) or number (500) of the training samples away from the clients;
    or the name of another data set"""
    clients: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """number of clients; by default 20, or as many as the partition defines (natural, domain, file)"""
    clients_per_round: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """clients sampled in each round; by default 10, or all if there are fewer"""
    held_out_clients: float | None = Field(default=None, gt=0, lt=1)
    """share of the clients, at least one, that never train; the model is also tested on them, as on new clients"""
    model: str = "mlp"
    """network (`fedloom list models`)"""
    init: str | None = None
    """initial weights: a safetensors file, a torch state dict, a run directory, or the name of one in runs/"""
    init_sha256: str | None = None
    """with --init: accept only a file with this SHA-256; every run records it"""
    new_head: bool = False
    """with --init: start with a new classifier even if the number of classes is the same"""
    rounds: int = Field(default=30, ge=1, le=MAX_COUNT)
    """number of rounds"""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """seed of all random draws"""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """options of the methods, by method and name"""
    variant: str | None = None
    """the method as it was given, if options or settings stood behind its name; they are in the other fields"""

    eval_every: int = Field(default=1, ge=1, le=MAX_COUNT)
    """rounds between two evaluations; the last round is always evaluated"""
    window: int = Field(default=DEFAULT_WINDOW, ge=1, le=MAX_COUNT)
    """number of last evaluations whose mean is the result of the run; at most a fifth of all, at least one"""
    min_clients: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """minimum number of clients that return an update in a round; fewer end the run with an error; by default 0, and
    with sites more than half of the clients of the round"""
    failure_rate: float = Field(default=0.0, ge=0, lt=1)
    """simulated probability that a client fails in a round"""

    clip_update: float | None = Field(default=None, gt=0)
    """maximum norm of a client update; larger updates are scaled down, and all clients get the same weight"""
    noise: float = Field(default=0.0, ge=0)
    """noise on the sum of clipped updates, in multiples of --clip-update; gives clients differential privacy"""
    noise_source: Literal["seed", "system"] = "seed"
    """source of the noise and of client sampling: seed (repeatable), or the operating system (secure, for real data)"""
    delta: float | None = Field(default=None, gt=0, lt=1)
    """probability delta with which the guarantee of epsilon may fail; by default 1 / clients^1.1"""
    max_epsilon: float | None = Field(default=None, gt=0)
    """end the run before epsilon exceeds this"""

    engine: Literal["auto", "sequential", "multiprocess", "cuda", "flower"] = "auto"
    """sequential: one client after the other; multiprocess: worker processes; cuda: many clients at once on a GPU;
    flower: separate sites over the network; auto: cuda on a GPU, else multiprocess"""
    nodes: int = Field(default=0, ge=0, le=MAX_CONCURRENCY)
    """with --engine flower: number of SuperNodes, which share the clients; 0: one for each client"""
    deadline: float = Field(default=600.0, gt=0)
    """with --engine flower: seconds until a site must have returned its update in a round"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ..., or several GPUs as cuda:0,cuda:1; auto: a GPU if there is one, else the CPU"""
    precision: Literal["fp32", "tf32", "bf16"] = "tf32"
    """precision on a GPU: fp32; tf32 (products with 10-bit fractions); bf16 (networks in bfloat16); a CPU uses fp32"""
    fast: bool = False
    """on a GPU, also allow non-deterministic algorithms"""
    slots: int = Field(default=0, ge=0, le=MAX_CONCURRENCY)
    """clients that the cuda engine trains at once on a GPU; 0: all clients of the round, at most 16"""
    workers: int = Field(default=0, ge=0, le=MAX_CONCURRENCY)
    """worker processes of the multiprocess engine; 0: one for each core"""
    channels_last: bool | None = None
    """use the channels-last memory format for images and convolutions; by default where it is faster: on CPUs, in
    bf16, and in tf32 for wide networks with batch norm"""
    checkpoint_seconds: float = Field(default=30.0, ge=0)
    """seconds between two checkpoints, more if writing takes long; 0: one after every round"""
    keep_checkpoints: int = Field(default=2, ge=1, le=MAX_COUNT)
    """number of checkpoints to keep"""
    cache_dir: str | None = None
    """directory for the models that a server caches (fedcda), if memory is too small for them"""
    imports: list[str] = Field(default_factory=list)
    """Python files to run first, which register methods of your own"""

    @model_validator(mode="before")
    @classmethod
    def _counted(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("clients") is not None:
            return values
        partition = values.get("partition", cls.model_fields["partition"].default)
        return {**values, "clients": _default_client_count(partition)}

    @field_validator("device")
    @classmethod
    def _found(cls, device: str, info: ValidationInfo) -> str:
        return select_auto_device(device, info.data.get("engine", "auto"))

    @field_validator("partition", "cache_dir")
    @classmethod
    def _no_zero_byte(cls, text: str | None) -> str | None:
        if text is not None and "\0" in text:
            raise ValueError("without a zero byte, which no path has")
        return text

    @field_validator("cache_dir")
    @classmethod
    def _absolute_cache(cls, path: str | None) -> str | None:
        if path == "":
            raise ValueError("a folder")
        return None if path is None else str(Path(path).absolute())  # a run may be resumed from another folder

    @field_validator("partition")
    @classmethod
    def _absolute_partition(cls, spec: str) -> str:
        name, colon, path = spec.strip().partition(":")
        return f"file:{Path(path).absolute()}" if (name, colon) == ("file", ":") and path else spec

    @field_validator("data", "server_data")
    @classmethod
    def _absolute_data(cls, name: str | None) -> str | None:
        return None if name is None else complete_data_name(name)  # a run may be resumed from another folder

    @field_validator("imports")
    @classmethod
    def _absolute(cls, paths: list[str]) -> list[str]:
        if any("\0" in path for path in paths):
            raise ValueError("paths of Python files")
        return [str(Path(path).resolve()) for path in paths]  # a run may be resumed from another folder

    @field_validator("init")
    @classmethod
    def _absolute_init(cls, path: str | None) -> str | None:
        if path is None:
            return None
        if not path:
            raise ValueError("a file, the folder of a run or the name of one")
        place, run = Path(path), Path("runs", path)
        with suppress(OSError):  # a name that is too long: read_source will say so
            if place.name == path and not place.exists() and run.is_dir():
                place = run
        return str(place.absolute())

    @field_validator("init_sha256", "partition_sha256")
    @classmethod
    def _checksum(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[0-9a-f]{64}", value):
            raise ValueError("64 hexadecimal digits")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.clients is not None:  # else the config is validated again once the partition has defined the number
            self._consistent_clients(self.clients)
            if self.min_clients is not None and self.min_clients > self.cohort_size:
                asked = f"only {self.cohort_size} clients are sampled in a round"
                raise ValueError(f"min_clients is {self.min_clients}, but {asked}.")
        if self.partition_sha256 is not None and self.partition_file is None:
            raise ValueError("partition_sha256 needs a partition file:PATH, but none is given.")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0, not 0.0.")
        if self.lr_warmup >= self.rounds:
            raise ValueError(f"lr_warmup is {self.lr_warmup}, but there are only {self.rounds} rounds.")
        for name in ("init_sha256", "new_head"):
            if getattr(self, name) and self.init is None:
                raise ValueError(f"{name} needs init, but no init is given.")
        self._consistent_privacy()
        if self.engine == "multiprocess" and self.device != "cpu":
            raise ValueError(f"the multiprocess engine computes on the CPU, not on {self.device!r}; use --engine cuda.")
        if self.engine == "flower" and self.held_out_clients is not None:
            raise ValueError(
                f"held_out_clients is {self.held_out_clients:g}, but the samples of sites are not here to be tested; "
                "use another engine."
            )
        if self.engine == "flower" and self.device != "cpu":
            raise ValueError(f"the server of sites computes on the CPU, not on {self.device!r}; sites have their own.")
        if self.engine == "cuda" and self.device == "cpu":
            raise ValueError("the cuda engine computes on a GPU; use --device cuda with it.")
        if self.precision == "bf16" and self.device == "cpu":
            raise ValueError("precision bf16 is for GPUs; on the CPU it is fp32.")
        return self

    def _consistent_clients(self, clients: int) -> None:
        left = clients - self.num_held_out
        if left < 1:
            have = "the only client" if clients == 1 else f"all {clients} clients"
            raise ValueError(f"held_out_clients is {self.held_out_clients:g}, which takes {have} away from training.")
        if self.cohort_size > left:
            there = f"there are only {clients} clients"
            if left < clients:
                there = f"held_out_clients {self.held_out_clients:g} leaves only {left} of {clients} for training"
            raise ValueError(f"clients_per_round is {self.clients_per_round}, but {there}.")

    def _consistent_privacy(self) -> None:
        if self.noise and self.clip_update is None:
            raise ValueError(f"noise is {self.noise:g} times clip_update, but no clip_update is given.")
        for name in ("noise_source", "delta", "max_epsilon"):
            if not self.noise and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} needs noise, but no noise is given.")

    @property
    def _num_rounds(self) -> int:
        return self.rounds

    @property
    def partition_file(self) -> Path | None:
        """The file that the partition is read from; None for other partitions."""
        name, _, path = self.partition.partition(":")
        return Path(path) if name == "file" and path else None

    @property
    def data_name(self) -> str:
        """The data set's name for use in directory names: without options, and of a path only the last part."""
        kind, _, rest = self.data.partition(":")
        path = rest.split(",")[0] if "" in PATHS.get(kind, ()) else ""
        return re.sub(r"[^A-Za-z0-9.+_-]", "_", (Path(path).name.split(".")[0] or kind) if path else kind)[:60]

    @property
    def label(self) -> str:
        """The name of the run in tables: its variant or its method."""
        return self.variant or self.method

    @property
    def result_window(self) -> int:
        """Number of last evaluations whose mean is the result: `window` within its limits."""
        return limit_window(self.window, count_evaluations(self.rounds, self.eval_every))

    @property
    def num_held_out(self) -> int:
        """Number of clients that never train; 0 if `clients` is not known yet."""
        if self.held_out_clients is None or self.clients is None:
            return 0
        return max(1, int(self.held_out_clients * self.clients + 0.5))

    @property
    def cohort_size(self) -> int:
        """Number of clients sampled in a round; correct only if `clients` is known or at least 10."""
        if self.clients_per_round is not None:
            return self.clients_per_round
        return 10 if self.clients is None else min(10, self.clients - self.num_held_out)


PARTITIONS_WITH_CLIENTS = ("natural", "domain", "file")
"""Partitions that define the number of clients. The config gets the number once the data are read."""


def _default_client_count(partition: object) -> int | None:
    """Return the default number of clients; None if the partition defines it."""
    name = partition.partition(":")[0].partition(",")[0].strip() if isinstance(partition, str) else ""
    return None if name in PARTITIONS_WITH_CLIENTS else 20


EXECUTION_SETTINGS = {"engine", "nodes", "deadline", "workers", "slots", "checkpoint_seconds", "keep_checkpoints"}
"""Settings that do not change a single bit of the result."""


def make_config(values: Mapping[str, Any]) -> Config:
    """Return a validated config, or raise an InputError that says in one sentence what is wrong."""
    return validate_settings(Config, values)


def config_to_command(config: Config) -> str:
    """Return the command that repeats the run, with every setting that is not a default."""
    words = ["fedloom", "run", config.method]
    for name, field in Config.model_fields.items():
        value, flag = getattr(config, name), f"--{name.replace('_', '-')}"
        default = _default_client_count(config.partition) if name == "clients" else field.default
        if name in ("method", "options", "variant", "imports") or value == default:
            continue
        if isinstance(value, bool) and field.default is None:
            words += [flag, "yes" if value else "no"]
        elif isinstance(value, bool):
            words.append(flag if value else f"--no-{name.replace('_', '-')}")
        else:
            words += [flag, str(value)]
    for path in config.imports:
        words += ["--import", path]
    for method, options in config.options.items():
        for option, value in options.items():
            if value is not None:  # --set cannot express None
                words += ["--set", f"{method}.{option}={_setting(value)}"]
    return shlex.join(words)


def _setting(value: Any) -> str:
    """Format a value as `parse_config_overrides` reads it: TOML, without quotes that are not needed."""
    return value if isinstance(value, str) and parse_setting_value(value) == value else format_toml_value(value)


def parse_config_overrides(assignments: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse assignments such as `fedprox.mu=0.1` into options by method. Values that are not TOML are strings."""
    options: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        method, dot, option = key.strip().partition(".")
        if not (equals and dot and method and option):
            raise InputError(f"--set takes METHOD.OPTION=VALUE, such as fedprox.mu=0.1, not {assignment!r}.")
        options.setdefault(method, {})[option] = parse_setting_value(text)
    return options


def replace_config(config: Config, **values: Any) -> Config:
    """Return a copy of the config with some values changed, validated again."""
    return make_config({**config.model_dump(), **values})
