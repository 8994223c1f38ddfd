"""The golden runs, in the words of the old commit.

`changes.toml` translates them into today's words.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

BASE = "0f1a25b"
"""The commit that the working tree is held against."""

METHODS = (
    "abavg", "clusamp", "diwa", "dynafed", "fedasam", "fedasam-swa", "fedavg", "fedbabu", "fedbe", "fedbn", "fedcda",
    "fedcluster", "fedcross", "feddf", "feddyn", "fedexp", "fedfomo", "fedgen", "fedlaw", "fedma", "fedma-layers",
    "fedmix", "fedmr", "fedmut", "fedprox", "fedrep", "fedsam", "gamf", "indep", "lss", "moon", "naivemix", "scaffold",
    "soups", "swa", "swad",
)  # fmt: skip
LATER: tuple[str, ...] = ("centralized", "fedadagrad", "fedadam", "fedavgm", "fednova", "fedyogi", "local")
"""Methods that the old commit does not have."""

MODELS = {"norm": "lenet:norm=batch,padding=2", "dense": "mlp-128"}
"""With batch norm, and without."""
ENGINES: dict[str, dict[str, Any]] = {"plain": {"engine": "plain"}, "host": {"engine": "host", "workers": 2}}

SMALL: dict[str, Any] = {
    "clients": 8, "per_round": 4, "rounds": 3, "epochs": 1, "batch_size": 32, "lr": 0.1, "device": "cpu",
    "checkpoint_seconds": 10000,
}  # fmt: skip
TINY = SMALL | {"model": "logreg", "rounds": 2, "engine": "plain"}

DYNAFED = {"L": 2, "s": 1, "inner_steps": 2, "iterations": 2, "images_per_class": 1, "refine_epochs": 1}
QUICK: dict[str, dict[str, Any]] = {
    "feddf": {"steps": 10, "check_every": 5},
    "fedbe": {"epochs": 2, "swa_start": 2, "swa_every": 1},
    "fedlaw": {"epochs": 2},
    "fedcda": {"warmup": 1},
    "dynafed": DYNAFED,
    "fedasam-swa": {"start": 0.0, "cycle": 1},
    "fedrep": {"head_epochs": 1, "final_epochs": 1},
    "fedbabu": {"finetune_epochs": 1},
    "fedgen": {"steps": 5},
    "fedcluster": {"clusters": 2},
    "lss": {"models": 2},
    "diwa": {"models": 2},
    "soups": {"models": 2},
}
"""Options that save time, or let a method do in three rounds what it does later."""
WANT_SERVER_DATA = ("abavg", "fedbe", "feddf", "fedlaw")


@dataclass(frozen=True)
class Case:
    """Commands that are given one after the other, in a folder of their own."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    files: str = ""
    """What is written into the folder before (see files.py)."""
    stop: str = ""
    """The purpose and the round of a draw in the first command at which it gets a Ctrl-C."""
    needs: str = ""
    """A package without which the case is skipped."""

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


def words(settings: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Settings and options of methods as a command takes them."""
    found: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        found += [flag] if value is True else [flag, str(value)]
    for method, pairs in options.items():
        for option, value in pairs.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            found += ["--set", f"{method}.{option}={text}"]
    return tuple(found)


def options_for(method: str, given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What saves time in each part of a method, and what is given."""
    found = {part: dict(QUICK[part]) for part in method.split("+") if part in QUICK}
    for part, pairs in given.items():
        found[part] = {**found.get(part, {}), **pairs}
    return found


def run(
    method: str, settings: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]] | None = None, out: str = "run"
) -> tuple[str, ...]:
    """The command of one run."""
    if method in WANT_SERVER_DATA and "server_data" not in settings:
        settings = {**settings, "server_data": "split:0.05"}
    return ("run", method, *words(settings, options_for(method, options or {})), "--quiet", "--out", out)


RESUME = ("resume", "run", "--quiet")
VERIFY = ("verify", "run", "--quiet")


def of_methods() -> Iterable[Case]:
    """Each method with and without batch norm on both engines, and once with lost clients and a resume."""
    for method in METHODS:
        for model, network in MODELS.items():
            for engine, settings in ENGINES.items():
                yield Case(f"{method}/{model}/{engine}", (run(method, SMALL | {"model": network} | settings),))
        hard = SMALL | {"model": MODELS["norm"], "rounds": 4, "lost": 0.3, "lr_decay": 0.9, "engine": "plain"}
        goes_on = (*RESUME, "--engine", "host", "--workers", "2")
        stop = "fedma layer 1|1" if method == "fedma-layers" else "select|1"  # which selects once for all layers
        yield Case(f"{method}/lost-resumed", (run(method, hard), goes_on), stop=stop)


def of_options() -> Iterable[Case]:
    """Options that take other ways through a method."""
    given: dict[str, list[dict[str, Any]]] = {
        "abavg": [{"samples": True}],
        "clusamp": [{"distance": "l2"}, {"distance": "l1"}],
        "diwa": [{"selection": "uniform", "estimate": False}, {"batch_factors": "[0.5,2.0]", "keep": "last"}],
        "dynafed": [
            {"target": "several", "distance": "cosine", "inner_batch": 4, "optimizer": "sgd"},
            {"at_once": True, "augment": "none", "refine_optimizer": "sgd", "checkpoint": False},
        ],
        "fedavg": [{"server_lr": 0.7}, {"weighting": "uniform", "server_lr": 1.5}],
        "fedasam-swa": [{"server_lr": 0.7}],
        "fedcluster": [{"server_lr": 0.7, "clusters": 3}],
        "fedbabu": [{"finetune": "head"}, {"finetune": "body"}],
        "fedbe": [{"distribution": "normalised"}, {"distribution": "dirichlet"}],
        "fedcda": [{"selection": "optimal"}, {"selection": "random"}, {"selection": "newest", "warmup_mode": "newest"}],
        "fedcross": [
            {"selection": "in-order"},
            {"selection": "highest", "similarity": "layerwise"},
            {"propeller_rounds": 1, "dynamic_rounds": 2, "propellers": 2},
            {"first_stage": 1},
        ],
        "feddf": [{"drop": True}],
        "feddyn": [{"deploy": "model", "alpha": 0.1}],
        "fedexp": [{"average": False, "weighting": "uniform"}],
        "fedlaw": [{"form": "quad"}, {"swa": True, "swa_start": 0}, {"shrink": False}],
        "fedma-layers": [{"start": 0.5}],
        "fedmix": [{"groups": 3}],
        "fedmr": [
            {"granularity": "tensor"},
            {"granularity": "segment:0.25"},
            {"first_stage": 1},
            {"secure": True},
            {"secure": True, "mixed": True, "send_probability": 0.8},
        ],
        "fedmut": [{"granularity": "tensor", "T_a": 2}],
        "gamf": [{"output": "soft"}],
        "lss": [
            {"spread": "volume", "estimate": True, "affinity": 4.0},
            {"distance": "l2", "share": True, "first_alone": True, "new_optimizer": False, "scale": "absolute"},
        ],
        "scaffold": [{"option": "I"}],
        "soups": [{"selection": "greedy", "keep": "best", "estimate": False}],
        "swa": [{"snapshots": 2, "start": 0.3, "lr_end": 0.1, "estimate": False}],
        "swad": [{"checks": 4, "overfit_patience": 2, "optimum_patience": 1, "estimate": False}],
    }
    for method, variants in given.items():
        for number, options in enumerate(variants, 1):
            settings = SMALL | {"model": MODELS["norm"], "engine": "plain"}
            yield Case(f"{method}/options-{number}", (run(method, settings, {method: options}),))


def of_compositions() -> Iterable[Case]:
    """Parts of several methods together."""
    for method in (
        "fedcross+fedprox", "fedmr+scaffold", "lss+dynafed", "fedcda+moon", "fedavg+fedprox", "feddyn+feddf",
        "fedcross+fedmr", "fedexp+swad+fedbe", "fedbn+fedmut",
    ):  # fmt: skip
        settings = SMALL | {"model": MODELS["norm"], "engine": "host", "workers": 2}
        if set(method.split("+")) & set(WANT_SERVER_DATA):
            settings["server_data"] = "split:40"
        yield Case(f"{method}/norm/host", (run(method, settings),))


def of_training() -> Iterable[Case]:
    """Settings of local training, and of the federation."""
    given: dict[str, dict[str, Any]] = {
        "adam-kept": {"optimizer": "adam", "lr": 0.01, "keep_optimizer": True, "rounds": 4},
        "momentum-kept": {"momentum": 0.9, "nesterov": True, "keep_optimizer": True, "weight_decay": 0.001},
        "clip": {"clip": 0.5, "steps": 3, "momentum": 0.5},
        "whole-batch": {"batch_size": 0, "statistics": "estimated"},
        "augment": {"augment": "crop+flip", "channels_last": "no"},
        "validation": {"validation": 0.3},
        "client-test": {"client_test": 0.25, "eval_every": 2},
        "classes": {"classes": "0-4", "normalize": "mean-std"},
        "seed": {"seed": 7, "min_clients": 4},
        "too-few": {"min_clients": 4, "lost": 0.6},
        "nonsense": {"lr": -1},
        "unknown-model": {"model": "nothing"},
    }
    for name, settings in given.items():
        base = SMALL | {"model": MODELS["norm"], "engine": "host", "workers": 2}
        yield Case(f"fedavg/{name}", (run("fedavg", base | settings),))
    kept = TINY | {"optimizer": "adam", "lr": 0.01, "keep_optimizer": True, "rounds": 4, "checkpoint_seconds": 0}
    yield Case("fedprox/adam-kept-resumed", (run("fedprox", kept), RESUME), stop="select|2")
    yield Case("fedcross/verified", (run("fedcross", TINY), VERIFY))
    for method in ("fedprox", "swad", "lss"):
        yield Case(f"{method}/validation", (run(method, SMALL | {"engine": "plain", "validation": 0.2}),))
    cached = SMALL | {"engine": "plain", "cache_dir": "cache"}
    yield Case("fedcda/cache", (run("fedcda", cached), RESUME), stop="select|1")
    exchange = SMALL | {"engine": "host", "workers": 2, "rounds": 4, "lost": 0.2}
    yield Case("fedmr/secure-resumed", (run("fedmr", exchange, {"fedmr": {"secure": True}}), RESUME), stop="select|1")


def of_networks() -> Iterable[Case]:
    """Other networks."""
    for name, network in {
        "lenet": "lenet:padding=2",
        "group": "lenet:norm=group,padding=2",
        "stateless": "lenet:norm=batch-stateless,padding=2",
        "resnet20": "resnet20:width=4",
        "bottleneck": "resnet20-bottleneck:width=4",
        "resnet18": "resnet18:width=4",
        "convnet": "convnet",
        "projection": "mlp-128+projection",
    }.items():
        for method in ("fedavg", "moon") if name == "projection" else ("fedavg",):
            settings = TINY | {"model": network, "classes": "0-2", "clients": 4, "batch_size": 64}
            yield Case(f"{method}/network-{name}", (run(method, settings),))
    adapted = TINY | {"model": "vit-tiny-lora:width=16,depth=1,heads=2", "classes": "0-2"}
    yield Case("fedavg/network-vit-lora", (run("fedavg", adapted),), needs="peft")


def of_data() -> Iterable[Case]:
    """Partitions, data on the server, and data that are no digits."""
    for spec in (
        "iid", "dirichlet:0.1,min=2", "dirichlet-blocks:0.5,block=4", "dirichlet-client:0.5,prior=ones",
        "dirichlet-equal:0.5", "shards:2", "labels:3", "quantity:0.5,min=4",
    ):  # fmt: skip
        yield Case(f"fedavg/partition-{spec.split(':')[0]}", (run("fedavg", TINY | {"partition": spec}),))
    free = {name: value for name, value in TINY.items() if name not in ("clients", "per_round")}
    listed = free | {"partition": "file:parts.json"}
    yield Case("fedavg/partition-file", (run("fedavg", listed),), files="positions")
    income, score = "table:people.csv,label=income,owner=site,drop=score", "table:people.csv,label=score,drop=site"
    natural = {"partition": "natural"}
    yield Case("fedavg/table", (run("fedavg", free | natural | {"data": income}),), files="table")
    yield Case(
        "fedprox/regression", (run("fedprox", TINY | {"data": score, "partition": "quantity:1"}),), files="table"
    )
    texts = free | natural | {"data": "hf:reviews,owner=user,length=8", "model": "lstm-sent140:hidden=6,embedding=4"}
    yield Case("fedavg/huggingface", (run("fedavg", texts),), files="parquet", needs="pyarrow")
    letters = free | natural | {"data": "shakespeare", "model": "lstm-shakespeare:hidden=6,embedding=4"}
    yield Case("fedavg/shakespeare", (run("fedavg", letters),), files="shakespeare")
    yield Case("scaffold/shakespeare", (run("scaffold", letters),), files="shakespeare")
    cheer = free | natural | {"data": "sent140:length=6", "model": "lstm-sent140:hidden=6,embedding=4"}
    yield Case("fedcross/sent140", (run("fedcross", cheer),), files="tweets")
    images = free | {"partition": "domain", "data": "domains:pictures", "augment": "flip"}
    yield Case("fedavg/domains", (run("fedavg", images),), files="pictures", needs="PIL")
    folder = TINY | {"data": "folder:pictures/photo", "clients": 4, "partition": "iid", "normalize": "unit"}
    yield Case("fedavg/folder", (run("fedavg", folder),), files="pictures", needs="PIL")


def of_privacy() -> Iterable[Case]:
    """Clipped updates, and noise."""
    clipped = SMALL | {"engine": "plain", "clip_update": 0.5, "partition": "iid"}
    noisy = clipped | {"noise": 1.0, "delta": 0.01, "rounds": 4}
    yield Case("fedavg/clipped", (run("fedavg", clipped),))
    for method in ("fedavg", "fedcross", "scaffold"):
        yield Case(f"{method}/private", (run(method, noisy),), needs="dp_accounting")
    hosted = noisy | {"engine": "host", "workers": 2, "lost": 0.2}
    yield Case(
        "fedavg/private-resumed", (run("fedavg", hosted), RESUME), stop="privacy selection|1", needs="dp_accounting"
    )
    bounded = noisy | {"max_epsilon": 4.0}
    yield Case("fedavg/private-bounded", (run("fedavg", bounded),), needs="dp_accounting")


def of_commands() -> Iterable[Case]:
    """Commands beside `run`."""
    demo = {"partition": "dirichlet:0.1", "rounds": 4, "epochs": 1, "engine": "host", "workers": 2, "device": "cpu"}
    methods = ("fedavg", "scaffold", "fedcross", "fedmr", "fedcda")
    options = {"fedcda": {"warmup": 2}}
    yield Case(
        "compare/demo", (("compare", *methods, *words({"seeds": 2, **demo}, options), "--quiet", "--out", "demo"),)
    )
    grid = ("compare", "--grid", "fedavg,fedcross x sgd,fedprox x none,dynafed")
    yield Case(
        "compare/grid", ((*grid, *words(TINY | {"rounds": 3}, {"dynafed": DYNAFED}), "--quiet", "--out", "grid"),)
    )
    begin = run("fedavg", SMALL | {"engine": "plain", "model": MODELS["norm"], "classes": "0-4"}, out="start")
    start = SMALL | {"engine": "plain", "model": MODELS["norm"], "init": "start"}
    yield Case("init/other-classes", (begin, run("fedavg", start)))
    yield Case("init/new-head", (begin, run("fedmr", start | {"classes": "0-4", "new_head": True})))
    divided = ("partition", "digits", "dirichlet:0.3", "--clients", "8", "--seed", "3", "--out", "parts.json")
    yield Case("partition/digits", (divided, run("fedavg", TINY | {"partition": "file:parts.json"})))


def of_flower() -> Iterable[Case]:
    """A federation of real processes."""
    sites = SMALL | {"engine": "flower", "clients": 3, "per_round": 3, "rounds": 2, "deadline": 120, "device": "cpu"}
    yield Case("scaffold/flower", (run("scaffold", sites | {"model": MODELS["norm"]}),), needs="flwr")


CASES = {
    case.name: case
    for cases in (
        of_methods(), of_options(), of_compositions(), of_training(), of_networks(), of_data(), of_privacy(),
        of_commands(), of_flower(),
    )
    for case in cases
}  # fmt: skip

QUICK_CASES = (
    "fedavg/norm/plain", "fedavg/norm/host", "fedavg/augment", "fedavg/adam-kept", "fedavg/private",
    "fedcross/norm/host", "fedmr/options-4", "fedcda/dense/host", "lss/norm/plain", "dynafed/dense/plain",
    "scaffold/lost-resumed", "fedbn/norm/host", "fedavg/shakespeare",
)  # fmt: skip
"""Those that `make test` holds against stored values."""
