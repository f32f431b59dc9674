"""Families of circuits: which are alike, who stands for them, what they agree with.

families = headtrace.find_families(run, grain="edge-channel")
families.labels, families.representatives
print(families.agreement("order"))
families.save("families")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from jaxtyping import Float, Int

from headtrace.circuits import Circuit
from headtrace.errors import InputError
from headtrace.families.agreement import PERMUTATIONS, Agreement, agreement
from headtrace.families.choosing import CONTROLS, K_MAX, RESAMPLES, Choice, choose
from headtrace.families.distances import average_linkage, condensed, sums_to_clusters
from headtrace.families.exclusive import exclusive_items
from headtrace.families.file import FamiliesFile
from headtrace.families.items import Grain, check_grain
from headtrace.families.population import Labels, Population, Sets, model_of
from headtrace.families.sources import population_of
from headtrace.families.stability import SHARE, Stability, stability_of
from headtrace.families.trees import by_size, clusters_below, cuts
from headtrace.notebook import frame, paragraph
from headtrace.runs.frames import RunLike

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.families.ablation import ExclusiveAblation
    from headtrace.models import Model

WITHIN, OUTSIDE = 0.5, 0.1
"""An exclusive edge: at least this share of the family's circuits have it, and at most this share of all others."""
FILES = ("families.json", "clusters.png", "stability.png", "representatives.html")


@dataclass(frozen=True, repr=False)
class Families:
    """Families of a population, numbered from 1 by falling size."""

    population: Population
    grain: Grain
    family: Int[np.ndarray, " circuit"]
    """The family of each circuit, in the order of the population."""
    tree: Float[np.ndarray, "merge 4"]
    """Average linkage of the Jaccard distances, as scipy has it."""
    choice: Choice
    """How many there are, and why."""
    ablated: ExclusiveAblation | None = None
    """What the ablation of exclusive edges showed, if it was asked for."""

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
        ids = self.members(family)
        if most is not None and most < len(ids):
            places = np.sort(np.random.default_rng(seed).permutation(len(ids))[:most])
            ids = [ids[place] for place in places]
        return [self.population.circuit(id) for id in ids]

    def agreement(self, column: str, *, permutations: int = PERMUTATIONS, seed: int = 0) -> Agreement:
        """Adjusted Rand index and normalised mutual information with a column of labels, with p-values."""
        labels = self.population.column(column).to_list()
        return agreement(self.family.tolist(), labels, permutations=permutations, seed=seed)

    def exclusive(
        self, family: int, *, within: float = WITHIN, outside: float = OUTSIDE, grain: Grain | None = None
    ) -> pl.DataFrame:
        """Edges that are frequent in a family and rare outside, at this grain (of components: whole edges).

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
        """The same families with what the ablation showed, which is then saved, too."""
        return replace(self, ablated=ablated)

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
        model = model_of(self.population)
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

    ``n``: how many families; ``distance``: two groups whose circuits are on average further apart stay two; with
    neither, the number is chosen (``families/choosing.py`` has the rule). ``labels``: of circuits that come without.

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
    _check(n, distance, k_max, controls, resamples, len(population))
    sets = population.sets(grain)
    tree = average_linkage(condensed(sets.matrix))
    if n is not None:
        choice = replace(_EMPTY, n=n, by="given")
    elif distance is not None:
        choice = replace(_EMPTY, n=clusters_below(tree, distance), by="distance")
    else:
        choice = choose(sets.matrix, k_max=k_max, controls=controls, resamples=resamples, seed=seed)
    return Families(population, grain, by_size(cuts(tree, choice.n)[-1]), tree, choice)


_EMPTY = Choice(1, "given", 0, None, None, pl.DataFrame())


def _check(
    n: int | None, distance: float | None, k_max: int, controls: int, resamples: int, circuits: int
) -> None:
    if n is not None and distance is not None:
        raise InputError("Give the number of families (n) or the distance between them, not both.")
    if n is not None and not 1 <= n <= circuits:
        raise InputError(
            f"n={n}: expected a number of families from 1 to {circuits}, the number of circuits."
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
