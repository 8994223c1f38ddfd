"""Python files that a user brings: run as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from fedloom.errors import FedloomError, InputError


def run_file(path: Path, name: str) -> ModuleType:
    """Run the file at `path` as the module `name`; the same file again is not run twice."""
    file = path.resolve()
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"'{path}' is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except FedloomError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"{path} cannot be imported: {type(error).__name__}: {error}.") from error
    return module
