"""Families of circuits: which circuits are alike, which prompt represents each group, which labels it agrees with.

families = headtrace.find_families(run, grain="edge-channel")
families.labels, families.representatives
print(families.agreement("order"))
families.save("families")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from jaxtyping import Bool, Float, Int

from headtrace.circuits import Circuit
from headtrace.errors import InputError
from headtrace.families.clustering import (
    CONTROLS,
    K_MAX,
    RESAMPLES,
    SHARE,
    Choice,
    Stability,
    average_linkage,
    by_size,
    choose,
    clusters_below,
    condensed,
    cuts,
    stability_of,
    sums_to_clusters,
)
from headtrace.families.files import FamiliesFile, population_of, sample
from headtrace.families.population import Grain, Labels, Population, Sets, check_grain
from headtrace.runs.frames import RunLike
from headtrace.statistics import wilson
from headtrace.tables import frame, paragraph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.families.ablation import ExclusiveAblation
    from headtrace.families.mechanisms import SharedSteps
    from headtrace.models import Model

WITHIN, OUTSIDE = 0.5, 0.1
"""An exclusive edge: at least this share of the family's circuits have it, and at most this share of all others."""
PERMUTATIONS = 999


@dataclass(frozen=True)
class Agreement:
    """How well two ways to group the same circuits agree."""

    ari: float
    """Adjusted Rand index: 1 for the same groups, 0 on average for random groups."""
    nmi: float
    """Mutual information over the mean of both entropies: 0 to 1. Many small groups raise it by chance."""
    p: float
    """How often shuffled labels have an adjusted Rand index as high: (1 + count) / (1 + permutations)."""
    p_nmi: float
    """The same for mutual information."""
    n: int
    """Circuits that have the label."""
    permutations: int

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        return f"ARI {self.ari:.3f}, NMI {self.nmi:.3f} (p {self.p:.3g}, {self.n} circuits)"


def agreement(
    families: Sequence[Any], labels: Sequence[Any], *, permutations: int = PERMUTATIONS, seed: int = 0
) -> Agreement:
    """Compare families with labels; circuits whose label is None are skipped.

    >>> agreement([1, 1, 1, 2, 2, 2], ["ABBA", "ABBA", "ABBA", "BABA", "BABA", "BABA"]).ari
    1.0
    """
    from scipy.special import xlogy
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    pairs = [(family, label) for family, label in zip(families, labels, strict=True) if label is not None]
    if not pairs:
        return Agreement(0.0, 0.0, 1.0, 1.0, 0, permutations)
    a, b = (
        np.unique([str(each) for each in side], return_inverse=True)[1] for side in zip(*pairs, strict=True)
    )
    ari, nmi = float(adjusted_rand_score(b, a)), float(normalized_mutual_info_score(b, a))

    def statistics(shuffled: Int[np.ndarray, " n"]) -> tuple[float, float]:
        """Shuffling keeps the sizes of all groups. The two indices then grow with these sums over the table of counts
        (circuits of each family with each label), and nothing else of them changes."""
        counts = np.bincount(a * (b.max() + 1) + shuffled)
        return float(np.square(counts).sum()), float(xlogy(counts, counts).sum())

    rng = np.random.default_rng(seed)
    observed = np.array(statistics(b))
    chance = np.array([statistics(rng.permutation(b)) for _ in range(permutations)]).reshape(-1, 2)
    # The same groups give the same sums up to rounding in another order of the cells.
    p = (1 + (chance >= observed - 1e-12 * np.maximum(observed, len(a))).sum(0)) / (1 + permutations)
    return Agreement(ari, nmi, float(p[0]), float(p[1]), len(pairs), permutations)


def exclusive_items(
    sets: Sets, inside: Bool[np.ndarray, " circuit"], within: float, outside: float
) -> pl.DataFrame:
    """Items that at least a share ``within`` of some circuits have, and at most a share ``outside`` of all others.

    One row each, the largest difference first: the item, its frequency inside and outside, their difference with a 95 %
    interval (Newcombe's, from Wilson intervals of both shares).
    """
    if not 0 < within <= 1 or not 0 <= outside < within:
        raise InputError(
            f"within={within}, outside={outside}: expected shares of circuits, the first above the second, such as "
            "within=0.5, outside=0.1."
        )
    found = difference_of_shares(
        sets.counts(inside), int(inside.sum()), sets.counts(~inside), int((~inside).sum())
    )
    table = sets.names.with_columns(pl.Series(name, values) for name, values in found.items())
    kept = table.filter((pl.col("inside") >= within) & (pl.col("outside") <= outside))
    return kept.sort("difference", "item", descending=[True, False])


def difference_of_shares(
    inside: Float[np.ndarray, " item"], n: int, outside: Float[np.ndarray, " item"], m: int
) -> dict[str, Float[np.ndarray, " item"]]:
    """Shares of n and of m circuits, their difference, and its 95 % interval.

    >>> found = difference_of_shares(np.array([45.0]), 50, np.array([5.0]), 100)
    >>> {name: round(float(value[0]), 3) for name, value in found.items()}
    {'inside': 0.9, 'outside': 0.05, 'difference': 0.85, 'low': 0.721, 'high': 0.913}
    """
    p, (p_low, p_high) = inside / max(n, 1), wilson(inside, n)
    q, (q_low, q_high) = outside / max(m, 1), wilson(outside, m)
    low = p - q - np.sqrt((p - p_low) ** 2 + (q_high - q) ** 2)
    high = p - q + np.sqrt((p_high - p) ** 2 + (q - q_low) ** 2)
    return {"inside": p, "outside": q, "difference": p - q, "low": low, "high": high}


@dataclass(frozen=True, repr=False)
class Families:
    """Families of a population, numbered from 1 by decreasing size."""

    population: Population
    grain: Grain
    family: Int[np.ndarray, " circuit"]
    """The family of each circuit, in the order of the population."""
    tree: Float[np.ndarray, "merge 4"]
    """Average linkage of the Jaccard distances, as scipy has it."""
    choice: Choice
    """How many there are, and why."""
    ablated: ExclusiveAblation | None = None
    """The result of ablating exclusive edges, if that was done."""
    steps: SharedSteps | None = None
    """The steps of each family's mechanism, if they were looked at."""

    @property
    def n(self) -> int:
        """How many families there are."""
        return int(self.family.max())

    @property
    def sets(self) -> Sets:
        """The items of each circuit, at the grain that was clustered."""
        return self.population.sets(self.grain)

    @cached_property
    def labels(self) -> dict[str, int]:
        """The family of each prompt, by its id."""
        return dict(zip(self.population.ids, self.family.tolist(), strict=True))

    @cached_property
    def sizes(self) -> dict[int, int]:
        """How many circuits each family has."""
        return {f: int((self.family == f).sum()) for f in range(1, self.n + 1)}

    @cached_property
    def representatives(self) -> dict[int, str]:
        """By family, the prompt whose circuit has the least summed distance to the others of its family."""
        sums = sums_to_clusters(self.sets.matrix, self.family - 1, self.n)
        own = sums[np.arange(len(self.family)), self.family - 1]
        found: dict[int, str] = {}
        for f in range(1, self.n + 1):
            rows = np.flatnonzero(self.family == f)
            found[f] = self.population.ids[rows[own[rows].argmin()]]
        return found

    def members(self, family: int) -> list[str]:
        """The prompts of a family."""
        self._require(family)
        return [id for id, each in self.labels.items() if each == family]

    def circuits(self, family: int, most: int | None = None, seed: int = 0) -> list[Circuit]:
        """Circuits of a family: all, or some drawn at random."""
        return [self.population.circuit(id) for id in sample(self.members(family), most, seed)]

    def agreement(self, column: str, *, permutations: int = PERMUTATIONS, seed: int = 0) -> Agreement:
        """Adjusted Rand index and normalised mutual information with a column of labels, with p-values."""
        labels = self.population.column(column).to_list()
        return agreement(self.family.tolist(), labels, permutations=permutations, seed=seed)

    def exclusive(
        self, family: int, *, within: float = WITHIN, outside: float = OUTSIDE, grain: Grain | None = None
    ) -> pl.DataFrame:
        """Edges that are frequent in a family and rare outside, by default at the grain of the families.

        Families of components have no edges of their own, so there whole edges are the default.

        Columns: item, source, target, channel, inside and outside (shares of circuits), difference, low, high.
        """
        self._require(family)
        of = grain or ("edges" if self.grain == "components" else self.grain)
        return exclusive_items(self.population.sets(check_grain(of)), self.family == family, within, outside)

    def ablate_exclusive(self, model: Model, **how: Any) -> ExclusiveAblation:
        """Ablate each family's exclusive edges on its own and on other families' prompts; see ``families.ablation``."""
        from headtrace.families.ablation import ablate_exclusive

        return ablate_exclusive(self, model, **how)

    def with_ablation(self, ablated: ExclusiveAblation) -> Families:
        """The same families with the result of an ablation, which ``save`` then writes, too."""
        return replace(self, ablated=ablated)

    def with_steps(self, steps: SharedSteps) -> Families:
        """The same families with the steps of their mechanisms (`shared_steps`), which ``save`` then writes, too."""
        return replace(self, steps=steps)

    def stability(self, resamples: int = 100, *, share: float = SHARE, seed: int = 0) -> Stability:
        """Mean Jaccard similarity of the families with those of bootstrap samples of the prompts."""
        edges = self.population.sets("edges")
        return stability_of(self.sets, edges, self.family, resamples=resamples, share=share, seed=seed)

    def _require(self, family: int) -> None:
        if family not in self.sizes:
            raise InputError(f"There is no family {family}; they are numbered from 1 to {self.n}.")

    # -- showing and keeping -----------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.sizes.values()))
        return f"Families({self.n} of {len(self.family)} circuits by {self.grain}: {sizes})"

    def table(self) -> pl.DataFrame:
        """One row per family: circuits, representative, exclusive edges."""
        return pl.DataFrame(
            [
                {
                    "family": f,
                    "circuits": size,
                    "representative": self.representatives[f],
                    "exclusive": self.exclusive(f).height if self.n > 1 else 0,
                }
                for f, size in self.sizes.items()
            ]
        )

    def frame(self, of: str = "families") -> pl.DataFrame:
        """A row per family (``table()``); with ``of="circuits"`` per circuit: its prompt, family and labels."""
        if of == "families":
            return self.table()
        if of != "circuits":
            raise InputError(f"frame({of!r}): there are families and circuits.")
        family = pl.Series("family", [int(each) for each in self.family], dtype=pl.Int64)
        ids = pl.Series("prompt", list(self.population.ids), dtype=pl.String)
        return pl.DataFrame([ids, family]).hstack(self.population.labels)

    def _repr_html_(self) -> str:
        return paragraph(f"{self!r}: {self.choice}") + frame(self.table())

    @cached_property
    def _stability(self) -> Stability:
        return self.stability()

    @cached_property
    def file(self) -> FamiliesFile:
        """What ``families.json`` holds."""
        agreed = {name: self.agreement(name) for name in self.population.labels.columns}
        exclusive = {str(f): self.exclusive(f).to_dicts() for f in self.sizes} if self.n > 1 else {}
        model = self.population.model
        more: dict[str, Any] = {
            "model": {"name": model.name, "revision": model.revision, "weights_sha256": model.weights_sha256},
            "circuits": len(self.family),
            "sizes": {str(f): size for f, size in self.sizes.items()},
            "choice": {
                "by": self.choice.by,
                "circuits": self.choice.circuits,
                "control": self.choice.control,
                "p": self.choice.p,
                "cuts": self.choice.table.to_dicts(),
            },
            "stability": self._stability.to_dict(),
            "exclusive": exclusive,
        }
        if self.ablated is not None:
            more["ablation"] = self.ablated.to_dict()
        if self.steps is not None:
            more["steps"] = self.steps.to_dict()
        return FamiliesFile(
            grain=self.grain,
            labels=self.labels,
            representatives={str(f): id for f, id in self.representatives.items()},
            agreement={name: {"ari": a.ari, "nmi": a.nmi, "p": a.p} for name, a in agreed.items()},
            n=self.n,
            left_out=self.population.left_out,
            more=more,
        )

    def save(self, folder: str | Path) -> Path:
        """Write families.json, the cluster map, the stability, and the page of the representatives into a folder."""
        from headtrace.explorer.page import write_page

        place = Path(folder)
        self.file.save(place)
        self.plot(place / "clusters.png")
        self._stability.plot(place / "stability.png")
        if self.ablated is not None:
            self.ablated.plot(place / "ablation.png")
        write_page(
            [self.population.circuit(id) for id in self.representatives.values()],
            place / "representatives.html",
        )
        return place

    def plot(self, path: str | Path | None = None, columns: Sequence[str] | None = None) -> Figure:
        """The cluster map: distances in the order of the tree, the tree itself, families and labels as bars."""
        from headtrace.figures.families import cluster_map

        return cluster_map(self, path, columns)


def find_families(
    run: RunLike | Population | Sequence[Circuit] | str | Path,
    grain: Grain = "edge-channel",
    *,
    n: int | None = None,
    distance: float | None = None,
    labels: Sequence[Labels] | None = None,
    k_max: int = K_MAX,
    controls: int = CONTROLS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Families:
    """Group the circuits of a run (or of a table, or a list) by what they have in common.

    ``n`` is the number of families; ``distance`` instead keeps groups apart whose circuits are on average further apart
    than this; with neither, the number is chosen by the rule of ``families/clustering.py``. ``labels`` are one mapping
    per circuit, for circuits that do not come from a run.

    >>> import headtrace
    >>> tracer = headtrace.Tracer(headtrace.load("builtin"))
    >>> places = ("store", "park", "school")
    >>> texts = [f"When Mary and John went to the {place}, John gave a drink to" for place in places]
    >>> circuits = tracer.trace_batch(texts, " Mary", " John")
    >>> headtrace.find_families(circuits, grain="components").n
    1
    """
    check_grain(grain)
    population = population_of(run, labels)
    if n is not None and distance is not None:
        raise InputError("Give the number of families (n) or the distance between them, not both.")
    if n is not None and not 1 <= n <= len(population):
        raise InputError(
            f"n={n}: expected a number of families from 1 to {len(population)}, the number of circuits."
        )
    if distance is not None and not 0 <= distance <= 1:
        raise InputError(
            f"distance={distance}: expected a Jaccard distance from 0 (the same) to 1 (nothing shared)."
        )
    if k_max < 1 or controls < 20 or resamples < 2:
        raise InputError(
            f"k_max={k_max}, controls={controls}, resamples={resamples}: expected at least 1, 20 (for a "
            "quantile of 95 %) and 2."
        )
    sets = population.sets(grain)
    tree = average_linkage(condensed(sets.matrix))
    if n is not None:
        choice = Choice(n, "given", 0, None, None, pl.DataFrame())
    elif distance is not None:
        choice = Choice(clusters_below(tree, distance), "distance", 0, None, None, pl.DataFrame())
    else:
        choice = choose(sets.matrix, k_max=k_max, controls=controls, resamples=resamples, seed=seed)
    return Families(population, grain, by_size(cuts(tree, choice.n)[-1]), tree, choice)
