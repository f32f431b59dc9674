"""Measuring edges: every one ablated and boosted in the running model, beside random channels of the same head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from headtrace.causal.edges import ABLATE, BOOST, Reach, edit, residual_change
from headtrace.causal.edits import Intervention, run
from headtrace.causal.metric import Metric
from headtrace.causal.report import EdgeEffect
from headtrace.causal.signals import Scope, Signal, random_channels
from headtrace.circuits import Circuit, Edge
from headtrace.errors import InputError
from headtrace.progress import Progress
from headtrace.prompts import batches
from headtrace.vocabulary import ATTENTION_SIDES

if TYPE_CHECKING:
    from headtrace.models import Recording


def check_options(controls: int, reach: str, scope: str, seed: int = 0) -> None:
    """What can be wrong with the options of a verification, said before anything runs."""
    check_seed(seed)
    if controls < 0:
        raise InputError(f"controls={controls}: expected 0 or more random draws per edge.")
    if reach not in ("local", "global"):
        raise InputError(f"reach={reach!r}: expected 'local' (one head) or 'global' (every reader).")
    if scope not in ("claim", "token"):
        raise InputError(f"scope={scope!r}: expected 'claim' (every visible key) or 'token' (one position).")


def check_seed(seed: int) -> None:
    """Generators of random numbers take 64 bits."""
    if not 0 <= seed < 2**63:
        raise InputError(f"seed={seed}: expected a whole number from 0 to 2^63 - 1.")


_CHOICES = "'all', 'none', 'top:N' or 'random:N', such as 'top:20'"


def choose_edges(circuit: Circuit, which: str | Sequence[Edge], seed: int = 0) -> list[Edge]:
    """Edges that decide attention (query and key side): all, the heaviest, or some drawn at random."""
    inner = [e for e in circuit.edges if e.side in ATTENTION_SIDES]
    if not isinstance(which, str):
        return _listed(which)
    if which == "all":
        return inner
    if which == "none":
        return []
    how, _, number = which.partition(":")
    if how == "top" and number.isdigit():
        return sorted(inner, key=lambda edge: -edge.weight)[: int(number)]
    if how == "random" and number.isdigit():
        order = torch.randperm(len(inner), generator=torch.Generator().manual_seed(seed)).tolist()
        return [inner[i] for i in sorted(order[: int(number)])]
    raise InputError(f"edges={which!r}: expected {_CHOICES}.")


def _listed(which: Any) -> list[Edge]:
    given: list[Any] = list(which) if isinstance(which, Iterable) else [which]  # type: ignore[arg-type]
    if not isinstance(which, Iterable) or not all(isinstance(edge, Edge) for edge in given):
        raise InputError(f"edges={which!r}: expected {_CHOICES}, or a list of edges of the circuit.")
    return given


def within_reach(circuit: Circuit, edges: Sequence[Edge], reach: Reach) -> list[Edge]:
    """Edges that an intervention can change: globally, all but offsets, which no component writes."""
    return [e for e in edges if reach == "local" or circuit.node(e.source).kind != "offset"]


@dataclass(frozen=True)
class Measuring:
    """How the edges of one circuit are measured."""

    recording: Recording
    circuit: Circuit
    metric: Metric | None
    controls: int
    reach: Reach
    scope: Scope
    seed: int

    @property
    def per_edge(self) -> int:
        """Interventions for each edge: its own, and its controls."""
        return 2 * (self.controls + 1)

    @cached_property
    def clean(self) -> float | None:
        """The metric without any intervention."""
        return None if self.metric is None else self.metric.of(self.recording)

    def measure(self, edges: Sequence[Edge], progress: Progress | None = None) -> list[EdgeEffect]:
        """Ablation and boost of every edge and of its random-channel controls: attention and metric.

        Edges whose signals enter at similar layers run together; the interventions of a few edges exist at a time, so
        that memory does not grow with the circuit.
        """
        generator = torch.Generator().manual_seed(self.seed)
        variants = [self._variants(edge, generator) for edge in edges]
        per_edge = self.per_edge
        order = sorted(range(len(edges)), key=lambda i: self._entry(variants[i][0]))
        effects: dict[int, EdgeEffect] = {}
        for places in batches([self.recording.lengths[0] * per_edge] * len(order)):
            group = [order[place] for place in places]
            interventions = [
                Intervention((edit(self.recording, variant, factor, self.reach, self.scope),), variant.firing)
                for i in group
                for variant in variants[i]
                for factor in (ABLATE, BOOST)
            ]
            outcome = run(self.recording, interventions, self.metric)
            attention = outcome.attention.reshape(len(group), per_edge).tolist()
            values = [None] * len(group)
            if outcome.metric is not None:
                values = outcome.metric.reshape(len(group), per_edge).tolist()
            for place, i in enumerate(group):
                effects[i] = self._effect(edges[i], variants[i][0], attention[place], values[place])
            if progress is not None:
                progress(per_edge * len(effects), per_edge * len(edges))
        return [effects[i] for i in range(len(edges))]

    def _variants(self, edge: Edge, generator: torch.Generator) -> tuple[Signal, ...]:
        """The claimed signal, and the same in channels drawn at random."""
        signal = Signal.of(self.circuit, edge)
        draws = random_channels(signal.channels, self.recording.model.d_head, self.controls, generator)
        return (signal, *(signal.with_channels(draw) for draw in draws))

    def _entry(self, signal: Signal) -> int:
        """The layer where an intervention on the signal begins."""
        return signal.firing.layer if self.reach == "local" else signal.component.layer or 0

    def _effect(
        self, edge: Edge, signal: Signal, attention: list[float], values: list[float] | None
    ) -> EdgeEffect:
        f = signal.firing
        before = float(self.recording.attention.at(f.layer, 0, f.head, f.dest, f.src))

        def change(numbers: list[float] | None, start: float | None) -> list[Any]:
            if numbers is None or start is None:
                return [None] * len(attention)
            return [n - start for n in numbers]

        d_attention, d_metric = change(attention, before), change(values, self.clean)
        cosine, ratio = residual_change(self.recording, signal)
        cosine_boost, ratio_boost = residual_change(self.recording, signal, BOOST)
        return EdgeEffect(
            edge=edge,
            source=self.circuit.node(edge.source).name,
            target=self.circuit.node(edge.target).name,
            attention=before,
            ablate_attention=d_attention[0],
            boost_attention=d_attention[1],
            ablate_metric=d_metric[0],
            boost_metric=d_metric[1],
            control_ablate_attention=tuple(d_attention[2::2]),
            control_boost_attention=tuple(d_attention[3::2]),
            control_ablate_metric=tuple(d_metric[2::2]),
            control_boost_metric=tuple(d_metric[3::2]),
            cosine=cosine,
            norm_ratio=ratio,
            boost_cosine=cosine_boost,
            boost_norm_ratio=ratio_boost,
        )
