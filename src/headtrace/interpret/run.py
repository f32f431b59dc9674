"""Signals in words from end to end: scan a corpus, explain, judge blind, test, write the words on the circuits.

>>> from headtrace.interpret.examples import Pair, ScoredSignal, SignalExamples
>>> def pairs(back):
...     ids, tokens = tuple(range(30)), tuple(f" t{i}" for i in range(30))
...     return tuple(Pair(f"text {i}", i + back, i, 1.0, ids, tokens) for i in range(20))
>>> others = tuple(pair for back in (2, 5, 7) for pair in pairs(back)[::2])
>>> signal = ScoredSignal("L0H0:0", 0, 0, "channel", (0,))
>>> found = interpret_examples([SignalExamples(signal, pairs(1), others)])
>>> found.signals[0].description.text, found.signals[0].supported
('The source is the token just before the destination.', True)
>>> print(found.fraction)
1.000 [0.207, 1.000]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headtrace.circuits import Circuit
from headtrace.errors import InputError
from headtrace.interpret.annotate import annotate
from headtrace.interpret.examples import ScoredSignal, SignalExamples
from headtrace.interpret.judging import (
    LEAST_TOP,
    MOST_HARD,
    HeldOut,
    Judged,
    judge_all,
    split,
    without_words,
)
from headtrace.interpret.protocols import (
    Budget,
    Description,
    Estimate,
    Explainer,
    Judge,
    Setting,
    make_explainer,
    make_judge,
)
from headtrace.interpret.statistics import (
    FALSE_DISCOVERY_RATE,
    Counts,
    Proportion,
    discoveries,
    q_values,
    shuffled_places,
)
from headtrace.progress import Progress, share_of
from headtrace.vocabulary import ATTENTION_SIDES
from headtrace.writing import replacing, write_text

if TYPE_CHECKING:
    import polars as pl

    from headtrace.models import Model

SCHEMA = "headtrace.interpretation/1"
PAIRS = 40
"""The highest pairs, and the random ones, that a scan keeps of a signal."""


@dataclass(frozen=True)
class Controls:
    """What passes although it should not."""

    shuffled_words: Proportion
    """Signals that pass with the words of another signal. Signals that look for the same thing pass rightly: compare
    with how often words are shared."""
    shuffled_labels: Proportion
    """Signals that pass when their labels are dealt out at random: near none, whatever the words."""
    shared_words: Proportion
    """Signals whose words are those of another signal, too."""


@dataclass(frozen=True)
class Interpretation:
    """Signals, their words, and whether the words are right."""

    signals: tuple[Judged, ...]
    controls: Controls
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    circuits: tuple[Circuit, ...] = ()
    """The circuits with words on their edges."""

    @cached_property
    def fraction(self) -> Proportion:
        """The interpretable fraction: of the signals that were tested, those whose words are supported."""
        return self._fraction(self.signals)

    @cached_property
    def by_layer(self) -> dict[int, Proportion]:
        layers = sorted({each.signal.layer for each in self.signals})
        return {
            layer: self._fraction([each for each in self.signals if each.signal.layer == layer])
            for layer in layers
        }

    @staticmethod
    def _fraction(signals: Sequence[Judged]) -> Proportion:
        tested = [each for each in signals if each.tested]
        return Proportion(sum(each.supported for each in tested), len(tested))

    @property
    def failures(self) -> dict[str, int]:
        """What is not in the fraction: signals without an answer, signals without examples, pairs without a label."""
        return {
            "signals": sum(each.status == "failed" for each in self.signals),
            "too few examples": sum(each.status == "too few" for each in self.signals),
            "pairs": sum(each.counts.failed for each in self.signals),
        }

    @property
    def against_middle(self) -> Counts:
        """Over all supported signals: highest pairs against those in the middle."""
        return _sum(each.against_middle for each in self.signals if each.supported)

    @property
    def against_sibling(self) -> Counts:
        """Over all supported signals: highest pairs against those of another channel of the same head."""
        return _sum(each.against_sibling for each in self.signals if each.supported)

    @property
    def counts(self) -> Counts:
        """Over all supported signals: highest pairs against random ones."""
        return _sum(each.counts for each in self.signals if each.supported)

    def summary(self) -> str:
        """A few lines: the fraction, its controls, what failed."""
        failed, controls = self.failures, self.controls
        described = sum(each.description is not None for each in self.signals)
        lines = [
            f"{len(self.signals)} signals, {described} with words; supported: {self.fraction.count} of "
            f"{self.fraction.of} = {self.fraction} (Wilson 95%; false-discovery rate {FALSE_DISCOVERY_RATE:.0%})",
            f"With the words of another signal: {controls.shuffled_words} pass; with labels dealt at random: "
            f"{controls.shuffled_labels}; words shared by several signals: {controls.shared_words}",
            f"Supported words hold for {self.counts.recall} of their own held-out pairs, "
            f"{_alarms(self.counts)} of random ones, {_alarms(self.against_middle)} of those that score in the middle, "
            f"{_alarms(self.against_sibling)} of another channel's highest",
        ]
        if any(failed.values()):
            lines.append(
                f"Not counted: {failed['signals']} signals without an answer, {failed['too few examples']} with fewer "
                f"than {LEAST_TOP} pairs above zero; {failed['pairs']} pairs without a label"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "settings": dict(self.settings),
            "interpretable": self.fraction.to_dict(),
            "by_layer": {str(layer): each.to_dict() for layer, each in self.by_layer.items()},
            "controls": {name: each.to_dict() for name, each in vars(self.controls).items()},
            "failures": self.failures,
            "supported": {
                "against_random": self.counts.to_dict(),
                "against_middle": self.against_middle.to_dict(),
                "against_sibling": self.against_sibling.to_dict(),
            },
            "signals": [each.to_dict() for each in self.signals],
        }

    @property
    def table(self) -> pl.DataFrame:
        """One row per signal."""
        import polars as pl

        return pl.DataFrame([_row(each) for each in self.signals], schema=_COLUMNS)

    def save(self, folder: str | Path) -> Path:
        """Write interpretation.json, descriptions.parquet and the circuits with their words into a folder."""
        folder = Path(folder)
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        write_text(folder / "interpretation.json", text + "\n")
        with replacing(folder / "descriptions.parquet") as temporary:
            self.table.write_parquet(temporary)
        if len(self.circuits) == 1:
            self.circuits[0].save(folder / "circuit.json")
        elif self.circuits:
            from headtrace.circuits import write_parquet

            write_parquet(self.circuits, folder / "circuits.parquet")
        return folder


_COLUMNS: dict[str, Any] = {
    "id": str,
    "layer": int,
    "head": int,
    "channels": str,
    "kind": str,
    "side": str,
    "status": str,
    "description": str,
    "supported": bool,
    "p_value": float,
    "q_value": float,
    "accuracy": float,
    "precision": float,
    "recall": float,
    "failed": int,
}


def _row(each: Judged) -> dict[str, Any]:
    told, counts = each.to_dict(), each.counts
    measures = {name: getattr(counts, name).value for name in ("accuracy", "precision", "recall")}
    told |= measures | {"channels": "+".join(map(str, each.signal.channels)), "failed": counts.failed}
    return {name: told[name] for name in _COLUMNS}


def _sum(counts: Any) -> Counts:
    total = Counts()
    for each in counts:
        total = Counts(**{name: value + getattr(total, name) for name, value in vars(each).items()})
    return total


def _alarms(counts: Counts) -> Proportion:
    """How many of the other pairs the words hold for."""
    return Proportion(counts.false_positive, counts.false_positive + counts.true_negative)


# -- doing it ------------------------------------------------------------------------------------------------


def interpret(
    circuits: Circuit | Sequence[Circuit],
    model: Model,
    corpus: Any,
    *,
    explainer: str | Explainer = "lexical",
    judge: str | Judge = "lexical",
    out: str | Path | None = None,
    limit: int | None = None,
    budget: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    scanning: Callable[..., Any] | None = None,
) -> Interpretation:
    """What the signals of circuits look for in a corpus, in words, and whether the words are right.

    ``limit`` takes the strongest edges only. With ``out``, the scan and the answers of an endpoint are kept there: the
    same call again goes on where it stopped. ``scanning`` takes the place of ``headtrace.interpret.scan.scan``.
    """
    from headtrace.causal.edges import require_own_model

    several = (circuits,) if isinstance(circuits, Circuit) else tuple(circuits)
    chosen = _chosen(several, limit)
    for circuit in several:
        require_own_model(circuit, model)
    explains, judges = make_explainer(explainer), make_judge(judge)
    folder = None if out is None else Path(out)
    setting = Setting(model, folder, Budget(budget))
    explains, judges = explains.prepare(setting), judges.prepare(setting)
    scan = _scanner() if scanning is None else scanning
    where = {} if folder is None else {"out": folder / "scan"}
    half = share_of(progress, 0, 100, 200)
    scanned = scan(model, corpus, signals=list(several), seed=seed, progress=half, **where)
    examples = [scanned.examples(_id(each)) for each in scanned.signals]
    wanted = [each for each in examples if chosen is None or each.signal.id.partition(" ")[2] in chosen]
    once = {
        _read_by(each.signal): each for each in reversed(wanted)
    }  # the first of those that are one signal
    found = interpret_examples(
        list(reversed(once.values())),
        explainer=explains,
        judge=judges,
        siblings=examples,
        seed=seed,
        progress=share_of(progress, 100, 100, 200),
    )
    judged = {_read_by(each.signal): each for each in found.signals}
    edges = [replace(judged[_read_by(each.signal)], signal=each.signal) for each in wanted]
    words = tuple(annotate(circuit, edges) for circuit in several)
    found = replace(
        found, circuits=words, settings={**found.settings, "model": model.name, "corpus": str(corpus)}
    )
    if folder is not None:
        found.save(folder)
    return found


def _read_by(signal: ScoredSignal) -> tuple[int, int, tuple[int, ...]]:
    """What is scored: edges into the same channels of the same head are one signal, explained and counted once."""
    return signal.layer, signal.head, tuple(sorted(signal.channels))


def _id(signal: Any) -> str:
    return signal if isinstance(signal, str) else signal.id


def _scanner() -> Callable[..., Any]:
    from importlib import import_module

    return import_module("headtrace.interpret.scan").scan


def signal_edges(circuits: Sequence[Circuit]) -> list[tuple[float, str]]:
    """The edges that are signals, by weight and by name (content id and number)."""
    return [
        (edge.weight, f"{circuit.content_id}:{number}")
        for circuit in circuits
        for number, edge in enumerate(circuit.edges)
        if edge.side in ATTENTION_SIDES and edge.channels
    ]


def _chosen(circuits: Sequence[Circuit], limit: int | None) -> set[str] | None:
    edges = signal_edges(circuits)
    if not edges:
        raise InputError(
            f"The {len(circuits)} circuits given have no signals to explain: no query or key edge with channels. "
            "Trace with the method acc++ (`headtrace trace`)."
        )
    if limit is None:
        return None
    if limit < 1:
        raise InputError(f"limit={limit}: how many signals to explain is at least 1.")
    return {name for _, name in sorted(edges, key=lambda edge: (-edge[0], edge[1]))[:limit]}


def estimate(n_signals: int, explainer: str | Explainer, judge: str | Judge) -> Estimate:
    """What explaining and judging so many signals costs, controls included; the scan comes on top.

    >>> estimate(100, "lexical", "lexical").tokens
    0
    """
    explains, judges = make_explainer(explainer), make_judge(judge)
    pairs = PAIRS + 2 * MOST_HARD  # half of the highest, half of the random ones, and the hard ones
    told = explains.estimate(n_signals, PAIRS // 2) + judges.estimate(n_signals, pairs)
    return told + judges.estimate(n_signals, PAIRS)


def interpret_examples(
    examples: Sequence[SignalExamples],
    *,
    explainer: str | Explainer = "lexical",
    judge: str | Judge = "lexical",
    siblings: Sequence[SignalExamples] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Interpretation:
    """The same, from what a scan found: one entry per signal. ``siblings`` are where other channels are looked for."""
    explains, judges = make_explainer(explainer), make_judge(judge)
    parts = [split(each, examples if siblings is None else siblings, seed) for each in examples]
    usable = [place for place, (shown, held) in enumerate(parts) if _enough(shown, held)]
    steps = max(1, len(usable))
    words = explains.explain_all(
        [parts[place][0] for place in usable], share_of(progress, 0, steps, 3 * steps)
    )
    given = [
        (place, found) for place, found in zip(usable, words, strict=True) if isinstance(found, Description)
    ]
    signals = [examples[place].signal for place, _ in given]
    held = [parts[place][1] for place, _ in given]
    texts = [text for _, text in given]
    judged = judge_all(judges, signals, texts, held, seed, share_of(progress, steps, steps, 3 * steps))
    results: dict[int, Judged] = {place: each for (place, _), each in zip(given, judged, strict=True)}
    for place, found in zip(usable, words, strict=True):
        if not isinstance(found, Description):
            results[place] = without_words(examples[place].signal, found, parts[place][1])
    for place, each in enumerate(examples):
        results.setdefault(place, _too_few(each))
    all_judged = _with_verdicts([results[place] for place in range(len(examples))])
    wrong = _shuffled(judges, judged, held, seed, share_of(progress, 2 * steps, steps, 3 * steps))
    controls = _controls(all_judged, wrong, seed)
    settings = {"explainer": options_of(explains), "judge": options_of(judges), "seed": seed}
    return Interpretation(tuple(all_judged), controls, settings)


def options_of(made: Explainer | Judge) -> dict[str, Any]:
    """The name and the options, as far as they are plain values.

    >>> options_of(make_judge("lexical")), options_of(make_explainer("vocabulary"))
    ({'name': 'lexical'}, {'name': 'vocabulary', 'tokens': 10})
    """
    plain = {each.name: getattr(made, each.name) for each in fields(made)}
    return {"name": made.name} | {
        name: value for name, value in plain.items() if isinstance(value, (str, int, float))
    }


def _enough(shown: SignalExamples, held: HeldOut) -> bool:
    return len(shown.top) + len(held.top) >= LEAST_TOP and bool(shown.random) and bool(held.random)


def _too_few(examples: SignalExamples) -> Judged:
    above = sum(pair.score > 0 for pair in examples.top)
    why = "; ".join(examples.notes) or f"Only {above} pairs score above zero, and {LEAST_TOP} are needed."
    return Judged(examples.signal, "too few", reason=why)


def _with_verdicts(judged: Sequence[Judged]) -> list[Judged]:
    """Benjamini-Hochberg over all signals that count; one without words has p = 1."""
    tested = [each for each in judged if each.tested]
    found = iter(q_values([each.p_value for each in tested]))
    verdicts: list[Judged] = []
    for each in judged:
        q_value = next(found) if each.tested else None
        passes = q_value is not None and q_value <= FALSE_DISCOVERY_RATE and each.status == "described"
        verdicts.append(replace(each, q_value=q_value, supported=passes))
    return verdicts


def _shuffled(
    judge: Judge, judged: Sequence[Judged], held: Sequence[HeldOut], seed: int, progress: Progress | None
) -> list[Judged]:
    """Every signal judged by the words of another; hard negatives are not asked about again."""
    words = [each.description for each in judged if each.description is not None]
    order = shuffled_places([each.text for each in words], seed)
    bare = [HeldOut(each.top, each.random) for each in held]
    return judge_all(judge, [each.signal for each in judged], [words[i] for i in order], bare, seed, progress)


def _controls(judged: Sequence[Judged], wrong: Sequence[Judged], seed: int) -> Controls:
    without = sum(each.status == "none" for each in judged)
    texts = [each.description.text for each in judged if each.description is not None]
    dealt = [_dealt(each.counts, seed, place) for place, each in enumerate(judged) if each.tested]
    return Controls(
        shuffled_words=_passing([each.p_value for each in wrong if each.tested] + [1.0] * without),
        shuffled_labels=_passing(dealt),
        shared_words=Proportion(sum(texts.count(text) > 1 for text in texts), len(texts)),
    )


def _passing(p_values: Sequence[float]) -> Proportion:
    return Proportion(sum(discoveries(p_values)), len(p_values))


def _dealt(counts: Counts, seed: int, place: int) -> float:
    """The p-value after the labels of a signal were dealt out at random to its pairs."""
    top = counts.true_positive + counts.false_negative
    yes, no = counts.true_positive + counts.false_positive, counts.false_negative + counts.true_negative
    hits = int(np.random.default_rng((seed, place)).hypergeometric(yes, no, top)) if top else 0
    return Counts(hits, top - hits, yes - hits, no - (top - hits)).p_value
