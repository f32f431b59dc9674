"""Do heads read the same in two circuits, or in two families? The cosine of their incoming signals.

    found = headtrace.compare_signals(a, b, model)
    found.table, found.same, found.other, found.opposite

A head's query signal in a circuit is the sum of all signals that the circuit has on the query side of its firings,
each as the residual vector that carries it (`headtrace.causal.signals`); its key signal alike. Heads are compared by
the cosine of these sums: near 1 they look for the same, near 0 for something else, below 0 for the opposite. Of two
families, every circuit of one is compared with every circuit of the other, and the mean is given. The control is what
the same head shows on two prompts of one family: no cosine can be expected to be higher than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Float

from headtrace.causal.opening import open_circuit
from headtrace.causal.signals import signal_vectors
from headtrace.circuits import Circuit
from headtrace.errors import InputError
from headtrace.families.population import require_one_model
from headtrace.models.devices import on_host
from headtrace.progress import Progress
from headtrace.tables import frame, paragraph
from headtrace.vocabulary import AttentionSide, head_name
from headtrace.writing import write_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.models import Model

SAME, APART = 0.7, 0.3
"""Cosines from 0.7 up: the same; within 0.3 of zero: something else; from -0.3 down: the opposite."""
FEWEST = 3
"""Circuits that each side needs for the verdict that they differ."""
SHARED_BASIS = 0.9
"""The mean cosine of two models' token embeddings from which a direction is taken to mean the same in both."""
RESAMPLES = 1000
SCHEMA = "headtrace.signals/1"
Reader = tuple[int, int, AttentionSide]
"""Layer, head and side."""
_TYPES: Any = {
    "layer": pl.Int64, "head": pl.Int64, "side": pl.String, "cosine": pl.Float64, "low": pl.Float64,
    "high": pl.Float64, "control": pl.Float64, "in_a": pl.Int64, "in_b": pl.Int64,
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class SignalComparison:
    """Cosines of the heads that both sides have."""

    table: pl.DataFrame
    """layer, head, side, cosine with its 95 % interval over prompts (null with one circuit on a side), control (null
    where no side has the head in two circuits), and how many circuits of each side have the head."""
    names: tuple[str, str]
    circuits: tuple[int, int]
    n_layers: int
    n_heads: int

    def _said(self, what: str) -> pl.DataFrame:
        rows = self.table.rows(named=True)
        return self.table.filter(
            pl.Series([self.verdict(**_judged(row)) == what for row in rows], dtype=pl.Boolean)
        )

    @property
    def same(self) -> pl.DataFrame:
        """Heads that read the same in both."""
        return self._said("the same").sort("cosine", descending=True)

    @property
    def other(self) -> pl.DataFrame:
        """Heads that read something else: what they read in the one says nothing about what they read in the other,
        although within each of them they read the same."""
        return self._said("something else").sort(pl.col("cosine").abs())

    @property
    def opposite(self) -> pl.DataFrame:
        """Heads that read the opposite."""
        return self._said("the opposite").sort("cosine")

    @property
    def undecided(self) -> pl.DataFrame:
        """Heads of which nothing can be said: what they read varies within a family as well, or there are too few
        circuits to tell."""
        decided = [self.same, self.other, self.opposite, self._said("partly the same")]
        return self.table.join(pl.concat(decided), on=["layer", "head", "side"], how="anti")

    @staticmethod
    def verdict(cosine: float, control: float | None, in_a: int = 1, in_b: int = 1) -> str:
        """What a cosine says, in words. The control has the last word: where a head reads something else on another
        prompt of the same family, that two families differ says nothing; and one circuit is no family.

        >>> SignalComparison.verdict(0.9, None), SignalComparison.verdict(0.04, 0.08, 9, 9)
        ('the same', 'varies within families, too')
        >>> SignalComparison.verdict(0.04, 0.95, 9, 9), SignalComparison.verdict(-1.0, None)
        ('something else', 'not enough circuits')
        """
        if cosine >= SAME:
            return "the same"
        if control is None or min(in_a, in_b) < FEWEST:
            return "not enough circuits"
        if control < SAME:
            return "varies within families, too"
        if cosine >= APART:
            return "partly the same"
        return "the opposite" if cosine <= -APART else "something else"

    def frame(self) -> pl.DataFrame:
        """The table, with the name of each head and what its cosine says in words (``reads``)."""
        rows = self.table.rows(named=True)
        return self.table.select(
            pl.format("L{}H{}", "layer", "head").alias("name"),
            pl.all(),
            pl.Series("reads", [self.verdict(**_judged(row)) for row in rows], dtype=pl.String),
        )

    def __repr__(self) -> str:
        counts = f"{self.same.height} the same, {self.other.height} something else, {self.opposite.height} the opposite"
        counts += f", {self.undecided.height} undecided"
        return f"SignalComparison({self.table.height} head sides of {' and '.join(self.names)}: {counts})"

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + frame(self.table)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, as ``--json`` prints it."""

        def listed(table: pl.DataFrame) -> list[str]:
            return [
                f"{head_name(l, h)} {side}" for l, h, side in table.select("layer", "head", "side").rows()
            ]

        return {
            "schema": SCHEMA,
            "names": list(self.names),
            "circuits": list(self.circuits),
            "same": listed(self.same),
            "other": listed(self.other),
            "opposite": listed(self.opposite),
            "undecided": listed(self.undecided),
            "table": self.table.to_dicts(),
        }

    def save(self, folder: str | Path) -> Path:
        """Write signals.json and signals.png into a folder."""
        write_report(Path(folder) / "signals.json", self.to_dict())
        self.plot(Path(folder) / "signals.png")
        return Path(folder)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Cosines over layers and heads, query and key side, beside their control."""
        from headtrace.figures.families import signal_maps

        return signal_maps(self, path)


def _judged(row: dict[str, Any]) -> dict[str, Any]:
    """What a verdict depends on."""
    return {name: row[name] for name in ("cosine", "control", "in_a", "in_b")}


def compare_signals(
    a: Circuit | Sequence[Circuit],
    b: Circuit | Sequence[Circuit],
    model: Model,
    *,
    other: Model | None = None,
    names: tuple[str, str] = ("A", "B"),
    seed: int = 0,
    progress: Progress | None = None,
) -> SignalComparison:
    """Compare what heads read in two circuits, or in two families of circuits.

    ``other`` is the model of ``b``, where that is another one that was trained from the model of ``a`` (or the other
    way round); one whose directions mean something else (`shared_basis`) is refused.

    >>> import headtrace
    >>> model = headtrace.load("builtin")
    >>> tracer = headtrace.Tracer(model)
    >>> circuit = tracer.trace("When Mary and John went to the store, John gave a drink to", " Mary", " John")
    >>> compare_signals(circuit, circuit, model).table["cosine"].round(6).unique().to_list()
    [1.0]
    """
    sides = [[each] if isinstance(each, Circuit) else list(each) for each in (a, b)]
    if not all(sides):
        raise InputError("There is no circuit on one side: give at least one for each.")
    models = (model, model if other is None else other)
    if other is None:
        require_one_model(circuit.model for side in sides for circuit in side)
    elif (basis := shared_basis(model, other)) < SHARED_BASIS:
        raise InputError(
            f"The token embeddings of {model.name!r} and {other.name!r} have a mean cosine of {basis:.2f}, and "
            f"{SHARED_BASIS} is asked for: directions of their residual streams need not mean the same."
        )
    total, done = len(sides[0]) + len(sides[1]), 0
    read: list[dict[Reader, list[np.ndarray]]] = []
    for side, its_model in zip(sides, models, strict=True):
        vectors: dict[Reader, list[np.ndarray]] = {}
        for circuit in side:
            for reader, vector in head_signals(circuit, its_model).items():
                vectors.setdefault(reader, []).append(vector)
            done += 1
            if progress is not None:
                progress(done, total)
        read.append(vectors)
    shared = sorted(set(read[0]) & set(read[1]), key=lambda reader: (reader[2] == "key", *reader[:2]))
    rng = np.random.default_rng(seed)
    rows = [_compared(reader, np.stack(read[0][reader]), np.stack(read[1][reader]), rng) for reader in shared]
    return SignalComparison(
        pl.DataFrame(rows, schema=_TYPES),
        names,
        (len(sides[0]), len(sides[1])),
        model.n_layers,
        model.n_heads,
    )


def shared_basis(a: Model, b: Model) -> float:
    """The mean cosine of two models' embeddings of the same tokens: near 1 where one was trained from the other a
    little, 0 for models that were trained apart or differ in size.

    >>> import headtrace
    >>> model = headtrace.load("builtin")
    >>> round(shared_basis(model, model), 6)
    1.0
    """
    embeddings: list[Any] = [each.hf.get_input_embeddings() for each in (a, b)]
    tables = [each.weight.detach() for each in embeddings]
    if tables[0].shape != tables[1].shape:
        return 0.0
    one, other = (on_host(table).double() for table in tables)
    return float(torch.nn.functional.cosine_similarity(one, other, dim=-1).mean())


def head_signals(circuit: Circuit, model: Model) -> dict[Reader, np.ndarray]:
    """For each head and side, the sum of the incoming signals of all of its firings, as a residual vector.

    A signal counts where it is read: at the destination for queries, at the source for keys.
    """
    found: dict[Reader, np.ndarray] = {}
    for _, signal, residual in signal_vectors(open_circuit(circuit, model), circuit):
        key: Reader = (signal.firing.layer, signal.firing.head, signal.side)
        vector = on_host(residual).numpy()
        found[key] = found[key] + vector if key in found else vector
    return {key: vector for key, vector in found.items() if vector.any()}


def _compared(
    reader: Reader,
    a: Float[np.ndarray, "circuit d"],
    b: Float[np.ndarray, "other d"],
    rng: np.random.Generator,
) -> dict[str, Any]:
    """The row of one head and side. The mean cosine over all pairs is the product of the mean unit vectors."""
    units = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b)]
    cosine = float(units[0].mean(0) @ units[1].mean(0))
    low = high = None
    if min(len(a), len(b)) > 1:
        pairs = units[0] @ units[1].T
        drawn = [rng.integers(0, len(x), (RESAMPLES, len(x))) for x in (a, b)]
        weights = [
            np.stack([np.bincount(row, minlength=len(x)) for row in d]) / len(x)
            for d, x in zip(drawn, (a, b), strict=True)
        ]
        values = ((weights[0] @ pairs) * weights[1]).sum(1)
        low, high = (float(q) for q in np.quantile(values, (0.025, 0.975)))
    # The mean cosine of two different circuits of one side.
    within = [(np.square(x.sum(0)).sum() - len(x)) / (len(x) * (len(x) - 1)) for x in units if len(x) > 1]
    layer, head, side = reader
    return {
        "layer": layer, "head": head, "side": side, "cosine": cosine, "low": low, "high": high,
        "control": float(np.mean(within)) if within else None, "in_a": len(a), "in_b": len(b),
    }  # fmt: skip
