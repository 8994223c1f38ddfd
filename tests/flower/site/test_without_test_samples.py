"""Tests of sites that have training samples and no test samples."""

from pathlib import Path

import pytest

from fedloom.flower.app import read_app_run_config, write_app
from fedloom.flower.server.serve import serve_run
from fedloom.flower.site import handlers
from fedloom.flower.site.handlers import SiteHandler
from tests.support.fake_transport import FakeLink, make_run
from tests.support.flower_apps import OWN, written

WITHOUT = OWN.replace("SiteData((x, y), (x[:5], y[:5]))", "SiteData(train=(x, y))")
TOKENS = """
import numpy as np
from fedloom.flower.site_data import SiteData, SiteDataSpec

TASK = SiteDataSpec(classes=2, shape=(6,), vocabulary_size=9, name="words")


def load(node, client):
    return SiteData(train=(np.arange(60).reshape(10, 6) % 9, np.arange(10) % 2))
"""


@pytest.fixture(autouse=True)
def _a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each site makes its own network, as in a deployment; sites of one process share it."""
    monkeypatch.setattr(handlers, "_last", {})


@pytest.mark.parametrize("client", [0, 1, 4])
@pytest.mark.parametrize(("data", "model"), [(WITHOUT, "mlp"), (TOKENS, "lstm-shakespeare")])
def test_a_site_needs_samples_to_train_on_and_no_others(data: str, model: str, client: int, tmp_path: Path) -> None:
    app = tmp_path / "app"
    write_app(app, make_run(model=model))
    (app / "site_data.py").write_text(data)
    site = SiteHandler(written(app), {"client": client, "data": 1}, app, tmp_path / "site")
    site.build()
    assert site.context.data.test is None
    assert site.context.data.num_examples(client) == (30 if data == WITHOUT else 10)


def test_a_run_over_such_sites_ends(tmp_path: Path) -> None:
    app = tmp_path / "app"
    write_app(
        app, make_run(clients=3, clients_per_round=3, rounds=15, lr=0.5), {"folder": str(tmp_path / "run"), "join": 5.0}
    )
    (app / "site_data.py").write_text(WITHOUT)
    sites = {}
    for k in (2, 1, 0):
        sites[10 + k] = SiteHandler(written(app), {"client": k, "data": str(k)}, app, tmp_path / f"site-{k}")
        handlers._last.clear()
        sites[10 + k].build()
    run = serve_run(FakeLink(sites), *read_app_run_config(written(app), app), app)
    assert run.accuracy == 1.0
    assert run.summary["failed"] == 0
