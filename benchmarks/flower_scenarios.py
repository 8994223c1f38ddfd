"""The faults of a federation that flower_faults.py plays, each a scenario with real Flower processes."""

import signal
from collections.abc import Callable

from flower_judge import Outcome, expect, in_log, in_process, judged, peak_memory
from flower_world import World, make_run, wait_until

from fedloom.flower.trust import certificates

Scenario = Callable[[World], list[Outcome]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(play: Scenario) -> Scenario:
    SCENARIOS[play.__name__.replace("_", "-")] = play
    return play


@scenario
def node_killed(world: World) -> list[Outcome]:
    app = world.app(make_run(deadline=90, rounds=5), "node-killed")
    app.tell(2, 2, "wait")
    app.tell(1, 4, "wait")
    app.start()
    app.wait_here(2, 2)
    seen = len(world.log("site-2"))
    world.kill("site-2")
    world.start_node("site-2", 2)
    app.wait_here(1, 4)  # round 4 waits for the other site until this one is back
    world.says("site-2", "SuperNode ID", seen)
    app.release(1, 4)
    app.finish()
    lost = app.lost()
    expect((2, 2) in lost and {client for _, client in lost} == {2} and (5, 2) not in lost, f"lost were {lost}")
    said = [
        in_log(app, f"round 2: client 2: {lost[2, 2]}"),
        in_process(world, "site-2", "the SuperLink does not let this node in"),
    ]
    happens = "its answer is lost; it is let in again after a minute, and used again"
    return [judged(app, "SuperNode killed (-9) in a round and started again at once", happens, said)]


@scenario
def node_frozen(world: World) -> list[Outcome]:
    app = world.app(make_run(deadline=30, rounds=6), "node-frozen")
    app.tell(2, 2, "wait")
    app.start()
    app.wait_here(2, 2)
    world.signal("site-2", signal.SIGSTOP)
    try:
        app.wait_round(2)
    finally:
        world.signal("site-2", signal.SIGCONT)
    app.release(2, 2)
    app.finish()
    lost = app.lost()
    expect((2, 2) in lost and {client for _, client in lost} == {2} and (6, 2) not in lost, f"lost were {lost}")
    expect(lost[2, 2] == "no answer within 30 s", lost[2, 2])
    said = [
        in_log(app, "round 2: client 2: no answer within 30 s"),
        in_log(app, "an answer of client 2 to round 2 came too late and is dropped"),
    ]
    fault = "SuperNode frozen (SIGSTOP) past the deadline, then continued"
    happens = "the round goes on without it; its late answer is dropped and counted; it is used again"
    found = judged(app, fault, happens, said)
    expect(found.late >= 1, "no late answer was counted")
    return [found]


@scenario
def server_app_killed(world: World) -> list[Outcome]:
    app = world.app(make_run(method="scaffold"), "server-app-killed")
    app.tell(1, 3, "wait")
    app.start()
    app.wait_here(1, 3)
    world.server_app().kill()
    app.release(1, 3)
    world.kill(app.stream)
    app.start()
    app.finish()
    expect(not app.lost(), f"lost were {app.lost()}")
    said = [in_log(app, "going on with the run in")]
    return [judged(app, "ServerApp killed (-9) in a round, `flwr run` again", "goes on after the last round", said)]


@scenario
def superlink_killed(world: World) -> list[Outcome]:
    app = world.app(make_run(method="scaffold"), "superlink-killed")
    app.tell(1, 3, "wait")
    app.start()
    app.wait_here(1, 3)
    world.kill("superlink")
    app.release(1, 3)
    world.kill(app.stream)
    world.start_superlink()
    wait_until(lambda: "finished:failed" in world.flwr(["ls", "here", "--format", "json"]), "the end of the old run")
    app.start()
    app.finish()
    expect(not app.lost(), f"lost were {app.lost()}")
    said = ["flwr ls: finished:failed", in_log(app, "going on with the run in")]
    happens = (
        "nodes come back by themselves; Flower marks the run failed; `flwr run` again goes on after the last round"
    )
    return [judged(app, "SuperLink killed (-9) in a round and started on the same database", happens, said)]


BAD = {
    "nan": ("a model of NaN", "refused: its model is not finite"),
    "shape": ("a model of a wrong shape", "refused: its model is float32 of shape"),
    "huge": ("an array of 64 MiB", "refused: it has more than"),
    "bomb": ("an array of 512 MiB that travels as 5 MiB (equal pieces)", "refused: it has more than"),
    "one-piece": ("an array of 64 MiB in one piece", "refused: it has more than"),
    "stale": ("its answer to the round before", "refused: its answer has the round"),
    "another": ("the answer of client 0, as it was", "refused: its answer has the client '0', not 2"),
    "another-renamed": ("the answer of client 0 under its own number", "refused: its answer has the nonce"),
    "samples": ("a sample count it did not register", "refused: it says that it trained on 1000000 samples"),
}
"""What a node sends instead of its model, and how the answer is refused."""


@scenario
def bad_answers(world: World) -> list[Outcome]:
    app = world.app(make_run(rounds=len(BAD) + 2), "bad-answers")
    for round, word in enumerate(BAD, start=2):
        app.tell(2, round, word)
    app.start()
    app.wait_round(1)
    before = peak_memory(world)
    app.wait_round(len(BAD) + 1)
    grown = peak_memory(world) - before
    app.finish()
    lost = app.lost()
    expect(set(lost) == {(round, 2) for round in range(2, len(BAD) + 2)}, f"lost were {lost}")
    expect(grown < 48 << 20, f"the server's process grew by {grown >> 20} MiB")
    found = []
    for round, (what, reason) in enumerate(BAD.values(), start=2):
        expect(lost[round, 2].startswith(reason), f"round {round}: {lost[round, 2]!r}, not {reason!r}")
        said = [in_log(app, f"round {round}: client 2: {reason}")]
        outcome = judged(app, f"a node sends {what}", "refused; the round goes on without it", said)
        outcome.scenario = f"bad-answers/{list(BAD)[round - 2]}"
        outcome.lost = {f"{round}:2": lost[round, 2]}
        found.append(outcome)
    return found


@scenario
def unknown_key(world: World) -> list[Outcome]:
    from fedloom.flower.trust.identity import Identity

    key = world.folder / "stranger.key"
    key.write_bytes(Identity.new().private_bytes())
    key.chmod(0o600)
    app = world.app(make_run(), "unknown-key")
    world.start_node("stranger", 2, key=key)
    try:
        app.start()
        app.finish()
        said = [in_process(world, "stranger", "does not let this node in: its key is not registered there")]
        expect("SuperNode ID" not in world.log("stranger"), "the stranger is in")
    finally:
        world.kill("stranger")
    expect(not app.lost(), f"lost were {app.lost()}")
    return [judged(app, "a node with an unknown key", "it is not let in; the run does not notice", said)]


@scenario
def another_authority(world: World) -> list[Outcome]:
    other = world.folder / "other-authority"
    certificates.make_certificates(other, ["site-0"])
    app = world.app(make_run(), "another-authority")
    world.start_node("misled", 2, key=world.certificates / "nodes" / "spare", ca=other / "ca.crt")
    try:
        app.start()
        app.finish()
        said = [in_process(world, "misled", "its certificate is not one of the authority that this site trusts")]
        expect("SuperNode ID" not in world.log("misled"), "the misled node is in")
    finally:
        world.kill("misled")
    expect(not app.lost(), f"lost were {app.lost()}")
    return [judged(app, "a node that trusts another authority", "it does not talk to this server", said)]


@scenario
def same_key(world: World) -> list[Outcome]:
    app = world.app(make_run(rounds=5), "same-key")
    app.tell(1, 2, "wait")
    app.start()
    app.wait_here(1, 2)
    world.start_node("twin", 2, key=world.certificates / "nodes" / "site-2")
    try:
        said = [in_process(world, "twin", "or another node is connected with it")]
        app.release(1, 2)
        app.finish()
        expect("SuperNode ID" not in world.log("twin"), "the second node with the key is in")
    finally:
        world.kill("twin")
    expect(not app.lost(), f"lost were {app.lost()}")
    return [judged(app, "two nodes with one key", "the second is not let in while the first is connected", said)]


@scenario
def same_client(world: World) -> list[Outcome]:
    app = world.app(make_run(rounds=5), "same-client")
    app.tell(1, 2, "wait")
    app.tell(1, 4, "wait")
    app.start()
    app.wait_here(1, 2)
    world.start_node("double", 2, key=world.certificates / "nodes" / "spare")
    try:
        world.says("double", "SuperNode ID")
        app.release(1, 2)
        world.says("double", "Sent successfully")  # it was asked who it is in round 3
        app.release(1, 4)
        app.finish()
    finally:
        world.kill("double")
    expect(not app.lost(), f"lost were {app.lost()}")
    said = [in_log(app, "cannot be used: it says that it is client 2, which is at node")]
    return [judged(app, "two nodes that claim one client", "the second is not used; the first goes on", said)]
