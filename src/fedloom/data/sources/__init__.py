"""The published data sets by name: `DATASET_SOURCES`."""

from fedloom.data.sources.base import DatasetSource
from fedloom.data.sources.cifar import CIFAR10, CIFAR100, CIFAR100_COARSE
from fedloom.data.sources.mnist import FASHION_MNIST, MNIST
from fedloom.data.sources.sent140 import SENT140
from fedloom.data.sources.shakespeare import SHAKESPEARE

DATASET_SOURCES: dict[str, DatasetSource] = {
    source.name: source for source in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100, CIFAR100_COARSE, SHAKESPEARE, SENT140)
}
