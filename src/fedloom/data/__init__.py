"""Data sets, partitions and the samples of each client."""

from fedloom.data.dataset import Dataset, DatasetInfo, select_classes
from fedloom.data.federated import FederatedDataset, PartitionedDataset
from fedloom.data.partitions import PartitionInfo, available_partitions, partition_dataset, partition_indices
from fedloom.data.registry import available_datasets, load_dataset
from fedloom.data.samples import InputTransform, Samples
from fedloom.data.splits import merge_train_and_test, split_client_tests
from fedloom.data.transforms import Augment, make_augment, with_normalization

__all__ = [
    "Augment",
    "Dataset",
    "DatasetInfo",
    "FederatedDataset",
    "InputTransform",
    "PartitionInfo",
    "PartitionedDataset",
    "Samples",
    "available_datasets",
    "available_partitions",
    "load_dataset",
    "make_augment",
    "merge_train_and_test",
    "partition_dataset",
    "partition_indices",
    "select_classes",
    "split_client_tests",
    "with_normalization",
]
