"""Keep only the circuit: ablate every head component outside it, and see how much of the answer is left.

    found = faithfulness(circuit, model, ablation="mean")
    print(found.summary())
    found.curve                       # one row per circuit size

Only attention is ablated unless ``mlps`` says otherwise: embeddings, biases and (by default) all MLPs stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.causal.controls import matched, random_like
from headtrace.causal.edges import open_circuit
from headtrace.causal.measuring import check_seed
from headtrace.causal.metric import Metric, require_metric
from headtrace.errors import InputError
from headtrace.models.attention import per_query_head
from headtrace.models.forward import forward
from headtrace.models.observer import AttentionCall, Observer
from headtrace.notebook import chart, paragraph, table
from headtrace.progress import Progress
from headtrace.prompts import batches
from headtrace.vocabulary import ROOT, Site

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.circuits import Circuit
    from headtrace.models import Model, Recording

Ablation = Literal["zero", "mean"]
Unit = Literal["component", "position", "head"]
Mlps = Literal["keep", "ablate"]


@dataclass(frozen=True)
class Kept:
    """What one copy of the prompt keeps: masks over (layer, head, dest, src), and MLPs over (layer, token)."""

    heads: Bool[Tensor, "layer head dest src"]
    mlps: Bool[Tensor, "layer token"] | None = None


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
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "curve"}
        return {**plain, "faithfulness": self.faithfulness, "curve": self.curve.to_dicts()}

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
        told = paragraph(self.summary().split("\n")[0], bold=f"faithfulness {self.faithfulness:.3f}:")
        return f"<div>{told}{table(rows, ('kept', self.metric))}{chart(self.plot())}</div>"

    def plot(self, path: str | Path | None = None) -> Figure:
        from headtrace.figures.causal import faithfulness_curves

        return faithfulness_curves([self], path)


def normalised(value: float, full: float, empty: float) -> float:
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
    sizes = range(len(firings) + 1)
    generator = torch.Generator().manual_seed(seed)
    shuffled = [[random_like(recording, n, generator) for n in firings] for _ in range(controls)]

    def keep(sites: Sequence[Site]) -> Kept:
        return Kept(
            _head_mask(recording, sites, unit),
            None if mlps == "keep" else _mlp_mask(recording, circuit, sites),
        )

    def remove(sites: Sequence[Site]) -> Kept:
        whole = keep(sites)
        return Kept(~whole.heads, None if whole.mlps is None else ~whole.mlps)

    attended = [matched(recording, firings, generator) for _ in range(controls)]
    removed = [firings, *shuffled, *attended]
    runs: list[Callable[[], Kept]] = [lambda nodes=nodes: remove(nodes) for nodes in removed]
    runs += [lambda nodes=nodes[:size]: keep(nodes) for nodes in (firings, *shuffled) for size in sizes]
    values = metric_with(recording, metric, runs, ablation, reference, progress)
    without, values = values[: len(removed)], values[len(removed) :]
    curve, others = values[: len(sizes)], values[len(sizes) :]
    full, empty = metric.of(recording), curve[0]
    rows: list[dict[str, Any]] = []
    for size in sizes:
        random = [normalised(v, full, empty) for v in others[size :: len(sizes)]]
        kept = int(_head_mask(recording, firings[:size], unit).sum())
        share = normalised(curve[size], full, empty)
        row = {"firings": size, "kept": kept, "metric": curve[size], "faithfulness": share}
        rows.append({**row, "random": _mean(random)})
    schema: Any = {"firings": pl.Int64, "kept": pl.Int64}
    schema |= dict.fromkeys(("metric", "faithfulness", "random"), pl.Float64)
    total = sum(int(v[0].sum()) for v in recording.visible) * model.n_heads
    return Faithfulness(
        metric=metric.name,
        full=full,
        empty=empty,
        circuit=curve[-1],
        without=without[0],
        without_random=_mean(without[1 : 1 + controls]),
        without_matched=_mean(without[1 + controls :]),
        kept=rows[-1]["kept"],
        total=total,
        curve=pl.DataFrame(rows, schema=schema),
        ablation=ablation if reference is None else f"{ablation} (reference)",
        unit=unit,
        mlps=mlps,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def check_choices(ablation: str, unit: str, mlps: str, controls: int, seed: int = 0) -> None:
    """What can be wrong with the choices, said before anything runs."""
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


def _head_mask(
    recording: Recording, sites: Iterable[Site], unit: Unit
) -> Bool[Tensor, "layer head dest src"]:
    mask = torch.zeros_like(recording.patterns[:, 0], dtype=torch.bool)
    for n in sites:
        place: Any = (n.layer, n.head, n.dest, n.src)
        mask[place if unit == "component" else place[:3] if unit == "position" else place[:2]] = True
    return mask & torch.stack([v[0] for v in recording.visible])[:, None]


def _mlp_mask(recording: Recording, circuit: Circuit, sites: Sequence[Site]) -> Bool[Tensor, "layer token"]:
    """MLPs that write a signal to one of these firings, or straight to the root."""
    mask = torch.zeros_like(recording.norm_scales[:-1, 0], dtype=torch.bool)
    targets = {ROOT, *sites}
    for edge in circuit.edges:
        source: Any = circuit.node(edge.source)
        if source.kind == "mlp" and circuit.node(edge.target).site in targets:
            mask[source.layer, source.dest] = True
    return mask


class _Keeping(Observer):
    """Mixes only the values that each copy keeps; in place of the others, one vector per head."""

    def __init__(self, keep: list[Kept], instead: Float[Tensor, "layer head d_head"]) -> None:
        self.keep, self.instead = keep, instead

    def mix(self, call: AttentionCall, pattern: Tensor) -> Float[Tensor, "batch head dest d_head"]:
        mask = torch.stack([kept.heads[call.layer] for kept in self.keep])
        other = self.instead[call.layer][None, :, None]
        values = per_query_head(call.value, call.query.shape[1])
        # Rows of the pattern sum to one: sum_kept a v + sum_dropped a r = sum_kept a (v - r) + r.
        return (pattern * mask) @ (values - other) + other


class _KeepingMlps(Observer):
    """Replaces the writes of MLPs that a copy does not keep by zero, or by their mean over positions."""

    def __init__(self, keep: list[Kept], source: Recording, ablation: Ablation) -> None:
        self.keep, self.source, self.ablation = keep, source, ablation

    def mlp_write(self, layer: int, write: Tensor) -> Tensor:
        mask = torch.stack([kept.mlps[layer] for kept in self.keep if kept.mlps is not None])[..., None]
        source = self.source
        writes = torch.cat([source.mlp_writes[layer, b, :n] for b, n in enumerate(source.lengths)])
        other = writes.mean(dim=0) if self.ablation == "mean" else torch.zeros_like(writes[0])
        return torch.where(mask, write, other)


def replacement(
    recording: Recording, ablation: Ablation, reference: Recording | None
) -> Float[Tensor, "layer head d_head"]:
    """What stands for an ablated component: the value bias (zero: the bias is no head's), or a mean value vector."""
    weights = recording.model.weights
    if ablation == "zero":
        return weights.b_V.repeat_interleave(weights.group, dim=1)
    source = recording if reference is None else reference
    rows = [source.values[:, b, :, :n] for b, n in enumerate(source.lengths)]
    return torch.cat(rows, dim=2).mean(dim=2).repeat_interleave(weights.group, dim=1)


@torch.inference_mode()
def metric_with(
    recording: Recording,
    metric: Metric,
    runs: Sequence[Callable[[], Kept]],
    ablation: Ablation,
    reference: Recording | None = None,
    progress: Progress | None = None,
) -> list[float]:
    """The metric of each run, many copies of the prompt at a time; masks exist only while they are in use."""
    instead = replacement(recording, ablation, reference)
    values: list[float] = []
    for places in batches([recording.lengths[0]] * len(runs)):
        keep = [runs[place]() for place in places]
        reading = metric.reading()
        observers: list[Observer] = [_Keeping(keep, instead), reading]
        if keep[0].mlps is not None:
            observers.append(_KeepingMlps(keep, reference or recording, ablation))
        positions = metric.positions or (recording.lengths[0] - 1,)
        logits = forward(
            recording.model,
            recording.token_ids.expand(len(keep), -1),
            *observers,
            keep=torch.tensor(positions, device=recording.model.device).expand(len(keep), -1),
        )
        values += reading.value(logits).tolist()
        if progress is not None:
            progress(len(values), len(runs))
    return values
