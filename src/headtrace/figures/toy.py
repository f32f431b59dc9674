"""Figures of the toy lab: `draw(experiment, folder)` makes all of one experiment's and gives their paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from headtrace.figures import toy_geometry, toy_sweeps, toy_theory, toy_training
from headtrace.toy.experiment import Experiment

FIGURES: dict[str, dict[str, Callable[[Experiment], Figure]]] = {
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
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, figure in FIGURES[experiment.name].items():
        made = figure(experiment)
        path = folder / f"toy-{name}.png"
        # No version or date in the file: the same experiment gives the same bytes.
        made.savefig(path, dpi=110, metadata={"Software": None})
        plt.close(made)
        written.append(path)
    return written
