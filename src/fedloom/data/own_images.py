"""`folder:PATH` and `domains:PATH`: a person's own images as a data set."""

from fedloom.data.cache import cached
from fedloom.data.content import Dataset
from fedloom.data.folders import read_domains, read_folder
from fedloom.data.pictures import is_picture
from fedloom.data.source import files_under
from fedloom.data.spec import Spec
from fedloom.errors import InputError

KINDS = {
    "folder": "images of your own, one folder a class",
    "domains": "images of your own, one folder a domain, then one a class",
}
LARGEST = 1024


def read_own_images(spec: Spec) -> Dataset:
    """The images below the path of `spec`; its option `size` says to how many pixels a side they are resized."""
    size = read_size(spec)
    spec.done()
    assert spec.path is not None
    folder = spec.path
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; {spec.name}:PATH wants one.")
    files = [path for path in files_under(folder) if is_picture(path.name)]

    def make() -> Dataset:
        return read_folder(folder, size) if spec.name == "folder" else read_domains(folder, size=size)

    return cached(f"{spec.name}-{folder.resolve().name}", folder, f"{spec.name} 1 {size}", files, make)


def read_size(spec: Spec, default: int | None = None) -> int | None:
    """The option `size` in pixels a side."""
    if "size" not in spec.options and default is None:
        spec.asked.append("size")
        return None
    size = spec.whole("size", default or 1, 1)
    if size > LARGEST:
        raise InputError(f"size of {spec.name!r} is {size}; expected at most {LARGEST} pixels.")
    return size
