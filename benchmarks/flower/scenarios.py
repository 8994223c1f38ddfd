"""The scenarios of the fault benchmark, each with real Flower processes."""

import signal
from collections.abc import Callable

from benchmarks.flower.deployment import Deployment, make_config_of_run, wait_until
from benchmarks.flower.verdict import Outcome, check_run, expect, find_in_node_log, find_in_run_log, peak_memory
from fedloom.flower.trust import certificates

Scenario = Callable[[Deployment], list[Outcome]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(run: Scenario) -> Scenario:
    """Register a scenario under its name."""
    SCENARIOS[run.__name__.replace("_", "-")] = run
    return run


@scenario
def node_killed(deployment: Deployment) -> list[Outcome]:
    app = deployment.app(make_config_of_run(deadline=90, rounds=5), "node-killed")
    app.instruct(2, 2, "wait")
    app.instruct(1, 4, "wait")
    app.start()
    app.wait_for_client(2, 2)
    seen = len(deployment.log("site-2"))
    deployment.kill("site-2")
    deployment.start_node("site-2", 2)
    app.wait_for_client(1, 4)  # round 4 waits for the other site until site-2 is back
    deployment.wait_for_log("site-2", "SuperNode ID", seen)
    app.release(1, 4)
    app.finish()
    failed = app.failed_clients()
    expect((2, 2) in failed and {client for _, client in failed} == {2} and (5, 2) not in failed, f"failed: {failed}")
    said = [
        find_in_run_log(app, f"round 2: client 2: {failed[2, 2]}"),
        find_in_node_log(deployment, "site-2", "the SuperLink rejects this node"),
    ]
    happens = "its update is lost; it reconnects after a minute and is used again"
    return [check_run(app, "SuperNode killed (-9) in a round and restarted at once", happens, said)]


@scenario
def node_frozen(deployment: Deployment) -> list[Outcome]:
    app = deployment.app(make_config_of_run(deadline=30, rounds=6), "node-frozen")
    app.instruct(2, 2, "wait")
    app.start()
    app.wait_for_client(2, 2)
    deployment.signal("site-2", signal.SIGSTOP)
    try:
        app.wait_for_round(2)
    finally:
        deployment.signal("site-2", signal.SIGCONT)
    app.release(2, 2)
    app.finish()
    failed = app.failed_clients()
    expect((2, 2) in failed and {client for _, client in failed} == {2} and (6, 2) not in failed, f"failed: {failed}")
    expect(failed[2, 2] == "no answer within 30 s", failed[2, 2])
    said = [
        find_in_run_log(app, "round 2: client 2: no answer within 30 s"),
        find_in_run_log(app, "an answer of client 2 to round 2 came too late and is dropped"),
    ]
    fault = "SuperNode frozen (SIGSTOP) past the deadline, then continued"
    happens = "the round continues without it; its late update is dropped and counted; it is used again"
    found = check_run(app, fault, happens, said)
    expect(found.late >= 1, "no late answer was counted")
    return [found]


@scenario
def server_app_killed(deployment: Deployment) -> list[Outcome]:
    app = deployment.app(make_config_of_run(method="scaffold"), "server-app-killed")
    app.instruct(1, 3, "wait")
    app.start()
    app.wait_for_client(1, 3)
    deployment.server_app().kill()
    app.release(1, 3)
    deployment.kill(app.stream)
    app.start()
    app.finish()
    expect(not app.failed_clients(), f"failed: {app.failed_clients()}")
    said = [find_in_run_log(app, "continuing the run in")]
    return [
        check_run(app, "ServerApp killed (-9) in a round, `flwr run` again", "continues after the last round", said)
    ]


@scenario
def superlink_killed(deployment: Deployment) -> list[Outcome]:
    app = deployment.app(make_config_of_run(method="scaffold"), "superlink-killed")
    app.instruct(1, 3, "wait")
    app.start()
    app.wait_for_client(1, 3)
    deployment.kill("superlink")
    app.release(1, 3)
    deployment.kill(app.stream)
    deployment.start_superlink()
    wait_until(
        lambda: "finished:failed" in deployment.flwr(["ls", "here", "--format", "json"]), "the end of the old run"
    )
    app.start()
    app.finish()
    expect(not app.failed_clients(), f"failed: {app.failed_clients()}")
    said = ["flwr ls: finished:failed", find_in_run_log(app, "continuing the run in")]
    happens = "the nodes reconnect by themselves; Flower marks the run as failed; "
    happens += "`flwr run` again continues after the last round"
    return [check_run(app, "SuperLink killed (-9) in a round and restarted on the same database", happens, said)]


BAD = {
    "nan": ("a model of NaN", "rejected: its model is not finite"),
    "shape": ("a model of a wrong shape", "rejected: its model is float32 of shape"),
    "huge": ("an array of 64 MiB", "rejected: it has more than"),
    "bomb": ("an array of 512 MiB, sent as 5 MiB (equal chunks)", "rejected: it has more than"),
    "one-piece": ("an array of 64 MiB in one chunk", "rejected: it has more than"),
    "stale": ("its update of the previous round", "rejected: its answer has the round"),
    "another": ("the update of client 0, unchanged", "rejected: its answer has the client_id '0', not 2"),
    "another-renamed": ("the update of client 0 under its own number", "rejected: its answer has the nonce"),
    "samples": ("a sample count that it did not register", "rejected: it says that it trained on 1000000 samples"),
}
"""What a node sends instead of its model, and the reason of the rejection."""


@scenario
def bad_answers(deployment: Deployment) -> list[Outcome]:
    app = deployment.app(make_config_of_run(rounds=len(BAD) + 2), "bad-answers")
    for round, word in enumerate(BAD, start=2):
        app.instruct(2, round, word)
    app.start()
    app.wait_for_round(1)
    before = peak_memory(deployment)
    app.wait_for_round(len(BAD) + 1)
    grown = peak_memory(deployment) - before
    app.finish()
    failed = app.failed_clients()
    expect(set(failed) == {(round, 2) for round in range(2, len(BAD) + 2)}, f"failed: {failed}")
    expect(grown < 48 << 20, f"the server's process grew by {grown >> 20} MiB")
    found = []
    for round, (what, reason) in enumerate(BAD.values(), start=2):
        expect(failed[round, 2].startswith(reason), f"round {round}: {failed[round, 2]!r}, not {reason!r}")
        said = [find_in_run_log(app, f"round {round}: client 2: {reason}")]
        outcome = check_run(app, f"a node sends {what}", "rejected; the round continues without it", said)
        outcome.scenario = f"bad-answers/{list(BAD)[round - 2]}"
        outcome.lost = {f"{round}:2": failed[round, 2]}
        found.append(outcome)
    return found


@scenario
def unknown_key(deployment: Deployment) -> list[Outcome]:
    from fedloom.flower.trust.identity import Identity

    key = deployment.folder / "stranger.key"
    key.write_bytes(Identity.new().private_bytes())
    key.chmod(0o600)
    app = deployment.app(make_config_of_run(), "unknown-key")
    deployment.start_node("stranger", 2, key=key)
    try:
        app.start()
        app.finish()
        said = [find_in_node_log(deployment, "stranger", "rejects this node: its key is not registered there")]
        expect("SuperNode ID" not in deployment.log("stranger"), "the stranger is in")
    finally:
        deployment.kill("stranger")
    expect(not app.failed_clients(), f"failed: {app.failed_clients()}")
    return [check_run(app, "a node with an unknown key", "it cannot connect; the run is not affected", said)]


@scenario
def another_authority(deployment: Deployment) -> list[Outcome]:
    other = deployment.folder / "other-authority"
    certificates.make_certificates(other, ["site-0"])
    app = deployment.app(make_config_of_run(), "another-authority")
    deployment.start_node("misled", 2, key=deployment.certificates / "nodes" / "spare", ca=other / "ca.crt")
    try:
        app.start()
        app.finish()
        said = [
            find_in_node_log(deployment, "misled", "its certificate is not one of the authority that this site trusts")
        ]
        expect("SuperNode ID" not in deployment.log("misled"), "the misled node is in")
    finally:
        deployment.kill("misled")
    expect(not app.failed_clients(), f"failed: {app.failed_clients()}")
    return [check_run(app, "a node that trusts another authority", "it sends nothing to this server", said)]


@scenario
def same_key(deployment: Deployment) -> list[Outcome]:
    app = deployment.app(make_config_of_run(rounds=5), "same-key")
    app.instruct(1, 2, "wait")
    app.start()
    app.wait_for_client(1, 2)
    deployment.start_node("twin", 2, key=deployment.certificates / "nodes" / "site-2")
    try:
        said = [find_in_node_log(deployment, "twin", "or another node is connected with it")]
        app.release(1, 2)
        app.finish()
        expect("SuperNode ID" not in deployment.log("twin"), "the second node with the key is in")
    finally:
        deployment.kill("twin")
    expect(not app.failed_clients(), f"failed: {app.failed_clients()}")
    return [check_run(app, "two nodes with one key", "the second cannot connect while the first is connected", said)]


@scenario
def same_client(deployment: Deployment) -> list[Outcome]:
    app = deployment.app(make_config_of_run(rounds=5), "same-client")
    app.instruct(1, 2, "wait")
    app.instruct(1, 4, "wait")
    app.start()
    app.wait_for_client(1, 2)
    deployment.start_node("double", 2, key=deployment.certificates / "nodes" / "spare")
    try:
        deployment.wait_for_log("double", "SuperNode ID")
        app.release(1, 2)
        deployment.wait_for_log("double", "Sent successfully")  # it registered in round 3
        app.release(1, 4)
        app.finish()
    finally:
        deployment.kill("double")
    expect(not app.failed_clients(), f"failed: {app.failed_clients()}")
    said = [find_in_run_log(app, "cannot be used: it says that it is client 2, which is at node")]
    return [check_run(app, "two nodes that claim one client", "the second is not used; the first continues", said)]
