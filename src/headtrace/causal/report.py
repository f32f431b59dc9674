"""The result of a verification: what was compared, what the model contradicts, predictions, effects, the verdict.

>>> ledger = Ledger()
>>> ledger.compare("attention", "L9H6 14->3", in_file=0.5, measured=0.50001, allowed=1e-4)
>>> ledger.compare("attention", "L8H1 14->3", in_file=0.9, measured=0.2, allowed=1e-4)
>>> print(ledger.failures[0])
attention of L8H1 14->3: 0.9 in the file, 0.2 in the model (allowed 0.0001)
>>> overall(["PASS", "NOTHING TO VERIFY"]), overall(["PASS", "FAIL"])
('PASS', 'FAIL')
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headtrace.causal.effects import EdgeEffect, edge_table, effect_record, mean
from headtrace.causal.opening import Tolerance
from headtrace.circuits import Circuit
from headtrace.errors import InputError
from headtrace.tables import html_table, paragraph
from headtrace.writing import replacing, write_text

if TYPE_CHECKING:
    import polars as pl

    from headtrace.causal.difference_checks import PatchTest

SCHEMA = "headtrace.verification/2"
_OPTIONS = ("metric", "clean_metric", "reach", "scope", "controls", "seed")
Verdict = Literal["PASS", "FAIL", "NOT REPRODUCED", "OTHER PRECISION", "NOTHING TO VERIFY"]
"""What a verification comes to.

- ``PASS``: the numbers reproduce: all that the file says, and tracing again gives the same nodes and edges.
- ``FAIL``: the model contradicts a number or a flag.
- ``NOT REPRODUCED``: no number is contradicted, but tracing again gives other nodes or edges. Rounding may have decided
  a near tie on another machine, or something was taken out of the file or put into it.
- ``OTHER PRECISION``: the file was made in a coarser precision than the model runs in (or its numbers are only as good
  as one), and agrees as far as that precision can tell.
- ``NOTHING TO VERIFY``: the circuit claims nothing about causes.
"""
WORST_FIRST: tuple[Verdict, ...] = ("FAIL", "NOT REPRODUCED", "OTHER PRECISION", "PASS", "NOTHING TO VERIFY")


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of several verdicts; NOTHING TO VERIFY only if that is the verdict of all."""
    given = set(verdicts)
    for verdict in WORST_FIRST:
        if verdict in given:
            return verdict
    return "NOTHING TO VERIFY"


@dataclass(frozen=True)
class Mismatch:
    """One number, list or flag of a file that the model contradicts."""

    field: str
    """What the file calls it."""
    where: str
    """The node or the edge that it belongs to; empty for the circuit as a whole."""
    in_file: Any
    """What it is in the file."""
    measured: Any
    """What it is in the model."""
    allowed: float | None = None
    """How far apart the two may be; none where they must be equal."""

    def within(self, factor: float) -> bool:
        """Whether the two would agree with this many times what is allowed."""
        return self.allowed is not None and abs(self.in_file - self.measured) <= factor * self.allowed

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return _finite(asdict(self))

    def __str__(self) -> str:
        of = f" of {self.where}" if self.where else ""
        allowed = "" if self.allowed is None else f" (allowed {self.allowed:.2g})"
        return f"{self.field}{of}: {shown(self.in_file)} in the file, {shown(self.measured)} in the model{allowed}"


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """The same with None in place of infinity and NaN, for which JSON has no number."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def shown(value: Any) -> str:
    """A value in a sentence: numbers with as many digits as people read, text quoted, lists cut short."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "nothing"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        some = ", ".join(shown(item) for item in value[:8])
        return f"[{some}{', ...' if len(value) > 8 else ''}]"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass
class Ledger:
    """Comparisons as they are made."""

    failures: list[Mismatch] = field(default_factory=list[Mismatch])
    checked: Counter[str] = field(default_factory=Counter[str])
    """How many of each field were compared."""
    not_checked: list[str] = field(default_factory=list[str])
    """What could not be, and why."""
    if_not_traced: list[str] = field(default_factory=list[str])
    """What only tracing again compares."""
    places: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Fields that were compared, each with the node or edge that it belongs to."""

    def compare(
        self, name: str, where: str, *, in_file: float | None, measured: float, allowed: float
    ) -> None:
        """A number; what a file does not say is no claim."""
        if in_file is not None:
            self.between(name, where, in_file=in_file, low=measured, high=measured, allowed=allowed)

    def between(
        self, name: str, where: str, *, in_file: float, low: float, high: float, allowed: float
    ) -> None:
        """A number that may lie in a range."""
        self._note(name, where)
        if not low - allowed <= in_file <= high + allowed:  # what is not a number fails, too
            nearer = low if abs(in_file - low) <= abs(in_file - high) else high
            self.failures.append(Mismatch(name, where, in_file, nearer, allowed))

    def require(self, name: str, where: str, *, in_file: Any, measured: Any) -> None:
        """Something that is equal or is not."""
        self._note(name, where)
        if in_file != measured:
            self.failures.append(Mismatch(name, where, in_file, measured))

    def _note(self, name: str, where: str) -> None:
        self.checked[name] += 1
        self.places.add((name, where))

    def skip(self, what: str, *, unless_traced: bool = False) -> None:
        """Something that was not compared, said once; with ``unless_traced``, only if nothing is traced again."""
        where = self.if_not_traced if unless_traced else self.not_checked
        if what not in where:
            where.append(what)


@dataclass(frozen=True)
class Difference:
    """A node, an edge or a channel found only in the file, or only by tracing again."""

    what: str
    in_file: bool

    def __str__(self) -> str:
        return f"{self.what}: {'in the file only' if self.in_file else 'not in the file, and traced now'}"


@dataclass(frozen=True)
class Enough:
    """How much of a circuit's number its heads keep by themselves: a short measurement of sufficiency.

    All other head components take what they had on a counterfactual prompt; `headtrace.sufficiency` gives the whole
    curve, controls and baselines.
    """

    kept: float | None = None
    """The share of the difference between the two prompts that is kept; above 1: what opposes was left out."""
    counterfactual: str | None = None
    """The prompt that the others were taken from, as text."""
    reason: str | None = "no counterfactual"
    """Why it was not tested, where it was not."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.kept is None:
            return f"not tested ({self.reason})"
        return f"{self.kept:.2f} of the difference kept against {self.counterfactual!r}"


@dataclass(frozen=True)
class PredictionCheck:
    """One side of one firing: attention predicted without the claimed signals, and attention measured."""

    node: int
    firing: str
    side: str
    clean: float
    predicted: float
    measured: float
    allowed: float
    """How far the two may be apart."""

    @property
    def error(self) -> float:
        """How far apart the two are."""
        return abs(self.measured - self.predicted)

    @property
    def row(self) -> dict[str, Any]:
        """What tables and files have of it."""
        values = {"attention": self.clean, "predicted": self.predicted, "measured": self.measured}
        return {"node": self.node, "firing": self.firing, "side": self.side, **values}


@dataclass(frozen=True, repr=False)
class Report:
    """What the model showed when the circuit's claims were tested."""

    circuit: Circuit
    tolerance: Tolerance
    """How far numbers of the file and of the model may be apart, and what that follows from."""
    failures: tuple[Mismatch, ...]
    """What the model contradicts: field, node or edge, value in the file, value measured."""
    checked: Mapping[str, int]
    """How many of each field were compared."""
    not_checked: tuple[str, ...]
    """What could not be compared, and why."""
    predictions: tuple[PredictionCheck, ...]
    effects: tuple[EdgeEffect, ...]
    metric: str | None
    clean_metric: float | None
    reach: str
    scope: str
    controls: int
    seed: int
    left_out: int = 0
    """Offset edges that a global intervention cannot reach: no component writes them."""
    patches: PatchTest | None = None
    """Of a difference circuit: its components patched to the other run, beside their flows."""
    differences: tuple[Difference, ...] = ()
    """Nodes, edges and channels that the file has and tracing again does not give, or the other way round."""
    coarser: Tolerance | None = None
    """Where file and model have different precisions and agree to the coarser one: the tolerance of that."""
    enough: Enough = Enough()
    """Whether the circuit's heads are enough for the answer, where that was tested. It is no part of the verdict."""

    @property
    def verdict(self) -> Verdict:
        """The verdict (`Verdict`) on the whole circuit. ``"PASS"`` says that the numbers reproduce, not that the
        circuit is enough.

        Claims about causes are predictions of attention, contributions of content, what an MLP still writes, and flows.
        """
        if self.coarser is not None:
            return "OTHER PRECISION"
        if self.failures:
            return "FAIL"
        if self.differences:
            return "NOT REPRODUCED"
        stated = any(self.checked.get(name) for name in ("contribution", "left", "flow", "difference.value"))
        claims = self.predictions or (stated and self.circuit.edges)
        return "PASS" if claims else "NOTHING TO VERIFY"

    @property
    def why(self) -> str:
        """The reason for the verdict, in a sentence."""
        compared = sum(self.checked.values())
        if self.coarser is not None:
            stated = (self.circuit.method.settings or {}).get("dtype")
            made = (
                stated
                or f"{'a finer precision than ' if self.tolerance == self.coarser else ''}{self.coarser.precision}"
            )
            return (
                f"the file was made in {made} and the model runs in {self.tolerance.precision}: to the rounding of "
                f"{self.coarser.precision} they agree, which says nothing about smaller differences. Verify it on the "
                "model in its own precision, or trace it again"
            )
        if self.differences and not self.failures:
            return (
                f"the model contradicts none of the {compared:,} numbers and flags that were compared, but tracing "
                f"again gives other nodes or edges ({len(self.differences)}): rounding decided a near tie on another "
                "machine, or the file was changed"
            )
        if self.failures:
            return f"the model contradicts {len(self.failures)} of {compared:,} numbers and flags in the file"
        if self.verdict == "PASS" and self.patches is not None:
            return f"the model gives all {compared:,} numbers in the file: flows, edges and both ends"
        if self.verdict == "PASS" and not self.predictions:
            return f"numbers reproduce: the model gives all {compared:,} numbers and flags"
        if self.predictions:
            return (
                f"numbers reproduce: {len(self.predictions)} predictions hold, and the model gives all {compared:,} "
                "numbers and flags"
            )
        empty = (self.circuit.reason or "it is empty").split(";")[0]
        cause = (
            f"the method {self.circuit.method.name!r} predicts no attention"
            if self.circuit.edges
            else f"there is no circuit: {empty}"
        )
        return f"{cause} (the model gives all {compared:,} numbers and flags in the file)"

    @property
    def max_prediction_error(self) -> float:
        """The largest |measured - predicted| attention over every firing and side (0 for an empty circuit)."""
        return max((check.error for check in self.predictions), default=0.0)

    @property
    def median_prediction_error(self) -> float:
        """The median of |measured - predicted| attention (0 for an empty circuit)."""
        return statistics.median([c.error for c in self.predictions]) if self.predictions else 0.0

    @property
    def edges(self) -> pl.DataFrame:
        """One row per edge: changes of attention and metric, controls averaged, cosine and norm ratio."""
        return edge_table(self.effects)

    @property
    def firings(self) -> pl.DataFrame:
        """One row per firing and side: attention before, predicted and measured."""
        import polars as pl

        rows = [{**check.row, "error": check.error} for check in self.predictions]
        numbers = dict.fromkeys(("attention", "predicted", "measured", "error"), pl.Float64)
        schema: Any = {"node": pl.Int64, "firing": pl.String, "side": pl.String, **numbers}
        return pl.DataFrame(rows, schema=schema)

    def frame(self, of: str = "firings") -> pl.DataFrame:
        """A row per firing and side (predictions); or, with ``of``, per measured ``"edges"`` or ``"failures"``."""
        import polars as pl

        if of == "edges":
            return self.edges
        if of == "firings":
            return self.firings
        if of != "failures":
            raise InputError(f"frame({of!r}): a report has firings, edges and failures.")
        rows = [(each.field, each.where, shown(each.in_file), shown(each.measured)) for each in self.failures]
        words: Any = dict.fromkeys(("field", "where", "in_file", "measured"), pl.String)
        return pl.DataFrame(rows, schema=words, orient="row")

    def summary(self, failures: int = 8) -> str:
        """The verdict and the reasons for it, then: do claimed signals matter more than random channels?"""
        lines = [f"{self.verdict}: {self.why}", f"Enough: {self.enough}", f"Tolerance: {self.tolerance}"]
        found = [*self.failures, *self.differences]
        lines += [f"  {each}" for each in found[:failures]]
        if len(found) > failures:
            lines.append(f"  and {len(found) - failures} more")
        lines += [f"Not checked: {what}" for what in self.not_checked]
        if self.predictions:
            lines.append(
                f"Predictions: {len(self.predictions)} firing sides, largest |measured - predicted| attention "
                f"{self.max_prediction_error:.1e} (allowed {max(c.allowed for c in self.predictions):.1e}), median "
                f"{self.median_prediction_error:.1e}"
            )
        if self.left_out:
            lines.append(
                f"Left out: {self.left_out} {'edge' if self.left_out == 1 else 'edges'} from offsets, which no "
                "component writes (a global intervention has nothing to change)"
            )
        lines += [] if self.patches is None else self.patches.lines()
        effects = self.effects
        if not effects:
            return "\n".join(lines)
        lines.append(
            f"Edges: {len(effects)} ({self.reach}, scope {self.scope}), {self.controls} controls each"
        )
        for name, unit in (("attention", "attention"), ("metric", self.metric)):
            for action in ("ablate", "boost") if unit is not None else ():
                own = mean(tuple(getattr(e, f"{action}_{name}") for e in effects))
                control = mean(tuple(mean(getattr(e, f"control_{action}_{name}")) for e in effects))
                against = "" if control is None else f", random channels {control:+.4f}"
                lines.append(f"  {action} changes {unit} by {own:+.4f} on average{against}")
        cosine = statistics.median(e.cosine for e in effects)
        ratio = statistics.median(e.norm_ratio for e in effects)
        lines.append(
            f"  residual before and after ablation: median cosine {cosine:.4f}, norm ratio {ratio:.4f}"
        )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"Report({self.verdict}: {len(self.failures)} failures, {len(self.predictions)} predictions (largest error "
            f"{self.max_prediction_error:.1e}), {len(self.effects)} edges measured)"
        )

    def _repr_html_(self) -> str:
        parts = [paragraph(self.why, bold=self.verdict), paragraph(str(self.enough), bold="Enough")]
        parts.append(paragraph(f"Tolerance: {self.tolerance}"))
        if self.failures:
            rows = [(f.field, f.where, shown(f.in_file), shown(f.measured)) for f in self.failures[:20]]
            parts.append(html_table(("field", "where", "in the file", "in the model"), rows))
        if self.effects:
            strongest = [
                (e.source, e.target, e.edge.side, e.edge.weight, e.ablate_attention, e.ablate_metric)
                for e in self.strongest(10)
            ]
            titles = ("from", "into", "side", "weight", "attention when ablated", self.metric or "metric")
            parts.append(html_table(titles, strongest))
        return f"<div>{''.join(parts)}</div>"

    def strongest(self, k: int = 10) -> list[EdgeEffect]:
        """The edges whose ablation moves attention most."""
        return sorted(self.effects, key=lambda e: -abs(e.ablate_attention))[:k]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the per-edge table, as plain data."""
        circuit = self.circuit
        return {
            "schema": SCHEMA,
            "model": {"name": circuit.model.name, "weights_sha256": circuit.model.weights_sha256},
            "prompt": circuit.prompt.text,
            "verdict": self.verdict,
            "why": self.why,
            "tolerance": asdict(self.tolerance),
            "enough": self.enough.to_dict(),
            "failures": [failure.to_dict() for failure in self.failures],
            "differences": [asdict(each) for each in self.differences],
            "coarser": None if self.coarser is None else self.coarser.precision,
            "checked": dict(self.checked),
            "not_checked": list(self.not_checked),
            "max_prediction_error": self.max_prediction_error,
            "median_prediction_error": self.median_prediction_error,
            "n_predictions": len(self.predictions),
            "n_edges": len(self.effects),
            "n_left_out": self.left_out,
            **{name: getattr(self, name) for name in _OPTIONS},
            **({} if self.patches is None else {"patches": self.patches.to_dict()}),
            "predictions": [_finite({**check.row, "allowed": check.allowed}) for check in self.predictions],
        }

    def save(self, folder: str | Path) -> Path:
        """Write ``verification.json``, ``edges.parquet`` and ``circuit.json`` (with measured effects on its edges)."""
        path = Path(folder)
        write_text(path / "verification.json", json.dumps(self.to_dict(), indent=1) + "\n")
        with replacing(path / "edges.parquet") as temporary:
            self.edges.write_parquet(temporary)
        self.annotated().save(path / "circuit.json")
        return path

    def annotated(self) -> Circuit:
        """The circuit with the measured effects on its edges."""
        effects = {
            (e.edge.source, e.edge.target, e.edge.side): effect_record(e, self.reach, self.scope)
            for e in self.effects
        }
        edges = tuple(
            replace(e, effect=effects[key]) if (key := (e.source, e.target, e.side)) in effects else e
            for e in self.circuit.edges
        )
        return self.circuit.with_edges(edges)

    def plot(self, path: str | Path | None = None) -> Any:
        """Ablation and boost of claimed signals beside random channels; of a difference circuit, flow and patches."""
        from headtrace.figures.causal import edge_effects, flow_against_patches

        if self.patches is not None:
            return flow_against_patches(self, path)

        return edge_effects([self], path)
