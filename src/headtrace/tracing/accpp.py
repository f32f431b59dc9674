"""ACC++: signals by integrated gradients and greedy removal (`headtrace.tracing.firing`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headtrace.tracing.attribution import IG_STEPS
from headtrace.tracing.firing import FiringCauses, Tau, threshold, trace_firings
from headtrace.tracing.upstream import Composer, LayerFirings
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    from headtrace.models import Recording


@dataclass
class ACCpp:
    """The default method."""

    composer: Composer
    tau: Tau = None
    ig_steps: int = IG_STEPS
    name: str = "acc++"

    def threshold(self, visible_keys: int) -> float:
        return threshold(self.tau, visible_keys)

    def follows(self, firing: Firing, attention: float, visible_keys: int) -> bool:
        return attention >= self.threshold(visible_keys)

    def trace(self, recording: Recording, firings: LayerFirings) -> list[FiringCauses]:
        return trace_firings(recording, firings, self.composer, self.tau, self.ig_steps)
