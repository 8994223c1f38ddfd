"""MATLAB's files, version 5 to 7: the wanted arrays and nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import InputError, brief


def read_mat(path: Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """The arrays called `names`, in that order."""
    from scipy.io import loadmat

    try:
        found = loadmat(path, variable_names=list(names))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from None
    except NotImplementedError:
        raise InputError(f"{path} is in MATLAB's format 7.3; expected version 7 or older.") from None
    except (Exception, MemoryError) as error:  # the reader raises whatever broken bytes lead it to
        raise InputError(f"{path} is not a whole MATLAB file: {brief(error)}.") from None
    if lacking := [name for name in names if not isinstance(found.get(name), np.ndarray)]:
        raise InputError(f"{path} lacks the array {lacking[0]!r}.")
    return [found[name] for name in names]
