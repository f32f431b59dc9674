"""The experiments of the toy lab, by name. Each takes `quick`, `seed` and `progress`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headtrace.toy.experiment import Experiment
from headtrace.toy.experiments import (
    capacity,
    dynamics,
    isotropy,
    multi,
    recovery,
    robustness,
    single,
    sparsity,
    theorems,
)
from headtrace.toy.train import Progress


class Run(Protocol):
    """An experiment: everything it draws comes from `seed`."""

    def __call__(
        self, *, quick: bool = False, seed: int = 0, progress: Progress | None = None
    ) -> Experiment: ...


@dataclass(frozen=True)
class Entry:
    """An experiment, the amount of work it reports as progress, and what it shows."""

    run: Run
    units: Callable[[bool], int]
    shows: str


EXPERIMENTS: dict[str, Entry] = {
    "isotropy": Entry(isotropy.isotropy, isotropy.units, "without a head, features spread out isotropically"),
    "single": Entry(single.single, single.units, "one feature pair becomes the top singular pair"),
    "multi": Entry(multi.multi, multi.units, "twenty feature pairs, twenty singular pairs"),
    "dynamics": Entry(dynamics.dynamics, dynamics.units, "pairs align one by one, highest logit first"),
    "sparsity": Entry(
        sparsity.sparsity, sparsity.units, "attention is sparse where features of interest are"
    ),
    "robustness": Entry(
        robustness.robustness, robustness.units, "alignment over p, lambda, N, H, m and seeds"
    ),
    "capacity": Entry(capacity.capacity, capacity.units, "more feature pairs than head dimensions"),
    "theorems": Entry(theorems.theorems, theorems.units, "theorems 1 to 4, checked numerically"),
    "recovery": Entry(
        recovery.recovery, recovery.units, "feature pairs read off Omega, and when to trust that"
    ),
}
