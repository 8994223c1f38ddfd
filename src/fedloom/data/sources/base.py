"""`DatasetSource`: base class of data sets that are read from files."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedloom.data.cache import Progress
from fedloom.data.dataset import Dataset, DatasetSpec
from fedloom.data.samples import InputTransform
from fedloom.errors import InputError
from fedloom.utils.data_folders import ExpectedFiles
from fedloom.utils.storage import list_files_recursively


@dataclass(frozen=True, kw_only=True)
class DatasetSource(ABC):
    """A data set that lives in files of one folder."""

    name: str
    summary: str
    shape: tuple[int, ...]
    num_train_examples: int | None
    """How many training samples were published; None where that depends on how the files were made."""
    num_test_examples: int | None
    transform: InputTransform
    class_names: tuple[str, ...]
    folder_names: tuple[str, ...]
    """What the folder may be called; a download makes the first."""
    system_folders: tuple[Path, ...] = ()
    """Where packages of the operating system put it."""
    base_url: str
    """The address that its files are under."""
    manual_steps: str = ""
    """What a person must do to get the files; empty where they can be downloaded."""
    file_names: tuple[str, ...] = ()
    """The files a person would put in place by hand."""
    file_patterns: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """The parts of `expected_files`."""
    version: int = 1
    """Counts up when `read` gives something else for the same files."""

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files a person would put in place by hand."""
        return self.file_names

    @property
    def expected_files(self) -> ExpectedFiles:
        """The files by which a folder is recognized."""
        return ExpectedFiles(self.file_patterns)

    @abstractmethod
    def read(self, folder: Path) -> Dataset:
        """What the files hold, everything checked."""

    def download(self, folder: Path, progress: Progress | None) -> None:
        """Makes `folder` complete."""
        raise InputError(f"{self.name!r} must be downloaded by hand: {self.manual_steps}.")

    def is_complete(self, folder: Path) -> bool:
        """Whether `folder` holds all files, or enough of them."""
        return self.expected_files.is_complete(folder)

    def missing_parts(self, folder: Path) -> tuple[str, ...]:
        """Parts that a complete `folder` lacks and that can be done without."""
        return self.expected_files.missing_parts(folder)

    def input_files(self, folder: Path) -> list[Path]:
        """Every file that `read` may look at."""
        return list_files_recursively(folder)

    def cache_key(self) -> str:
        """What beside the files decides what `read` gives."""
        return f"{self.name} {self.version}"

    def with_options(self, spec: DatasetSpec) -> "DatasetSource":
        """This data set, read with the options it takes from `spec`."""
        return self
