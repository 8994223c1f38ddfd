"""The tasks and rows of the league: methods, options and their sources.

The hyperparameters were fixed before the first run and are not tuned on any result. They are those of the papers and of
their authors' code, each named below. Of several values the league takes the one for the most similar data: MNIST
before EMNIST and FEMNIST, these before CIFAR-10.
"""

from dataclasses import dataclass, field
from typing import Any

Options = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """A data set and the budget of every method on it."""

    data: str
    settings: dict[str, Any]
    samples: int | None = None
    """Number of training samples, drawn by the seed; None: all. The server holds 5 % of them."""


COMMON: dict[str, Any] = {
    "model": "mlp-128",
    "clients_per_round": 10,
    "rounds": 24,
    "epochs": 2,
    "eval_every": 3,
    "engine": "sequential",
}
"""The network is DynaFed's MLP, which suits FedMA and GAMF. Two epochs suffice for two models of one epoch each, and 24
rounds for eight passes of FedMA over its layers."""
SLOW = ("fedgen", "fedgen 0.2", "feddf", "dynafed", "gamf")
"""Rows that run last, because they take at least five times as long as FedAvg."""
TASKS = (
    # fedloom's own defaults for the digits.
    Task("digits", {"clients": 20, "batch_size": 20, "lr": 0.05}),
    # Plain SGD at 0.1 is from FedCDA's second setting, batches of 50 from FedCross; without weight decay, so that
    # SCAFFOLD's option II is exact.
    Task("fashion-mnist", {"clients": 50, "batch_size": 50, "lr": 0.1}, samples=10_000),
)
PARTITIONS = ("dirichlet:0.1", "dirichlet:0.5", "shards:2")


@dataclass(frozen=True)
class Row:
    """A row of the table: a method, the source of its options, and the options."""

    name: str
    method: str
    source: str
    options: Options = field(default_factory=dict)


def rows(task: Task) -> list[Row]:
    """Return all rows of the table. Methods with several models divide the epochs among them."""
    E, clusters = COMMON["epochs"], task.settings["clients"] // COMMON["clients_per_round"]
    pool = {"models": E, "epochs": 1}
    synthesis = {"L": 10, "iterations": 200, "images_per_class": 5, "label_init": 3.0, "inner_lr": 2.0}
    synthesis |= {"refine_lr": 0.001, "checkpoint": False}
    return [
        Row("fedavg", "fedavg", "the paper: mean by samples"),
        Row("fedavg uniform", "fedavg", "as in DynaFed and FedCDA", {"fedavg": {"weighting": "uniform"}}),
        Row("fedprox", "fedprox", "mu 0.1, FedCross and FedMR for FEMNIST", {"fedprox": {"mu": 0.1}}),
        Row("scaffold II", "scaffold", "the paper: option II, global step 1"),
        Row("scaffold I", "scaffold", "the paper: option I", {"scaffold": {"option": "I"}}),
        Row("feddyn", "feddyn", "alpha 0.01, the authors' example"),
        Row("fedexp", "fedexp", "epsilon 0.1, the authors for EMNIST", {"fedexp": {"epsilon": 0.1}}),
        Row("fedsam", "fedsam", "rho 0.1, Caldarola et al. for CIFAR-10"),
        Row("fedasam", "fedasam", "rho 0.7, eta 0.2, the authors for CIFAR-10"),
        Row(
            "fedasam-swa",
            "fedasam-swa",
            "as fedasam, averaging from 75 % of the rounds; two cycles of 3 rounds instead of the authors' 10",
            {"fedasam-swa": {"cycle": 3}},
        ),
        Row("fedmut", "fedmut", "alpha 4, a0 0.3, T_a 50, the authors' code"),
        Row("clusamp", "clusamp", "the paper: angles"),
        Row(
            "fedcluster",
            "fedcluster",
            "a cluster has as many clients as a round of the other methods",
            {"fedcluster": {"clusters": clusters}},
        ),
        Row("indep", "indep", "FedMR's baseline, no options"),
        Row("fedgen", "fedgen", "the authors for MNIST: alpha and beta 10, 50 steps"),
        Row(
            "feddf",
            "feddf",
            "the authors: Adam 1e-3, batch size 128; 200 steps (about FedBE's 20 epochs) instead of at most 10,000",
            {"feddf": {"steps": 200}},
        ),
        Row("fedbe gaussian", "fedbe", "the paper: 10 samples, 20 epochs, sharpened by 0.5"),
        Row("fedbe dirichlet", "fedbe", "the paper: alpha 1", {"fedbe": {"distribution": "dirichlet"}}),
        Row("abavg", "abavg", "by accuracy alone, as in DynaFed's code"),
        Row("fedlaw", "fedlaw", "the authors for CIFAR-10: Adam 0.01, 20 epochs"),
        Row("fedmix", "fedmix", "lambda 0.2, the paper for FEMNIST; one mean per client", {"fedmix": {"lam": 0.2}}),
        Row("naivemix", "naivemix", "as fedmix", {"naivemix": {"lam": 0.2}}),
        Row("moon", "moon", "mu 5, tau 0.5, the authors for CIFAR-10"),
        Row("fedbn", "fedbn", "no options"),
        Row("fedfomo", "fedfomo", "M 5, epsilon 0.3 falling by 0.05, 20 % for validation, the authors"),
        Row(
            "fedrep",
            "fedrep",
            "one epoch for the body, as in the paper, the others for the head; 10 for the head at the end",
            {"fedrep": {"head_epochs": E - 1, "body_epochs": 1}},
        ),
        Row("fedbabu", "fedbabu", "5 epochs of fine-tuning, the authors"),
        Row("swa", "swa", "4 snapshots (LSS's paper) in the last quarter (SWA's)"),
        Row("swad", "swad", "the authors: 3, 6, 1.3; 20 % for validation"),
        Row("soups uniform", "soups", "LSS's ranges; as many models as epochs, one epoch each", {"soups": pool}),
        Row(
            "soups greedy", "soups", "as soups uniform; 20 % for validation", {"soups": {**pool, "selection": "greedy"}}
        ),
        Row("diwa", "diwa", "the authors' ranges; as many models as epochs, one epoch each", {"diwa": pool}),
        Row(
            "lss",
            "lss",
            "the paper: 4 members, coefficients 3; the members divide the epochs",
            {"lss": {"share": True}},
        ),
        Row("fedma", "fedma", "fixed size, all layers in every round, 5 sweeps"),
        Row("fedma-layers", "fedma-layers", "the paper's passes, fixed size"),
        Row(
            "fedma-layers growing",
            "fedma-layers",
            "the paper: sigma and sigma0 1, gamma 7; clients start with half of the units, so a layer can double",
            {"fedma-layers": {"start": 0.5}},
        ),
        Row("fedcross", "fedcross", "the paper: alpha 0.99, lowest similarity"),
        Row("fedmr", "fedmr", "the paper for its CNN: no first stage"),
        Row(
            "fedcda",
            "fedcda",
            "the paper: K 3, B 3, warm-up for a quarter of the rounds (50 of 200)",
            {"fedcda": {"warmup": COMMON["rounds"] // 4}},
        ),
        Row("dynafed", "dynafed", "the small synthesis of docs/dynafed.md", {"dynafed": synthesis}),
        # Added after the first results, to explain two of them.
        Row(
            "fedgen 0.2",
            "fedgen",
            "alpha and beta 0.2, FedMR's code for CIFAR-10; added later, because the values for MNIST diverged",
            {"fedgen": {"alpha": 0.2, "beta": 0.2}},
        ),
        Row("lss x 4", "lss", "the paper: all epochs for each of 4 members, four times the computation; added later"),
        # Added after the results, with the defaults of fedloom.
        Row("fedavgm", "fedavgm", "momentum 0.9, the paper of FedAdam; server learning rate 1"),
        Row("fedadagrad", "fedadagrad", "beta1 0, tau 0.001, the paper; server learning rate 0.1"),
        Row("fedadam", "fedadam", "beta1 0.9, beta2 0.99, tau 0.001, the paper; server learning rate 0.01"),
        Row("fedyogi", "fedyogi", "as fedadam"),
        Row("fednova", "fednova", "no options"),
        Row("gamf", "gamf", "the authors: 50 sweeps, temperature 10, cooling 0.8; ends with permutations"),
    ]
