"""Tests of Flower apps: files, the sites' own data, secure defaults."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.config import replace_config
from fedloom.errors import InputError
from fedloom.flower import commands
from fedloom.flower.app import ServerAppSettings, read_app_run_config, resolve_app_config, write_app
from fedloom.flower.server.serve import serve_run
from fedloom.flower.site.client_app import _site_directory
from fedloom.flower.site.handlers import SiteHandler
from fedloom.flower.site_data import site_data_clients
from fedloom.flower.trust.agreement import agreement_settings
from fedloom.runs.directory import claim_directory
from tests.support.fake_transport import FakeLink, make_run
from tests.support.flower_apps import OWN, written

FILES = ["README.md", "client_app.py", "pyproject.toml", "server_app.py", "site_data.py"]


def test_an_app_says_the_same_run(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("")
    config = make_run(
        method="fedprox+fedcross",
        options={"fedprox": {"mu": 0.5}, "fedcross": {"alpha": 0.9}},
        imports=[str(mine)],
        momentum=0.9,
        clip=1.5,
        deadline=12.5,
        nodes=3,
    )
    write_app(tmp_path / "app", config, {"folder": "/somewhere"})
    assert sorted(p.name for p in (tmp_path / "app").iterdir()) == sorted([*FILES, "mine.py"])
    found, server = read_app_run_config(written(tmp_path / "app"), tmp_path / "app")
    here = replace_config(config, imports=[str(tmp_path / "app" / "mine.py")], engine="auto", nodes=0)
    assert found == here
    assert server == ServerAppSettings(folder="/somewhere")


def test_a_variant_is_the_same_settings_for_the_server_and_the_sites(tmp_path: Path) -> None:
    plain = {"method": "fedprox", "options.fedprox.mu": 0.1, "lr": 0.2, "clients": 3}
    variant = {"method": "fedprox:mu=0.1,lr=0.2", "options.fedprox.mu": 5, "lr": 0.7, "clients": 3}
    config = read_app_run_config(variant, tmp_path)[0]
    assert config == replace_config(read_app_run_config(plain, tmp_path)[0], variant="fedprox:mu=0.1,lr=0.2")
    settings = [agreement_settings(resolve_app_config(given, tmp_path, None)) for given in (plain, variant)]
    assert settings[0] == settings[1]
    write_app(tmp_path / "app", config)
    assert "variant" not in written(tmp_path / "app")
    with pytest.raises(InputError, match="unknown key 'mux'"):
        read_app_run_config({"method": "fedprox:mux=0.1"}, tmp_path)


def test_flower_is_all_that_an_app_asks_to_be_installed(tmp_path: Path) -> None:
    write_app(tmp_path / "app", make_run())
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == ["flwr"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rounds": 0}, "rounds must be"),
        ({"ruonds": 3}, "unknown setting 'ruonds'"),
        ({"options.fedprox.mu": 1, "join": -1}, "join must be"),
    ],
)
def test_wrong_settings_are_said(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        read_app_run_config(given, tmp_path)


def test_what_flower_cannot_carry_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"fedcda.x is \[1\]; Flower's run config takes only numbers, strings, true"):
        write_app(tmp_path / "app", make_run(options={"fedcda": {"x": [1]}}))


def test_sites_bring_data_of_their_own(tmp_path: Path) -> None:
    app = tmp_path / "app"
    write_app(
        app, make_run(clients=3, clients_per_round=3, rounds=15, lr=0.5), {"folder": str(tmp_path / "run"), "join": 5.0}
    )
    (app / "site_data.py").write_text(OWN)
    given = written(app)
    sites = {10 + k: SiteHandler(given, {"data": str(k)}, app, tmp_path / f"site-{k}") for k in range(3)}  # no numbers
    link = FakeLink(sites)
    config, server = read_app_run_config(given, app)
    run = serve_run(link, config, server, app)
    assert run.config.data == "flowers"
    assert run.accuracy == 1.0
    assert sorted(site.client_ids for site in sites.values()) == [(0,), (1,), (2,)]
    travelled = b"".join(bytes(block.data) for p in (*link.asked, *link.answered) for block in p.arrays.values())
    for site in sites.values():
        samples = site.context.data.client_samples(site.client_ids[0])
        assert len(samples) == 30
        assert samples.x[0].numpy().tobytes() not in travelled


def test_another_task_in_the_same_process_has_a_network_of_its_own(tmp_path: Path) -> None:
    widths = []
    for width in (4, 6):
        app = tmp_path / f"app-{width}"
        write_app(app, make_run(clients=1, clients_per_round=1, rounds=1))
        (app / "site_data.py").write_text(
            OWN.replace("shape=(4,)", f"shape=({width},)")
            .replace("eye(4", f"eye({width}")
            .replace("(30, 4)", f"(30, {width})")
        )
        site = SiteHandler(written(app), {"client": 0, "data": 1}, app, tmp_path / f"site-{width}")
        site.build()
        widths.append(site.layout.entries[0].shape[1])
    assert widths == [4, 6]


def test_a_finished_or_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    app = tmp_path / "app"
    write_app(app, make_run(clients=2, clients_per_round=2, rounds=2), {"folder": str(tmp_path / "run"), "join": 0.3})
    given = written(app)
    link = FakeLink({k: SiteHandler(given, {"client": k}, app, tmp_path / f"site-{k}") for k in range(2)})
    config, server = read_app_run_config(given, app)
    first = serve_run(link, config, server, app)
    asked = len(link.asked)
    again = serve_run(link, config, server, app)
    assert again.digest == first.digest
    assert [p.kind for p in link.asked[asked:]] == ["hello", "hello"]


def test_a_run_does_not_go_on_with_other_settings(tmp_path: Path) -> None:
    """The sites would train with the new ones, and the folder would tell the old ones."""
    app = tmp_path / "app"
    write_app(app, make_run(clients=2, clients_per_round=2, rounds=2), {"folder": str(tmp_path / "run"), "join": 5.0})
    given = written(app)
    link = FakeLink({9 + k: SiteHandler(given, {"client": k}, app, tmp_path / f"site-{k}") for k in range(2)})
    serve_run(link, *read_app_run_config(given, app), app)
    asked = len(link.asked)
    for change, before, now in [
        ({"lr": 0.7}, "lr 0.05", "lr 0.7"),
        ({"rounds": 3}, "rounds 2", "rounds 3"),
        ({"deadline": 77.0}, None, None),
    ]:
        config, server = read_app_run_config({**given, **change}, app)
        if before is None:
            serve_run(link, config, server, app)  # how long the server waits is its own affair
            continue
        with pytest.raises(InputError, match=f"run holds a run with {before}, and this one has {now}: give the same"):
            serve_run(link, config, server, app)
        assert len(link.asked) == asked, "nobody was told"


def test_a_second_server_does_not_disturb_the_sites_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.runs.directory.PATIENCE", 1)
    app, folder = tmp_path / "app", tmp_path / "run"
    write_app(app, make_run(clients=2, clients_per_round=2, rounds=2), {"folder": str(folder), "join": 0.3})
    given = written(app)
    link = FakeLink({k: SiteHandler(given, {"client": k}, app, tmp_path / f"site-{k}") for k in range(2)})
    config, server = read_app_run_config(given, app)
    for finished in (False, True):
        with (
            claim_directory(folder),
            pytest.raises(InputError, match=r"another process is at work on .*run; wait for it"),
        ):
            serve_run(link, config, server, app)
        assert link.asked == []
        assert folder.exists() == finished
        if not finished:
            serve_run(link, config, server, app)
            link.asked.clear()


def test_what_the_server_lacks_is_said_before_anybody_waits(tmp_path: Path) -> None:
    app = tmp_path / "app"
    write_app(
        app, make_run(method="feddf", clients=3, clients_per_round=3), {"folder": str(tmp_path / "run"), "join": 600.0}
    )
    (app / "site_data.py").write_text(OWN)
    words = r"feddf needs samples at the server, and site_data.py names none: give SiteDataSpec\(..., server_data="
    with pytest.raises(InputError, match=words):
        serve_run(FakeLink({}), *read_app_run_config(written(app), app), app)
    assert not (tmp_path / "run").exists()


def test_what_the_server_holds_may_come_with_the_task(tmp_path: Path) -> None:
    app = tmp_path / "app"
    config = make_run(method="feddf", clients=3, clients_per_round=3, rounds=2)
    write_app(app, config, {"folder": str(tmp_path / "run"), "join": 5.0})
    held = "server_data=(np.eye(4, dtype=np.float32)[[0, 1, 2] * 10], np.array([0, 1, 2] * 10)), "
    (app / "site_data.py").write_text(OWN.replace("classes=3, ", f"classes=3, {held}"))
    given = written(app)
    link = FakeLink(
        {9 + k: SiteHandler(given, {"client": k, "data": k}, app, tmp_path / f"site-{k}") for k in range(3)}
    )
    first = serve_run(link, *read_app_run_config(given, app), app)
    assert first.config.server_data == "own"
    assert first.history[-1]["failed"] == 0
    assert serve_run(link, *read_app_run_config(given, app), app).digest == first.digest, "and it can go on"


@pytest.mark.parametrize(("groups", "served"), [(3, True), (4, False), (1000, False)])
def test_a_mean_of_few_samples_does_not_leave_a_site(tmp_path: Path, groups: int, served: bool) -> None:
    app = tmp_path / "app"
    options = {"fedmix": {"groups": groups, "lam": 0.1}}
    config = make_run(method="fedmix", options=options, clients=2, clients_per_round=2, rounds=2)
    write_app(app, config, {"folder": str(tmp_path / "run"), "join": 5.0})
    (app / "site_data.py").write_text(OWN)
    given = written(app)
    link = FakeLink(
        {9 + k: SiteHandler(given, {"client": k, "data": k}, app, tmp_path / f"site-{k}") for k in range(2)}
    )
    run = serve_run(link, *read_app_run_config(given, app), app)
    lost = f"it has 30 samples, and {10 * groups} are needed"
    reasons = list(run.history[-1]["failed_clients"].values())
    assert [lost in reason for reason in reasons] == ([] if served else [True, True])
    assert served == any("upload/x" in answer.arrays for answer in link.answered)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("TASK = 3", "TASK in site_data.py must be a fedloom.flower.site_data.SiteDataSpec or None, not 3"),
        ("import nothing_like_it", "cannot be imported: ModuleNotFoundError"),
        (
            "from fedloom.flower.site_data import SiteDataSpec\nTASK = SiteDataSpec(3, (4,))",
            "must have a function `load",
        ),
        (
            "from fedloom.flower.site_data import SiteDataSpec\nTASK = SiteDataSpec(3, (4,))\ndef load(n, c): return 3",
            "must return .x, y.",
        ),
        (
            "from fedloom.flower.site_data import SiteDataSpec\nTASK = SiteDataSpec(3, (4,))\ndef load(n, c): 1 / 0",
            "ZeroDivisionError",
        ),
        (
            "from fedloom.flower.site_data import SiteDataSpec\nimport numpy as np\nTASK = SiteDataSpec(3, (4,))\n"
            "def load(n, c): return np.ones((2, 4)), np.array([0, 3])",
            "client 0 has labels from 0 to 3; the task says labels from 0 to 2",
        ),
        (
            "from fedloom.flower.site_data import SiteDataSpec\nimport numpy as np\nTASK = SiteDataSpec(3, (4,))\n"
            "def load(n, c): return np.ones((2, 5)), np.array([0, 1])",
            r"client 0 has inputs of shape \(5,\); the task says \(4,\)",
        ),
    ],
)
def test_what_is_wrong_with_a_sites_file_is_said(text: str, says: str, tmp_path: Path) -> None:
    app = tmp_path / "app"
    write_app(app, make_run(clients=1, clients_per_round=1, data="digits"))
    (app / "site_data.py").write_text(text)
    site = SiteHandler(written(app), {"client": 0}, app, tmp_path / "site")
    with pytest.raises(InputError, match=says):
        site.build()


def test_a_client_that_is_not_there_is_said(tmp_path: Path) -> None:
    app = tmp_path / "app"
    write_app(app, make_run())
    with pytest.raises(InputError, match="there is no client 7: the run has 5 clients, numbered from 0"):
        SiteHandler(written(app), {"client": 7}, app, tmp_path / "site").build()


@pytest.mark.parametrize(
    ("node", "clients"),
    [({}, ()), ({"client": 3}, (3,)), ({"clients": "4,2,2"}, (2, 4)), ({"partition-id": 6}, (6,))],
)
def test_a_node_names_its_clients(node: dict[str, Any], clients: tuple[int, ...]) -> None:
    assert site_data_clients(node) == clients


@pytest.mark.parametrize("given", ["x", "-1", "1.5", ""])
def test_a_nodes_client_is_a_number(given: str) -> None:
    with pytest.raises(InputError, match="must be a number from 0"):
        site_data_clients({"client": given})


def test_a_sites_folder_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir(mode=0o755)
    SiteHandler({}, {}, tmp_path, tmp_path / "site")
    assert (tmp_path / "site").stat().st_mode & 0o777 == 0o700


class FakeContext:
    def __init__(self, **node: Any) -> None:
        self.node_config, self.node_id, self.run_id = node, 5, 6


def test_sites_without_a_folder_get_one_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    places: list[Any] = [FakeContext(), FakeContext(**{"partition-id": 0}), FakeContext(**{"partition-id": 1})]
    assert len({_site_directory(context) for context in places}) == 3
    assert all(_site_directory(context).is_relative_to(tmp_path) for context in places)
    assert _site_directory(FakeContext(folder="/data/site")) == Path("/data/site")  # type: ignore[arg-type]


# commands


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.3", "::", "server.example.org", "", "127.0.0.1.example.org"])
def test_nothing_starts_insecurely_but_on_this_machine(host: str) -> None:
    with pytest.raises(InputError, match=r"a SuperLink for .* needs --certificates"):
        commands.build_superlink_command(None, host, 8000)
    with pytest.raises(InputError, match=r"a SuperNode for .* needs --ca and --key"):
        commands.build_supernode_command(f"{host}:8000", {})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.3.2.1"])
def test_on_this_machine_it_may(host: str) -> None:
    assert "--insecure" in commands.build_superlink_command(None, host, 8000)
    assert "--insecure" in commands.build_supernode_command(f"{host}:8000", {})
    for half, missing in (({"ca": Path("ca.crt")}, "--key"), ({"key": Path("node")}, "--ca")):
        with pytest.raises(InputError, match=f"{missing} is missing: a SuperNode needs both --ca and --key"):
            commands.build_supernode_command(f"{host}:8000", {}, **half)


def test_with_certificates_nodes_are_authenticated(tmp_path: Path) -> None:
    for name in ("ca.crt", "server.pem", "server.key", "node"):
        (tmp_path / name).write_text("")
    words = commands.build_superlink_command(tmp_path, "0.0.0.0", 8000)
    assert "--insecure" not in words
    assert "--enable-supernode-auth" in words
    assert "--disable-runtime-dependency-installation" in words
    words = commands.build_supernode_command("server:8000", {"client": 1}, tmp_path / "ca.crt", tmp_path / "node")
    assert "--insecure" not in words
    assert words[words.index("--auth-supernode-private-key") + 1] == str(tmp_path / "node")
    with pytest.raises(InputError, match="there is no file"):
        commands.build_superlink_command(tmp_path / "nowhere", "0.0.0.0", 8000)


@pytest.mark.parametrize("host", ["0.0.0.0", "server.example.org", "[::]"])
def test_flowers_own_address_is_on_this_machine_wherever_supernodes_connect(host: str, tmp_path: Path) -> None:
    for name in ("ca.crt", "server.pem", "server.key"):
        (tmp_path / name).write_text("")
    words = commands.build_superlink_command(tmp_path, host, 8000, 9000)
    assert words[4:10] == [host.strip("[]"), "8000", "--host", "127.0.0.1", "--port", "9000"]
    with pytest.raises(InputError, match="both have 8000"):
        commands.build_superlink_command(tmp_path, host, 8000, 8000)


def test_the_roster_that_a_site_needs_is_looked_for_at_once(tmp_path: Path) -> None:
    node = {"roster": str(tmp_path / "file"), "folder": str(tmp_path)}
    with pytest.raises(InputError, match=r"there is no file .*file\."):
        commands.build_supernode_command("localhost:8000", node)
    (tmp_path / "file").write_text("")
    assert f'roster="{tmp_path / "file"}"' in commands.build_supernode_command("localhost:8000", node)[-1]


@pytest.mark.parametrize("secure", [False, True])
def test_an_app_says_what_the_exchange_of_layers_needs(tmp_path: Path, secure: bool) -> None:
    write_app(tmp_path / "app", make_run(method="fedmr", options={"fedmr": {"secure": secure}}))
    said = (tmp_path / "app" / "README.md").read_text()
    assert ("--roster roster.pub" in said) == secure


def test_flower_is_told_to_keep_to_itself(tmp_path: Path) -> None:
    environ = commands.flower_command_environment(tmp_path)
    assert environ["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environ["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert environ["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environ["FLWR_HOME"] == str(tmp_path)


@pytest.mark.parametrize("value", ['a"b', "a\nb", "a\\b"])
def test_a_node_is_not_told_more_than_was_meant(value: str) -> None:
    with pytest.raises(InputError, match="must not contain quotes"):
        commands._node_config_argument({"data": value})


def test_the_command_writes_an_app(command: Callable[..., Any], tmp_path: Path) -> None:
    told = command("flower", "new", "app", "fedprox", "--clients", 3, "--set", "fedprox.mu=0.3", "--rounds", 4)
    assert told.code == 0
    assert "app is an app for Flower" in told.out
    found, server = read_app_run_config(written(tmp_path / "app"), tmp_path / "app")
    assert (found.method, found.clients, found.rounds, found.options) == ("fedprox", 3, 4, {"fedprox": {"mu": 0.3}})
    assert server.folder == str(tmp_path / "app-run")  # beside it: what is in an app goes to all sites


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("new", "app", "fedavgg"), "unknown method 'fedavgg'"),
        (("new", "app", "fedavg", "--rounds", "0"), "rounds must be"),
        (("new", "full", "fedavg"), "full is not empty"),
        (("new", "app", "fedavg", "--partition", "natural"), "natural"),
        (("new", "app", "fedavg", "--clients", "500"), "500 clients"),
        (("new", "app", "fedavg", "--init", "nowhere"), "nowhere"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_written(
    words: tuple[str, ...], says: str, command: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    told = command("flower", *words)
    assert told.code == 2
    assert says in told.err
    assert not (tmp_path / "app").exists()


def test_python_objects_cannot_go_to_sites(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from fedloom import run

    with pytest.raises(InputError, match="cannot be Python objects"):
        run(model=torch.nn.Linear(64, 10), engine="flower", clients=2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
