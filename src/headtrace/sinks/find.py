"""Finding sinks: three passes over the prompts, then one for each removal of directions.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> found = find_sinks(model, ["When Mary and John went to the store", "The capital of France is"], directions=(1,))
>>> found.mass.columns
['layer', 'head', 'kind', 'mass', 'low', 'high']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headtrace.errors import InputError
from headtrace.progress import Progress, scaled
from headtrace.prompts import batches
from headtrace.sinks.collapse import RemovalExperiment, collapse_table
from headtrace.sinks.result import Sinks, SinkSettings
from headtrace.sinks.sink_signals import (
    Means,
    SignalVectors,
    SinkFiring,
    SinkSignals,
    choose_firings,
    concatenate,
    constancy_table,
    direction_table,
    group_table,
    mean_signals,
    one_firing_per_head,
    traced_signals,
)
from headtrace.sinks.tokens import (
    SinkPrompt,
    SinkPrompts,
    SinkRule,
    as_sink_prompts,
    incoming,
    kind_masses,
    kinds_of,
    mass_table,
    sink_mass,
    sinks_in,
    token_table,
)
from headtrace.tracing import Tracer
from headtrace.tracing.sweep import attention_at
from headtrace.vocabulary import ATTENTION_SIDES

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

THRESHOLD = 0.3
"""Mean attention, over all heads and later tokens, from which a token is a sink wherever it stands."""
FIRINGS_PER_HEAD = 24
DIRECTIONS = (1, 4, 16)
TOKENS_AT_ONCE = 512
STEPS = (5, 5, 40, 50)
"""What the three passes and the removal take, about, of a hundred parts of the time."""


def find_sinks(
    model: Model,
    prompts: SinkPrompts,
    *,
    threshold: float = THRESHOLD,
    firings_per_head: int = FIRINGS_PER_HEAD,
    directions: Sequence[int] = DIRECTIONS,
    tracer: Tracer | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Sinks:
    """Attention sinks of a model, the signals that make heads attend there, and what happens without them.

    ``prompts`` are texts or token ids, a task set or several (`headtrace.tasks.load_task`), or a mapping from names of
    tasks to any of these; constancy is measured over prompts of different tasks, where there are several.

    Sinks are the first token, and tokens whose incoming attention, mean over heads and later tokens, is at least
    ``threshold``. Of each head, at most ``firings_per_head`` firings on sinks are traced, each from another prompt and
    from a destination drawn at random among those with attention above the tracer's threshold. ``directions`` says how
    many common directions are removed, one count after the other; empty, nothing is removed.
    """
    if not 0 < threshold <= 1:
        raise InputError(f"threshold={threshold}: a share of attention is above 0 and at most 1.")
    if firings_per_head < 2:
        raise InputError(
            f"firings_per_head={firings_per_head}: measuring how constant signals are needs at least 2 of each head."
        )
    if any(k < 1 for k in directions):
        raise InputError(f"directions={tuple(directions)}: each is a number of directions, at least 1.")
    cases = as_sink_prompts(model, prompts)
    if len(cases) < 2:
        raise InputError("How constant signals are needs several prompts: give at least two.")
    tracer = Tracer(model) if tracer is None else tracer
    passes = _Passes(tracer, cases, seed, progress)
    with model.assume_weights_unchanged():
        received, by_kind = passes.attention_received()
        tokens = token_table(model, cases, received)
        rule = sinks_in(tokens, threshold, len(cases))
        found, on_sinks = passes.firings_on_sinks(rule)
        if not found:
            raise InputError(
                f"No head past the first layer of {model.name!r} attends to a sink above the method's threshold in "
                f"these {len(cases)} prompts: there are no signals to study. Give other or longer prompts, or a "
                "tracer with a lower tau."
            )
        signals = passes.signals(choose_firings(found, cases, firings_per_head, seed))
        means: Means = {side: mean_signals(signals, side) for side in ATTENTION_SIDES}
        experiment = RemovalExperiment(model, cases, rule, means, seed)
        conditions = experiment.conditions(directions) if directions else []
        values = experiment.measured(conditions, passes.progress_of(3))
    tasks = [case.task for case in cases]
    return Sinks(
        model={"name": model.name, "weights_sha256": model.weights_sha256},
        settings=SinkSettings(
            threshold=threshold,
            firings_per_head=firings_per_head,
            seed=seed,
            method=tracer.method.name,
            tau=str(tracer.method.describe().tau),
            prompts={task: tasks.count(task) for task in dict.fromkeys(tasks)},
            sinks=tuple(sorted(rule.ids)),
        ),
        tokens=tokens,
        mass=mass_table(torch.stack(by_kind), torch.stack(on_sinks), seed),
        firings=signals.table,
        constancy=constancy_table(signals, seed),
        means=means,
        directions=direction_table(means),
        groups=group_table(means),
        collapse=collapse_table(conditions, values, tasks, seed),
    )


@dataclass(frozen=True)
class _Passes:
    """The three passes over the prompts that come before directions are removed."""

    tracer: Tracer
    cases: Sequence[SinkPrompt]
    seed: int
    progress: Progress | None

    def progress_of(self, step: int) -> Progress | None:
        return scaled(self.progress, sum(STEPS[:step]), STEPS[step], sum(STEPS))

    def _recordings(
        self, step: int, places: Sequence[int], keep: Sequence[str] | None = None
    ) -> Iterator[tuple[list[int], Recording]]:
        """Recordings of prompts that run together, with the numbers of these prompts."""
        report, done = self.progress_of(step), 0
        for group in batches([self.cases[place].length for place in places], TOKENS_AT_ONCE):
            together = [places[each] for each in group]
            ids = [list(self.cases[place].ids) for place in together]
            yield together, self.tracer.model.record(ids, last_logits=True, keep=keep)
            done += len(together)
            if report is not None:
                report(done, len(places))

    def attention_received(self) -> tuple[list[Tensor], list[Tensor]]:
        """For each prompt, how much attention its tokens receive, and to which kinds of token each head attends."""
        every = range(len(self.cases))
        received: dict[int, Tensor] = {}
        by_kind: dict[int, Tensor] = {}
        for places, recording in self._recordings(0, every, keep=("patterns",)):
            for row, place in enumerate(places):
                kinds = kinds_of(self.tracer.model, self.cases[place].ids)
                received[place] = incoming(recording, row).cpu()
                by_kind[place] = kind_masses(recording, row, kinds).cpu()
        return [received[place] for place in every], [by_kind[place] for place in every]

    def firings_on_sinks(self, rule: SinkRule) -> tuple[list[SinkFiring], list[Tensor]]:
        """One firing on a sink of every head and prompt; and the attention of each prompt's heads on sinks."""
        every = range(len(self.cases))
        found: list[SinkFiring] = []
        masses: dict[int, Tensor] = {}
        for places, recording in self._recordings(1, every, keep=("patterns",)):
            cases = [self.cases[place] for place in places]
            sinks = rule.mask(cases, recording.token_ids.shape[1]).to(self.tracer.model.device)
            by_layer = [sink_mass(pattern, sinks, recording.lengths) for pattern in recording.patterns]
            on_sinks = torch.stack(by_layer, dim=1).cpu()
            for row, place in enumerate(places):
                masses[place] = on_sinks[row]
                key = (self.seed, *self.cases[place].ids)
                firings = list(one_firing_per_head(self.tracer, recording, row, sinks[row], key))
                seen = attention_at(recording, [(row, firing.site) for firing in firings])
                found += [SinkFiring(place, f, each[0]) for f, each in zip(firings, seen, strict=True)]
        return found, [masses[place] for place in every]

    def signals(self, chosen: Sequence[SinkFiring]) -> SinkSignals:
        """The chosen firings traced, recording by recording."""
        vectors = SignalVectors(self.tracer.model)
        parts: list[SinkSignals] = []
        for places, recording in self._recordings(2, sorted({each.prompt for each in chosen})):
            where = {place: row for row, place in enumerate(places)}
            firings = [each for each in chosen if each.prompt in where]
            parts.append(traced_signals(self.tracer, vectors, recording, firings, where, self.cases))
        return concatenate(parts)
