"""Keep only the circuit: ablate every head component outside it, and see how much of the answer is left.

    found = faithfulness(circuit, model, ablation="mean")
    print(found.summary())
    found.curve                       # one row per circuit size

Only attention is ablated unless ``mlps`` says otherwise: embeddings, biases and (by default) all MLPs stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import polars as pl
import torch

from headtrace.causal.changes import FixedValues, Intervention, Patch
from headtrace.causal.effects import check_seed, mean
from headtrace.causal.execute import Copy
from headtrace.causal.metric import require_metric
from headtrace.causal.opening import open_circuit
from headtrace.causal.patching import NEAREST, drawn_like, measure, random_like
from headtrace.errors import InputError
from headtrace.lines import Skipped
from headtrace.progress import Progress
from headtrace.tables import chart, html_table, paragraph
from headtrace.vocabulary import ROOT, Kind, Site

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.circuits import Circuit
    from headtrace.models import Model, Recording

Ablation = Literal["zero", "mean"]
Unit = Literal["component", "position", "head"]
Mlps = Literal["keep", "ablate"]


@dataclass(frozen=True, repr=False)
class Faithfulness:
    """The metric of the whole model, of the circuit alone, with nothing kept, and without the circuit."""

    metric: str
    full: float
    empty: float
    circuit: float
    without: float
    """Everything but the circuit is kept."""
    without_random: float | None
    """Everything is kept but as many random components of the same layers: mean over the control draws."""
    without_matched: float | None
    """The same with components of the same layers that carry about as much attention as those of the circuit."""
    kept: int
    """Head components (layer, head, dest, src) that the circuit keeps, of ``total``."""
    total: int
    curve: pl.DataFrame
    """firings, kept, metric, faithfulness, random (faithfulness of as many random firings of the same layers)."""
    ablation: str
    unit: str
    mlps: str
    skipped: tuple[Skipped, ...] = ()
    """Lines of a file of reference prompts that could not be read; the means are over the others."""

    @property
    def faithfulness(self) -> float:
        """(m(circuit) - m(empty)) / (m(full) - m(empty)): 1 if the circuit does all that attention does."""
        return normalised(self.circuit, self.full, self.empty)

    def summary(self) -> str:
        mlps = "all MLPs kept" if self.mlps == "keep" else "MLPs outside the circuit ablated too"
        controls = (
            ""
            if self.without_random is None or self.without_matched is None
            else f" (as many random components of the same layers: {self.without_random:.3f}; "
            f"with as much attention: {self.without_matched:.3f})"
        )
        return (
            f"{self.ablation} ablation of head components outside the circuit (unit: {self.unit}; {mlps}): "
            f"{self.kept} of {self.total} kept\n"
            f"{self.metric}: model {self.full:.3f}, circuit alone {self.circuit:.3f}, nothing kept {self.empty:.3f}, "
            f"all but the circuit {self.without:.3f}{controls}\nfaithfulness {self.faithfulness:.3f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        named = [f.name for f in fields(self) if f.name not in ("curve", "skipped")]
        plain: dict[str, Any] = {name: getattr(self, name) for name in named}
        plain["skipped"] = [asdict(each) for each in self.skipped]
        return {**plain, "faithfulness": self.faithfulness, "curve": self.curve.to_dicts()}

    def frame(self) -> pl.DataFrame:
        """The curve: a row per circuit size."""
        return self.curve

    def __repr__(self) -> str:
        return (
            f"Faithfulness({self.faithfulness:.3f}: {self.metric} {self.circuit:.3f} of {self.full:.3f} with "
            f"{self.kept} of {self.total} head components, {self.ablation} ablation)"
        )

    def _repr_html_(self) -> str:
        rows = [
            ("the whole model", self.full),
            ("the circuit alone", self.circuit),
            ("nothing kept", self.empty),
            ("all but the circuit", self.without),
            ("all but as many at random", self.without_random),
            ("all but as many with as much attention", self.without_matched),
        ]
        first = paragraph(self.summary().split("\n")[0], bold=f"faithfulness {self.faithfulness:.3f}:")
        return f"<div>{first}{html_table(('kept', self.metric), rows)}{chart(self.plot())}</div>"

    def plot(self, path: str | Path | None = None) -> Figure:
        from headtrace.figures.causal import faithfulness_curves

        return faithfulness_curves([self], path)


def normalised(value: float, full: float, empty: float) -> float:
    """Where a metric lies between nothing kept (0) and the whole model (1)."""
    return (value - empty) / (full - empty) if full != empty else float("nan")


def faithfulness(
    circuit: Circuit,
    model: Model,
    *,
    ablation: Ablation = "mean",
    unit: Unit = "component",
    mlps: Mlps = "keep",
    reference: Recording | None = None,
    controls: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
) -> Faithfulness:
    """Run the model with only the circuit's attention, at every circuit size (firings by falling influence).

    ``zero`` drops a component from its head's mixture; ``mean`` puts the mean of the head's value vectors in its place:
    over the prompt's own positions, or over the prompts of a ``reference`` recording. ``unit`` says what a firing
    keeps: its (dest, src) alone, all sources at its destination (``position``), or its whole head (``head``).
    """
    check_choices(ablation, unit, mlps, controls, seed)
    recording = open_circuit(circuit, model)
    metric = require_metric(circuit.root, recording, "faithfulness to it")
    firings = [n.site for n in sorted(circuit.heads(), key=lambda n: (-(n.influence or 0.0), n.id))]
    generator = torch.Generator().manual_seed(seed)
    shuffled = [[random_like(recording, n, generator) for n in firings] for _ in range(controls)]
    matched = [drawn_like(recording, firings, generator, NEAREST) for _ in range(controls)]

    source = FixedValues.of(recording if reference is None else reference, ablation)
    kinds: tuple[Kind, ...] = ("head",) if mlps == "keep" else ("head", "mlp")

    def in_unit(site: Site) -> Site:
        """The head component of a firing, all of its head's at its destination, or all of its head's."""
        dest, src = site.dest if unit != "head" else None, site.src if unit == "component" else None
        return Site("head", site.layer, site.head, dest, src)

    def patch(chosen: Sequence[Site], all_but: tuple[Kind, ...] = ()) -> Patch:
        """Firings in their unit, and the MLPs that write a signal to one of them, or straight to the root."""
        sites = [in_unit(site) for site in chosen]
        targets = {ROOT, *chosen} if mlps == "ablate" else set[Site]()
        for edge in circuit.edges:
            writer = circuit.node(edge.source)
            if writer.kind == "mlp" and circuit.node(edge.target).site in targets:
                sites.append(writer.site)
        return Patch(source, tuple(sites), all_but=all_but)

    # Without the circuit, and without its controls; then with only the first firings, at every size.
    sizes = range(len(firings) + 1)
    patches = [patch(nodes) for nodes in (firings, *shuffled, *matched)]
    patches += [patch(nodes[:size], kinds) for nodes in (firings, *shuffled) for size in sizes]
    values = measure([Copy(recording, Intervention((each,)), metric) for each in patches], progress)
    without, values = values[: 1 + 2 * controls], values[1 + 2 * controls :]
    curve, others = values[: len(sizes)], values[len(sizes) :]

    visible = torch.stack([v[0] for v in recording.visible])[:, None]
    full, empty = metric.of(recording), curve[0]
    rows: list[dict[str, Any]] = []
    for size in sizes:
        kept = Patch(source, tuple(in_unit(site) for site in firings[:size]))
        heads = kept.masks(model, recording.lengths[0]).get("head")
        rows.append(
            {
                "firings": size,
                "kept": 0 if heads is None else int((heads & visible).sum()),
                "metric": curve[size],
                "faithfulness": normalised(curve[size], full, empty),
                "random": mean(tuple(normalised(v, full, empty) for v in others[size :: len(sizes)])),
            }
        )
    schema: Any = {"firings": pl.Int64, "kept": pl.Int64}
    schema |= dict.fromkeys(("metric", "faithfulness", "random"), pl.Float64)
    return Faithfulness(
        metric=metric.name,
        full=full,
        empty=empty,
        circuit=curve[-1],
        without=without[0],
        without_random=mean(tuple(without[1 : 1 + controls])),
        without_matched=mean(tuple(without[1 + controls :])),
        kept=rows[-1]["kept"],
        total=int(visible.sum()) * model.n_heads,
        curve=pl.DataFrame(rows, schema=schema),
        ablation=ablation if reference is None else f"{ablation} (reference)",
        unit=unit,
        mlps=mlps,
    )


def check_choices(ablation: str, unit: str, mlps: str, controls: int, seed: int = 0) -> None:
    """Raise ``InputError`` for options that cannot be, before anything runs."""
    check_seed(seed)
    if controls < 0:
        raise InputError(f"controls={controls}: expected 0 or more random draws.")
    for name, given, known in (
        ("ablation", ablation, ("zero", "mean")),
        ("unit", unit, ("component", "position", "head")),
        ("mlps", mlps, ("keep", "ablate")),
    ):
        if given not in known:
            raise InputError(f"{name}={given!r}: expected one of {', '.join(map(repr, known))}.")
