"""Host values on a slot's bench: which of them a step reads is noted, for a recording keeps the values they had."""

from typing import TYPE_CHECKING, Any

from fedloom.training import Training

if TYPE_CHECKING:
    from fedloom.engines.slot import SlotBench

ALWAYS_READ = ("batch_size", "clip")
"""Settings that every step reads: recordings depend on them anyhow."""


class Watched:
    """A host value on the bench. A recorded step would keep the value it had, so reading it is noted."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, bench: "SlotBench | None", owner: type) -> Any:
        if bench is None:
            return self
        if bench.listening is not None:
            bench.listening.add(self.name)
        return bench.host[self.name]

    def __set__(self, bench: "SlotBench", value: Any) -> None:
        bench.host[self.name] = value


class Noting:
    """The settings of a client's training, whose names are noted as they are read."""

    def __init__(self, training: Training, noted: set[str]) -> None:
        self._training, self._noted = training, noted

    def __getattr__(self, name: str) -> Any:
        if name not in ALWAYS_READ:
            self._noted.add(f"training.{name}")
        return getattr(self._training, name)
