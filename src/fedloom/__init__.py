"""Federated learning on heterogeneous data: many models on the server, exact runs, one command."""

from fedloom._version import __version__
from fedloom.api import Run, resume, run, verify
from fedloom.bench import Batch, Bench, Pass
from fedloom.comparing import Compared, compare
from fedloom.data import Federation, Samples
from fedloom.errors import FedloomError, InputError
from fedloom.exchange import Job, Update
from fedloom.methods import Companion, Context, Local, Method, Options, Refiner, Server, register
from fedloom.pretraining import Pretrained, pretrain
from fedloom.rows import Layout, Mean

__all__ = [
    "Batch",
    "Bench",
    "Companion",
    "Compared",
    "Context",
    "Federation",
    "FedloomError",
    "InputError",
    "Job",
    "Layout",
    "Local",
    "Mean",
    "Method",
    "Options",
    "Pass",
    "Pretrained",
    "Refiner",
    "Run",
    "Samples",
    "Server",
    "Update",
    "__version__",
    "compare",
    "pretrain",
    "register",
    "resume",
    "run",
    "verify",
]
