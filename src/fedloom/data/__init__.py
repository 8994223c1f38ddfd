"""Data sets, partitions, and what a client's data look like."""

from fedloom.data.augment import Augment, make_augment
from fedloom.data.classes import keep_classes
from fedloom.data.client_tests import hold_out, merge
from fedloom.data.content import Dataset
from fedloom.data.datasets import DatasetInfo, load
from fedloom.data.federation import Federation, PooledFederation
from fedloom.data.normalize import normalized
from fedloom.data.partition import PartitionInfo, build
from fedloom.data.samples import Prepare, Samples

__all__ = [
    "Augment",
    "Dataset",
    "DatasetInfo",
    "Federation",
    "PartitionInfo",
    "PooledFederation",
    "Prepare",
    "Samples",
    "build",
    "hold_out",
    "keep_classes",
    "load",
    "make_augment",
    "merge",
    "normalized",
]
