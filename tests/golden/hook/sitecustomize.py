"""Python runs this first in every process that a golden run starts with this folder in PYTHONPATH."""

from tests.golden.draws import watch

watch()
