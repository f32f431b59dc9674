"""Comparing circuits: nodes and edges that they share or that only one has; and, in order, when each appears.

>>> from headtrace.circuits.describe import example
>>> found = compare_circuits([example(), example().prune(min_influence=2.0)], names=("all", "pruned"))
>>> found.table.select("kind", "item", "present").rows()
[('node', 'L9H6 1->0', [True, False]), ('node', 'MLP 3 @1', [True, False]),
 ('edge', 'L9H6 1->0 => root', [True, False]), ('edge', 'MLP 3 @1 => L9H6 1->0', [True, False])]

The circuits may be of several prompts, methods, or checkpoints of one model. Nodes are matched by component and
position where all prompts are the same, otherwise by component alone, or by the roles of positions where they
are known. Embeddings, biases and offsets are left out, as in families.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import polars as pl
from jaxtyping import Float

from headtrace.circuits import Circuit
from headtrace.circuits.parts import same_model
from headtrace.errors import InputError
from headtrace.families.population import (
    ROOT_NAME,
    Grain,
    check_grain,
    component_name,
    describe_model,
    edge_item,
    require_one_model,
    role_at,
)
from headtrace.tables import WithTable, frame, latex_table, paragraph
from headtrace.vocabulary import Site
from headtrace.writing import write_report, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

By = Literal["positions", "roles", "components"]
SCHEMA = "headtrace.comparison/1"
_TYPES: Any = {
    "kind": pl.String, "item": pl.String, "circuits": pl.Int64, "first": pl.Int64, "last": pl.Int64,
    "present": pl.List(pl.Boolean), "influence": pl.List(pl.Float64),
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class CircuitComparison(WithTable):
    """Nodes and edges of several circuits, in the order in which the circuits were given."""

    table: pl.DataFrame
    """kind (node, edge), item, in how many circuits, the numbers of the first and last of them (from 0), whether it
    is in each (present), and the share of the root's whole that passes through it in each (influence)."""
    names: tuple[str, ...]
    grain: Grain
    by: By
    circuits: tuple[Circuit, ...]
    warnings: tuple[str, ...] = ()
    """Why the comparison may mislead: different weights, positions of different prompts, missing roles."""

    @property
    def unit(self) -> str:
        """What similarity counts: edges, or nodes at the grain of components."""
        return "node" if self.grain == "components" else "edge"

    @property
    def shared(self) -> pl.DataFrame:
        """What all circuits have."""
        return self.table.filter(pl.col("circuits") == len(self.names))

    def exclusive(self, which: int | str) -> pl.DataFrame:
        """What only one circuit has, by its number or name."""
        number = self._number(which)
        return self.table.filter((pl.col("circuits") == 1) & (pl.col("first") == number))

    def appearing(self, which: int | str) -> pl.DataFrame:
        """What a circuit is the first to have, in the order given."""
        return self.table.filter(pl.col("first") == self._number(which))

    def disappearing(self, which: int | str) -> pl.DataFrame:
        """What a circuit is the last to have, unless it is the last one."""
        number = self._number(which)
        return self.table.filter((pl.col("last") == number) & (number < len(self.names) - 1))

    def _number(self, which: int | str) -> int:
        number = self.names.index(which) if which in self.names else which
        if not isinstance(number, int) or not 0 <= number < len(self.names):
            raise InputError(f"There is no circuit {which!r}; there are: {', '.join(map(repr, self.names))}.")
        return number

    @property
    def similarity(self) -> Float[np.ndarray, "circuit circuit"]:
        """Jaccard similarity of every two circuits, by edges (at the grain of components, by nodes)."""
        rows = self.table.filter(kind=self.unit)["present"].to_list()
        present = np.array(rows, dtype=np.float64).reshape(-1, len(self.names))
        both, sizes = present.T @ present, present.sum(0)
        union = sizes[:, None] + sizes - both
        return np.where(union > 0, both / np.maximum(union, 1), 1.0)

    def __repr__(self) -> str:
        shared = ", ".join(
            f"{self.shared.filter(kind=kind).height} of {self.table.filter(kind=kind).height} {kind}s in all"
            for kind in self.table["kind"].unique(maintain_order=True)
        )
        return f"CircuitComparison({len(self.names)} circuits by {self.by}: {shared or 'no items'})"

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + frame(self.table.head(20).select("kind", "item", "circuits"))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""

        def counted(part: pl.DataFrame) -> dict[str, int]:
            return {kind: part.filter(kind=kind).height for kind in ("node", "edge")}

        each = [
            {
                "name": name,
                "exclusive": counted(self.exclusive(i)),
                "appearing": counted(self.appearing(i)),
                "disappearing": counted(self.disappearing(i)),
            }
            for i, name in enumerate(self.names)
        ]
        about = {"schema": SCHEMA, "grain": self.grain, "by": self.by, "warnings": list(self.warnings)}
        numbers = {"shared": counted(self.shared), "circuits": each, "similarity": self.similarity.tolist()}
        return about | numbers | {"items": self.table.to_dicts()}

    def write_json(self, path: str | Path) -> Path:
        """Write the comparison as JSON."""
        return write_report(path, self.to_dict())

    def write_latex(self, path: str | Path) -> Path:
        """Write what the circuits share as a LaTeX table."""
        return write_text(path, latex_table(self.table) + "\n")

    def to_html(self, path: str | Path) -> Path:
        """Write the page that holds all circuits; two are side by side."""
        from headtrace.explorer.page import write_page

        return write_page(self.circuits, path, compare=len(self.circuits) == 2)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Which items each circuit has."""
        from headtrace.figures.families import comparison_grid

        return comparison_grid(self, path)

    def save(self, folder: str | Path) -> Path:
        """Write comparison.json, comparison.png and comparison.html into a folder."""
        place = Path(folder)
        self.write_json(place / "comparison.json")
        self.plot(place / "comparison.png")
        self.to_html(place / "comparison.html")
        return place


def compare_circuits(
    circuits: Sequence[Circuit],
    *,
    names: Sequence[str] | None = None,
    grain: Grain = "edges",
    by: By | None = None,
    roles: Sequence[Mapping[str, int]] | None = None,
) -> CircuitComparison:
    """Compare two or more circuits; ``by`` says what matches (by default positions for one prompt, else components)."""
    check_grain(grain)
    many = list(circuits)
    if len(many) < 2:
        raise InputError(f"A comparison needs at least two circuits, and there is {len(many) or 'none'}.")
    if names is None:
        names = [chr(ord("A") + i) if i < 26 else str(i) for i in range(len(many))]
    if len(names) != len(many) or len(set(names)) < len(names):
        raise InputError(
            f"Give each of the {len(many)} circuits a name of its own; the names are {[*names]!r}."
        )
    # Circuits of other tools may come without token ids: then the labels of tokens have to agree.
    one_prompt = all(
        (each.prompt.token_ids or each.prompt.tokens) == (many[0].prompt.token_ids or many[0].prompt.tokens)
        for each in many
    )
    by = check_by(by or ("positions" if one_prompt else "components"))
    of_circuit: Sequence[Mapping[str, int]] = [{} for _ in many] if roles is None else roles
    warnings = check_weights(many, grain)
    if by == "roles" and not all(of_circuit):
        without = sum(not each for each in of_circuit)
        warnings.append(
            f"{without} of {len(many)} circuits come without roles: their positions are compared instead."
        )
    if by == "positions" and not one_prompt:
        warnings.append(
            "The prompts differ, so the same position may hold different words: match by roles or components."
        )
    items = [_items(circuit, grain, by, each) for circuit, each in zip(many, of_circuit, strict=True)]
    return CircuitComparison(_table(items), tuple(names), grain, by, tuple(many), tuple(warnings))


def check_by(by: str) -> By:
    if by not in get_args(By):
        raise InputError(f"by={by!r}: expected one of {', '.join(map(repr, get_args(By)))}.")
    return by  # type: ignore[return-value]


def check_weights(circuits: Sequence[Circuit], grain: Grain) -> list[str]:
    """A warning where the weights of the models differ; an error where the circuits cannot be compared at all.

    Models of one architecture with the same name (revisions), or that give the same prompt the same tokens (checkpoints
    in folders of their own), differ in their weights only. Their heads can be compared, their channels cannot.
    """
    first = circuits[0]
    others = [circuit for circuit in circuits if not same_model(first.model, circuit.model)]
    if not others:
        return []
    for circuit in others:
        same_name = circuit.model.name == first.model.name
        same_tokens = circuit.prompt.token_ids == first.prompt.token_ids != ()
        if circuit.model.architecture != first.model.architecture or not (same_name or same_tokens):
            require_one_model([first.model, circuit.model])
    a, b = describe_model(first.model), describe_model(others[0].model)
    if grain == "edge-channel":
        raise InputError(
            f"{a} and {b} have different weights, and channels are computed from weights: channel 3 of one is "
            "unrelated to channel 3 of the other. Compare with grain='edges'."
        )
    return [
        f"The weights differ ({a}, {b}): heads are matched by their place in the model, which means the same only for "
        "checkpoints of one training run."
    ]


def _items(circuit: Circuit, grain: Grain, by: By, roles: Mapping[str, int]) -> dict[tuple[str, str], float]:
    """Nodes and edges under the names by which they are compared, with the influence that passes through them."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    names = {node.id: site_name(node.site, by, roles) for node in circuit.nodes}
    for node in circuit.nodes:
        name = names[node.id]
        if name is not None and name != ROOT_NAME:
            found["node", name] += node.influence or 0.0
    if grain == "components":
        return found
    for edge, flow in circuit.flows().items():
        source, target = names[edge.source], names[edge.target]
        if source is None or target is None:
            continue
        for channel in (edge.channels or (None,)) if grain == "edge-channel" else (None,):
            found["edge", edge_item(source, target, channel)] += flow
    return found


def site_name(site: Site, by: By, roles: Mapping[str, int]) -> str | None:
    """The name by which a node is compared; None for components that are left out.

    >>> site_name(Site("head", 9, 6, 14, 3), "roles", {"end": 14, "S1": 2})
    'L9H6 end->S1+1'
    """
    name = component_name(site)
    if name is None or name == ROOT_NAME or by == "components":
        return name
    dest, src = ((role_at(at, roles) if by == "roles" else None) or at for at in (site.dest, site.src))
    return f"{name} {dest}->{src}" if site.kind == "head" else f"{name} @{dest}"


def _table(found: Sequence[Mapping[tuple[str, str], float]]) -> pl.DataFrame:
    """Nodes before edges; then by the first circuit that has it, the most shared and most influential first."""
    rows: list[dict[str, Any]] = []
    strongest: dict[tuple[str, str], float] = {}
    for kind, item in dict.fromkeys(key for each in found for key in each):
        influence = [each.get((kind, item)) for each in found]
        where = [i for i, value in enumerate(influence) if value is not None]
        strongest[kind, item] = max(value for value in influence if value is not None)
        row = {"kind": kind, "item": item, "circuits": len(where), "first": where[0], "last": where[-1]}
        rows.append({**row, "present": [value is not None for value in influence], "influence": influence})

    def order(row: dict[str, Any]) -> Any:
        influence = strongest[row["kind"], row["item"]]
        return row["kind"] == "edge", row["first"], -row["circuits"], -row["last"], -influence, row["item"]

    return pl.DataFrame(sorted(rows, key=order), schema=_TYPES)
