"""Figures of the toy lab: `draw(experiment, folder)` makes all of one experiment's and gives their paths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headtrace.figures import toy_geometry, toy_sweeps, toy_theory, toy_training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.toy.experiment import Experiment


class Drawing(Protocol):
    """A figure of an experiment, written if a path is given."""

    def __call__(self, experiment: Experiment, path: str | Path | None = None) -> Figure: ...


FIGURES: dict[str, dict[str, Drawing]] = {
    "isotropy": {"isotropy": toy_geometry.isotropy},
    "single": {"single": toy_geometry.single, "single-moment": toy_geometry.single_moment},
    "multi": {"multi": toy_geometry.multi, "multi-features": toy_geometry.multi_features},
    "dynamics": {
        "dynamics": toy_training.dynamics,
        "dynamics-paths": toy_training.paths,
        "dynamics-order": toy_training.order,
    },
    "sparsity": {
        "sparsity": toy_training.sparsity,
        "sparsity-examples": toy_training.examples,
        "sparsity-strength": toy_training.strength,
    },
    "robustness": {
        "robustness": toy_sweeps.robustness,
        "robustness-values": toy_sweeps.values,
        "robustness-p": toy_sweeps.probability,
    },
    "capacity": {"capacity": toy_sweeps.capacity},
    "theorems": {"theorems": toy_theory.theorems},
    "recovery": {"recovery": toy_theory.recovery},
}


def draw(experiment: Experiment, folder: Path) -> list[Path]:
    """Write the experiment's figures as `toy-NAME.png`."""
    drawings = FIGURES[experiment.name]
    paths = [folder / f"toy-{name}.png" for name in drawings]
    for drawing, path in zip(drawings.values(), paths, strict=True):
        drawing(experiment, path)
    return paths
