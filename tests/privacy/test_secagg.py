"""Tests that Flower's SecAgg+ still lacks what docs/privacy.md says."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.client.mod.secure_aggregation.secaggplus_mod import SecAggPlusState, _unmask, secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, RECORD_KEY_STATE, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.compat.common import recorddict_compat as compat
from flwr.server.client_manager import SimpleClientManager
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.server_config import ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.supercore.task_identity import TaskIdentity

NODES = range(1, 6)
ZEROS = ndarrays_to_parameters([np.zeros(4, dtype=np.float32)])


class Wire:
    """A grid in memory; `silent` nodes stop answering at a stage."""

    def __init__(self, silent: dict[int, str]) -> None:
        self.silent = silent
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in NODES}

    def send_and_receive(self, messages: list[Message], *, timeout: float | None = None) -> list[Message]:
        return [self._answer(deepcopy(message)) for message in messages]

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if self.silent.get(node) == message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]:
            return Message(Error(1, "gone"), reply_to=message)
        try:
            return secaggplus_mod(message, self.contexts[node], _fit)
        except Exception as error:  # as a SuperNode does
            return Message(Error(2, str(error)), reply_to=message)


def _fit(message: Message, context: Context) -> Message:
    mine = ndarrays_to_parameters([np.full(4, context.node_id, dtype=np.float32)])
    return Message(
        compat.fitres_to_recorddict(FitRes(Status(Code.OK, ""), mine, 10, {}), False),
        reply_to=message,
    )


class Everybody(FedAvg):
    """Asks all nodes, and keeps what the workflow hands it."""

    results: list[Any] | None = None

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[Any]:
        proxies = [type("Proxy", (), {"node_id": node})() for node in NODES]
        return [(proxy, FitIns(parameters, {})) for proxy in proxies]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        self.results = results
        return results[0][1].parameters, {}


def play(monkeypatch: pytest.MonkeyPatch, silent: dict[int, str]) -> tuple[Wire, Everybody]:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    strategy, wire = Everybody(), Wire(silent)
    context = LegacyContext(Context(1, 0, {}, RecordDict(), {}), ServerConfig(1), strategy, SimpleClientManager())
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(ZEROS, True)
    SecAggPlusWorkflow(num_shares=5, reconstruction_threshold=3)(wire, context)
    return wire, strategy


def test_a_mask_is_one_of_four_billion() -> None:
    """A seed of 256 bits is folded to 32 of them, which seed numpy's Mersenne Twister."""
    seed = bytes(range(32))
    folded = np.bitwise_xor.reduce(np.frombuffer(seed, dtype="<u4")).tobytes() + bytes(28)
    assert seed != folded
    masks = [pseudo_rand_gen(one, 1 << 32, [(1000,)])[0] for one in (seed, folded)]
    assert np.array_equal(*masks)
    twister = np.random.RandomState(int.from_bytes(folded[:4], "little"))
    assert np.array_equal(masks[0], twister.randint(0, (1 << 32) - 1, 1000, dtype=np.int64))


def test_a_node_hands_out_both_secrets_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shares of both, a server takes every mask off a single model; a node must never give both."""
    wire, strategy = play(monkeypatch, {})
    assert strategy.results is not None
    state = SecAggPlusState(**wire.contexts[1].state.config_records[RECORD_KEY_STATE])
    asked = {Key.ACTIVE_NODE_ID_LIST: [1, 2, 3], Key.DEAD_NODE_ID_LIST: [2]}
    given = _unmask(state, asked)
    assert given[Key.NODE_ID_LIST] == [1, 2, 3, 2]
    assert len(given[Key.SHARE_LIST]) == 4


@pytest.mark.parametrize("stage", [Stage.SETUP, Stage.SHARE_KEYS])
def test_a_node_that_is_lost_while_keys_are_exchanged_costs_the_round(
    monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    assert play(monkeypatch, {2: stage})[1].results is None
    assert play(monkeypatch, {2: Stage.COLLECT_MASKED_VECTORS})[1].results is not None  # later it does not
