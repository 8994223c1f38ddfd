"""The published data sets: what they are, which files hold them, and where those come from."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from fedloom.data import cifar
from fedloom.data.content import Dataset
from fedloom.data.download import Progress, fetch, unpack
from fedloom.data.idx import find_idx, read_pair
from fedloom.data.samples import Prepare
from fedloom.data.sent140 import SENT140
from fedloom.data.shakespeare import SHAKESPEARE
from fedloom.data.source import Source
from fedloom.data.writers import WRITERS, read_writers

TEN_DIGITS = tuple("0123456789")


@dataclass(frozen=True, kw_only=True)
class IdxSource(Source):
    """Four files in MNIST's format."""

    checksums: dict[str, tuple[int, str, str]] = field(repr=False)
    """For each file its count, the SHA-256 of it uncompressed, and the MD5 of the published .gz."""

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self.checksums)

    def complete(self, folder: Path) -> bool:
        return all(find_idx(folder, name) for name in self.files)

    def read(self, folder: Path) -> Dataset:
        official = {name: (count, digest) for name, (count, digest, _) in self.checksums.items()}
        images, labels, test_images, test_labels = (find_idx(folder, name) or folder / name for name in self.files)
        classes = len(self.class_names)
        train = read_pair(images, labels, classes, official)
        test = read_pair(test_images, test_labels, classes, official)
        writers, names = read_writers(folder / WRITERS, len(train))
        return Dataset(train, test, self.class_names, writers, names)

    def download(self, folder: Path, progress: Progress | None) -> None:
        for name, (_, _, md5) in self.checksums.items():
            fetch(f"{self.home}/{name}.gz", folder / f"{name}.gz", md5, progress)


@dataclass(frozen=True, kw_only=True)
class CifarSource(Source):
    """CIFAR's binary version."""

    archive: str
    md5: str
    records: cifar.Records

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.records.train, *self.records.test)

    def complete(self, folder: Path) -> bool:
        return all((folder / name).is_file() for name in self.files)

    def read(self, folder: Path) -> Dataset:
        train, test = (self.records.read(folder, files) for files in (self.records.train, self.records.test))
        return Dataset(train, test, self.class_names)

    def inputs(self, folder: Path) -> list[Path]:
        return [folder / name for name in self.files]

    def download(self, folder: Path, progress: Progress | None) -> None:
        archive = folder / self.archive
        fetch(f"{self.home}/{self.archive}", archive, self.md5, progress)
        sizes = self.records.sizes()
        for size in set(sizes.values()):
            unpack(archive, folder, [name for name in sizes if sizes[name] == size], size)
        archive.unlink()


MNIST = IdxSource(
    name="mnist",
    summary="handwritten digits, grey, 28 x 28",
    shape=(1, 28, 28),
    train=60_000,
    test=10_000,
    prepare=Prepare((0.1307,), (0.3081,)),
    class_names=TEN_DIGITS,
    folders=("mnist",),
    home="https://ossci-datasets.s3.amazonaws.com/mnist",
    checksums={
        "train-images-idx3-ubyte": (
            60_000,
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        ),
        "train-labels-idx1-ubyte": (
            60_000,
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "d53e105ee54ea40749a09fcbcd1e9432",
        ),
        "t10k-images-idx3-ubyte": (
            10_000,
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "9fb629c4189551a2d022fa330f9573f3",
        ),
        "t10k-labels-idx1-ubyte": (
            10_000,
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    },
)

FASHION_MNIST = IdxSource(
    name="fashion-mnist",
    summary="pieces of clothing, grey, 28 x 28",
    shape=(1, 28, 28),
    train=60_000,
    test=10_000,
    prepare=Prepare((0.2860,), (0.3530,)),
    class_names=(
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    folders=("fashion-mnist",),
    system=(Path("/usr/share/datasets/fashion-mnist"),),  # Debian's package dataset-fashion-mnist
    home="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    checksums={
        "train-images-idx3-ubyte": (
            60_000,
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        ),
        "train-labels-idx1-ubyte": (
            60_000,
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "25c81989df183df01b3e8a0aad5dffbe",
        ),
        "t10k-images-idx3-ubyte": (
            10_000,
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "bef4ecab320f06d8554ea6380940ec79",
        ),
        "t10k-labels-idx1-ubyte": (
            10_000,
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    },
)

CIFAR10 = CifarSource(
    name="cifar10",
    summary="photographs of ten kinds of things, colour, 32 x 32",
    shape=(3, 32, 32),
    train=50_000,
    test=10_000,
    prepare=Prepare((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    class_names=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    folders=("cifar-10-batches-bin", "cifar10"),
    home="https://www.cs.toronto.edu/~kriz",
    archive="cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    records=cifar.TEN,
)

CIFAR100 = CifarSource(
    name="cifar100",
    summary="photographs of a hundred kinds of things, colour, 32 x 32",
    shape=(3, 32, 32),
    train=50_000,
    test=10_000,
    prepare=Prepare((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    class_names=cifar.FINE,
    folders=("cifar-100-binary", "cifar100"),
    home="https://www.cs.toronto.edu/~kriz",
    archive="cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    records=cifar.HUNDRED,
)

CIFAR100_COARSE = replace(
    CIFAR100,
    name="cifar100-coarse",
    summary="the photographs of cifar100 with its 20 coarse labels",
    class_names=cifar.COARSE,
    records=cifar.TWENTY,
)

SOURCES: dict[str, Source] = {
    source.name: source for source in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100, CIFAR100_COARSE, SHAKESPEARE, SENT140)
}
