"""Code that Python runs first in every process of a golden run.

It does so because the folder is in PYTHONPATH.
"""

from tests.golden.draws import watch

watch()
