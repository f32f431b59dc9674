"""Results of sufficiency: how much a circuit keeps at every size, what is lost without it, and what others keep.

>>> sizes(27)
[1, 2, 5, 10, 20, 27]
>>> shares_of(25_000)[:4]
[25, 50, 125, 250]
>>> areas([0.0, 0.5, 1.0], [0.0, 1.0, 1.0])                    # below the curve, and between the curve and 1
(0.75, 0.25)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from headtrace.causal.execute import Copy
from headtrace.causal.patching import PatchingCase, Ranking, measure
from headtrace.errors import InputError
from headtrace.notebook import chart, frame, paragraph
from headtrace.writing import write_text

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

    from headtrace.circuits import Circuit

SCHEMA = "headtrace.sufficiency/1"
HARDLY = 0.1
"""Metrics that differ by less than this share of themselves make a summary warn."""
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Of all components: where MIB measures a curve."""
SHOWN = (5, 10, 20, 40)
"""The sizes that tables compare."""


def sizes(own: int) -> list[int]:
    """1, 2, 5, 10, 20, 40, ... up to a circuit's own size, which is measured too."""
    marks = [1, 2, *(5 * 2**i for i in range(max(own, 1).bit_length()))]
    return [*(size for size in marks if size < own), *([own] if own else [])]


def shares_of(total: int) -> list[int]:
    """How many components each of ``SHARES`` is: at least one."""
    return [max(1, round(share * total)) for share in SHARES]


def areas(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """By trapezoid, the area below a curve (CPR) and that of its distance from one (CMD)."""
    below = above = 0.0
    for left in range(len(x) - 1):
        width = x[left + 1] - x[left]
        below += width * (y[left] + y[left + 1]) / 2
        above += width * (abs(1 - y[left]) + abs(1 - y[left + 1])) / 2
    return below, above


@dataclass(frozen=True)
class Curve:
    """Sufficiency over the number of components kept."""

    points: tuple[tuple[int, float], ...]
    """(components, sufficiency): nothing first, then up to all that the method itself ranks."""
    own: int
    """How many it ranks."""
    continued: tuple[tuple[int, float], ...]
    """The same at MIB's shares of all components, the ranking continued by attention."""

    @property
    def cpr(self) -> float:
        """The area below the curve, from 0.1 % to all of the components: higher is better."""
        return areas(SHARES, [value for _, value in self.continued])[0]

    @property
    def cmd(self) -> float:
        """The area between the curve and 1: lower is better."""
        return areas(SHARES, [value for _, value in self.continued])[1]

    def at(self, n: int) -> float | None:
        """Sufficiency with the first n components (all, where there are fewer); None where that was not measured."""
        return dict(self.points).get(min(n, self.own))

    def to_dict(self) -> dict[str, Any]:
        """The curve as plain values."""
        return {
            "components": self.own,
            "curve": [{"components": n, "sufficiency": value} for n, value in self.points],
            "continued": [
                {"share": share, "components": n, "sufficiency": value}
                for share, (n, value) in zip(SHARES, self.continued, strict=True)
            ],
            "cpr": self.cpr,
            "cmd": self.cmd,
        }


@dataclass(frozen=True)
class Necessity:
    """The metric without the circuit: its components from the counterfactual, all others live.

    A loss is a share of m(clean) - m(counterfactual): 1 where the metric falls to that of the counterfactual.
    """

    components: int
    clean: float
    counterfactual: float
    without: float
    """The metric without the circuit's components."""
    without_random: tuple[float, ...]
    """The metric without as many others of the same layers, one number for each draw."""
    without_attended: tuple[float, ...]
    """The same with others that attend about as much."""

    def _loss(self, values: Sequence[float]) -> float:
        return (self.clean - fmean(values)) / (self.clean - self.counterfactual)

    @property
    def loss(self) -> float:
        """The share of the whole effect that is lost without the circuit."""
        return self._loss([self.without])

    @property
    def random_loss(self) -> float:
        """Mean over the draws."""
        return self._loss(self.without_random)

    @property
    def attended_loss(self) -> float:
        """Mean over the draws."""
        return self._loss(self.without_attended)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, with the losses."""
        return {
            "components": self.components,
            "without": self.without,
            "without_random": list(self.without_random),
            "without_attended": list(self.without_attended),
            "loss": self.loss,
            "random_loss": self.random_loss,
            "attended_loss": self.attended_loss,
        }


@dataclass(frozen=True)
class Sufficiency:
    """Is a circuit enough, and is it needed? Made by ``headtrace.sufficiency``."""

    circuit: Circuit
    case: PatchingCase = field(repr=False)
    ranking: Ranking = field(repr=False)
    metric: str
    clean: float
    """The metric of the model on the circuit's prompt."""
    counterfactual: float
    """The metric on the counterfactual prompt (mean and zero ablation: with nothing kept)."""
    ablation: str
    kept: Curve
    compared: Mapping[str, Curve]
    """The curves of the baselines, and of what else it was compared with, by name."""
    necessity: Necessity

    @property
    def size(self) -> int:
        """How many head components the circuit has."""
        return self.kept.own

    @property
    def curve(self) -> dict[int, float]:
        """Components kept, by falling influence, and the sufficiency of so many."""
        return dict(self.kept.points)

    @property
    def sufficiency(self) -> float:
        """That of the whole circuit."""
        return self.at(self.size)

    @property
    def nothing(self) -> float:
        """What embeddings and MLPs give without any component of the prompt's own: sufficiency of the empty set."""
        return self.curve[0]

    @property
    def cpr(self) -> float:
        """The area below the curve at MIB's shares of all components: higher is better."""
        return self.kept.cpr

    @property
    def cmd(self) -> float:
        """The area between that curve and 1: lower is better."""
        return self.kept.cmd

    def at(self, n: int) -> float:
        """Sufficiency of the n most influential components (of the whole circuit, where it has fewer).

        A size that was not measured yet is measured now.
        """
        if n < 0:
            raise InputError(f"at({n}): a circuit keeps 0 components or more.")
        known = self.kept.at(n)
        return self.keeping(self.ranking.first(n)) if known is None else known

    def keeping(self, places: torch.Tensor) -> float:
        """Sufficiency of any set of components, given as places of the case (``found.case.places_of(firings)``)."""
        value = measure([self.case.keeping(places)])[0]
        return (value - self.counterfactual) / (self.clean - self.counterfactual)

    @property
    def baselines(self) -> pl.DataFrame:
        """A row for the circuit and each baseline: sufficiency at some sizes and at the circuit's own, CPR, CMD."""
        import polars as pl

        rows = [
            {
                "ranking": name,
                **{f"at {n}": curve.at(n) for n in SHOWN},
                "at own size": curve.at(self.size),
                "cpr": curve.cpr,
                "cmd": curve.cmd,
            }
            for name, curve in {"circuit": self.kept, **self.compared}.items()
        ]
        rows[0] |= {f"at {n}": self.at(n) for n in SHOWN}
        return pl.DataFrame(rows)

    def specificity(self, *others: Sufficiency) -> pl.DataFrame:
        """What taking each circuit's heads away does to each prompt: a row per circuit and prompt, this one first.

        Positions differ from prompt to prompt, so whole heads are taken away, at every position: the same heads
        everywhere. ``loss`` is a share of what the prompt's own counterfactual takes away.
        """
        import polars as pl

        every = (self, *others)
        if any(one.case.model is not self.case.model for one in others):
            raise InputError(
                "Circuits are compared on one model: measure all of them with the same loaded model."
            )
        copies: list[Copy] = []
        rows: list[dict[str, Any]] = []
        for i, theirs in enumerate(every):
            heads = {(f.layer, f.head) for f in theirs.case.firings(theirs.ranking.first(theirs.size))}
            for j, one in enumerate(every):
                copies.append(one.case.without(_whole_heads(one.case, heads)))
                rows.append({"circuit": i, "prompt": j, "heads": len(heads)})
        for row, value in zip(rows, measure(copies), strict=True):
            one = every[row["prompt"]]
            row |= {"metric": value, "loss": (one.clean - value) / (one.clean - one.counterfactual)}
        return pl.DataFrame(rows)

    def summary(self) -> str:
        """A few lines for people."""
        other = (
            "on the counterfactual prompt"
            if self.ablation == "counterfactual"
            else f"with nothing kept ({self.ablation} ablation)"
        )
        shown = ", ".join(f"{n}: {value:.2f}" for n, value in self.kept.points)
        need = self.necessity
        warning = (
            "  (these hardly differ, so shares of their difference can be anything: another counterfactual says more)\n"
            if abs(self.clean - self.counterfactual) < HARDLY * max(abs(self.clean), abs(self.counterfactual))
            else ""
        )
        return (
            f"{self.metric}: {self.clean:.3f} on the prompt, {self.counterfactual:.3f} {other}\n{warning}"
            f"Sufficiency of the circuit's {self.size} head components (of {len(self.case.places):,}): "
            f"{self.sufficiency:.3f}\n"
            f"  by number kept: {shown}\n"
            f"  area below the curve (CPR) {self.cpr:.3f}, between it and 1 (CMD) {self.cmd:.3f}\n"
            f"Necessity: without them {need.loss:.3f} of the difference is lost (as many random ones "
            f"{need.random_loss:.3f}, equally attended ones {need.attended_loss:.3f})"
        )

    def __repr__(self) -> str:
        return (
            f"Sufficiency({self.sufficiency:.3f} with {self.size} components, cpr {self.cpr:.3f}, cmd {self.cmd:.3f}, "
            f"loss without them {self.necessity.loss:.3f}, {self.ablation})"
        )

    def _repr_html_(self) -> str:
        lines = self.summary().splitlines()
        return "".join(map(paragraph, lines)) + frame(self.baselines) + chart(self.plot())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        circuit = self.circuit
        return {
            "schema": SCHEMA,
            "model": {"name": circuit.model.name, "weights_sha256": circuit.model.weights_sha256},
            "prompt": circuit.prompt.text,
            "metric": self.metric,
            "clean": self.clean,
            "counterfactual": self.counterfactual,
            "ablation": self.ablation,
            "total": len(self.case.places),
            "sufficiency": self.sufficiency,
            **self.kept.to_dict(),
            "necessity": self.necessity.to_dict(),
            "baselines": {name: curve.to_dict() for name, curve in self.compared.items()},
        }

    def save(self, folder: str | Path) -> Path:
        """Write ``sufficiency.json`` and ``sufficiency.png`` into a folder."""
        path = Path(folder)
        write_text(path / "sufficiency.json", json.dumps(self.to_dict(), indent=1) + "\n")
        self.plot(path / "sufficiency.png")
        return path

    def plot(self, path: str | Path | None = None) -> Figure:
        """The curve beside those of the baselines."""
        from headtrace.figures.causal import sufficiency_curves

        return sufficiency_curves(self, path)


def _whole_heads(case: PatchingCase, heads: set[tuple[int, int]]) -> torch.Tensor:
    layer, head, *_ = torch.unravel_index(case.places, case.shape)
    code = layer * case.shape[1] + head
    wanted = torch.tensor([l * case.shape[1] + h for l, h in sorted(heads)], device=code.device)
    return case.places[torch.isin(code, wanted)]
