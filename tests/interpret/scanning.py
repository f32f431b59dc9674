"""What takes the place of a scan: examples of a circuit's signals, each by a rule of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headtrace.circuits import Circuit
from headtrace.interpret import ScoredSignal, SignalExamples
from headtrace.interpret.scored_signals import circuit_signals
from tests.interpret.made_up_signals import after_same, previous, same_token, signal_by, to_animal

RULES = (same_token, previous, to_animal, after_same)


@dataclass
class MadeUpScan:
    found: dict[str, SignalExamples]

    @property
    def signals(self) -> tuple[ScoredSignal, ...]:
        return tuple(each.signal for each in self.found.values())

    def examples(self, signal: ScoredSignal) -> SignalExamples:
        return self.found[signal.id]


def made_up_scan(model: Any, corpus: Any, *, signals: list[Circuit], seed: int = 0, **_: Any) -> MadeUpScan:
    found: dict[str, SignalExamples] = {}
    for circuit in signals:
        for signal in circuit_signals(circuit):
            examples = signal_by(RULES[len(found) % len(RULES)], seed=len(found))
            found[signal.id] = replace(examples, signal=signal)
    return MadeUpScan(found)
