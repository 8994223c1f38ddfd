"""`table:PATH` and `hf:PATH`: a person's own table, or a data set of Hugging Face's that lies on disk."""

from collections.abc import Callable

from fedloom.data.content import Dataset
from fedloom.data.huggingface import read_hf
from fedloom.data.spec import Spec
from fedloom.data.tables import read_table

TABLES: dict[str, str] = {
    "table": "a CSV or Parquet table of your own",
    "hf": "a Hugging Face data set on disk, saved or as Parquet files",
}

_READERS: dict[str, Callable[[Spec], Dataset]] = {"table": read_table, "hf": read_hf}


def read_own_table(spec: Spec) -> Dataset:
    """What the path of `spec` holds."""
    return _READERS[spec.name](spec)
