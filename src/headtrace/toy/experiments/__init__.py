"""The experiments of the toy lab, by name. Each takes `quick`, `seed` and `progress`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headtrace.progress import Progress
from headtrace.toy.experiment import Experiment
from headtrace.toy.experiments import (
    dynamics,
    features,
    recovery,
    robustness,
    sparsity,
    theorems,
)


@runtime_checkable
class Experimenter(Protocol):
    """An experiment: everything it draws comes from `seed`."""

    def __call__(
        self, *, quick: bool = False, seed: int = 0, progress: Progress | None = None
    ) -> Experiment: ...


@dataclass(frozen=True)
class Entry:
    """An experiment and what it shows."""

    run: Experimenter
    shows: str


EXPERIMENTS: dict[str, Entry] = {
    "isotropy": Entry(features.isotropy, "without a head, features spread out isotropically"),
    "single": Entry(features.single, "one feature pair becomes the top singular pair"),
    "multi": Entry(features.multi, "twenty feature pairs, twenty singular pairs"),
    "dynamics": Entry(dynamics.dynamics, "pairs align one by one, highest logit first"),
    "sparsity": Entry(sparsity.sparsity, "attention is sparse where features of interest are"),
    "robustness": Entry(robustness.robustness, "alignment over p, lambda, N, H, m and seeds"),
    "capacity": Entry(features.capacity, "more feature pairs than head dimensions"),
    "theorems": Entry(theorems.theorems, "theorems 1 to 4, checked numerically"),
    "recovery": Entry(recovery.recovery, "feature pairs read off Omega, and when to trust that"),
}
