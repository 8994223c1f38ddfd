"""Fixtures of the tests of reports."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def browse(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser here")

    def open_page(path: Path) -> str:
        """The page as the browser has it once its scripts have run."""
        quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", *quiet]
        command += [
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=5000",
            "--dump-dom",
            str(path),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return re.sub(r"<(script|style).*?</\1>", "", done.stdout, flags=re.DOTALL)

    return open_page
