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

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.circuits import Circuit
from headtrace.errors import InputError
from headtrace.interpret.annotate import annotate, edge_of
from headtrace.interpret.controls import exchange_words, measure_controls
from headtrace.interpret.examples import ScoredSignal, SignalExamples
from headtrace.interpret.judging import LEAST_TOP, HeldOut, Judged, judge_all, split, without_words
from headtrace.interpret.protocols import (
    Budget,
    Description,
    Estimate,
    Explainer,
    Judge,
    Ledger,
    Setting,
    check_together,
    make_explainer,
    make_judge,
)
from headtrace.interpret.results import Interpretation
from headtrace.interpret.scan import scan
from headtrace.interpret.signals import circuit_signals
from headtrace.interpret.statistics import FALSE_DISCOVERY_RATE, q_values
from headtrace.progress import Progress, scaled

if TYPE_CHECKING:
    from headtrace.models import Model

PAIRS = 40
"""The highest pairs, and the random ones, that a scan keeps of a signal."""


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
    from headtrace.causal.opening import require_own_model

    several = (circuits,) if isinstance(circuits, Circuit) else tuple(circuits)
    chosen = {signal.id for signal in _strongest(several, limit)}
    for circuit in several:
        require_own_model(circuit, model)
    explains, judges = _made(explainer, judge)
    folder = None if out is None else Path(out)
    setting = Setting(model, folder, Budget(budget))
    explains, judges = explains.prepare(setting), judges.prepare(setting)
    scanned = (scanning or scan)(
        model,
        corpus,
        signals=list(several),
        seed=seed,
        out=None if folder is None else folder / "scan",
        progress=scaled(progress, 0, 100, 200),
    )
    examples = [scanned.examples(each) for each in scanned.signals]
    wanted = [each for each in examples if each.signal.id in chosen]
    found = interpret_examples(
        _each_once(wanted),
        explainer=explains,
        judge=judges,
        siblings=examples,
        seed=seed,
        progress=scaled(progress, 100, 100, 200),
    )
    judged = {_read_by(each.signal): each for each in found.signals}
    edges = [replace(judged[_read_by(each.signal)], signal=each.signal) for each in wanted]
    words = tuple(annotate(circuit, edges, explains.name, judges.name) for circuit in several)
    found = replace(
        found, circuits=words, settings={**found.settings, "model": model.name, "corpus": str(corpus)}
    )
    if folder is not None:
        found.save(folder)
    return found


def _made(explainer: str | Explainer, judge: str | Judge) -> tuple[Explainer, Judge]:
    explains, judges = make_explainer(explainer), make_judge(judge)
    check_together(explains, judges)
    return explains, judges


def _read_by(signal: ScoredSignal) -> tuple[int, int, tuple[int, ...]]:
    """What is scored: edges into the same channels of the same head are one signal, explained and counted once."""
    return signal.layer, signal.head, tuple(sorted(signal.channels))


def _each_once(examples: Sequence[SignalExamples]) -> list[SignalExamples]:
    """The first of those that are one signal."""
    once: dict[Any, SignalExamples] = {}
    for each in examples:
        once.setdefault(_read_by(each.signal), each)
    return list(once.values())


def _strongest(circuits: Sequence[Circuit], limit: int | None) -> list[ScoredSignal]:
    """The signals of edges that are explained: all, or those of so many edges of the largest weight."""
    edges = [(circuit, signal) for circuit in circuits for signal in circuit_signals(circuit)]
    if not edges:
        raise InputError(
            f"The {len(circuits)} circuits given have no signals to explain: no query or key edge with channels. "
            "Trace with the method acc++ (`headtrace trace`)."
        )
    if limit is not None and limit < 1:
        raise InputError(f"limit={limit}: how many signals to explain is at least 1.")

    def rank(edge: tuple[Circuit, ScoredSignal]) -> tuple[float, str]:
        circuit, signal = edge
        _, number = edge_of(signal) or ("", 0)
        return -circuit.edges[number].weight, f"{circuit.content_id}:{number}"

    return [signal for _, signal in sorted(edges, key=rank)[:limit]]


def count_signals(circuits: Sequence[Circuit], limit: int | None = None) -> int:
    """How many different signals ``interpret`` explains for these circuits."""
    return len({_read_by(signal) for signal in _strongest(circuits, limit)})


def estimate(n_signals: int, explainer: str | Explainer, judge: str | Judge) -> Estimate:
    """What explaining and judging so many signals costs, controls included; the scan comes on top.

    >>> estimate(100, "lexical", "lexical").tokens
    0
    """
    explains, judges = _made(explainer, judge)
    half = PAIRS // 2
    # Held out are half of the highest pairs and of the random ones, and as many hard ones of two kinds; the words of
    # another signal are judged by the first two.
    told = explains.estimate(n_signals, half) + judges.estimate(n_signals, 4 * half)
    return told + judges.estimate(n_signals, 2 * half)


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
    explains, judges = _made(explainer, judge)
    before = _asked(explains, judges)
    parts = [split(each, examples if siblings is None else siblings, seed) for each in examples]
    usable = [place for place, (shown, held) in enumerate(parts) if _enough(shown, held)]
    steps = max(1, len(usable))
    words = explains.explain_all([parts[place][0] for place in usable], scaled(progress, 0, steps, 3 * steps))
    given = [
        (place, found) for place, found in zip(usable, words, strict=True) if isinstance(found, Description)
    ]
    signals = [examples[place].signal for place, _ in given]
    held = [parts[place][1] for place, _ in given]
    texts = [text for _, text in given]
    judged = judge_all(judges, signals, texts, held, seed, scaled(progress, steps, steps, 3 * steps))
    results: dict[int, Judged] = {place: each for (place, _), each in zip(given, judged, strict=True)}
    for place, found in zip(usable, words, strict=True):
        if not isinstance(found, Description):
            results[place] = without_words(examples[place].signal, found, parts[place][1])
    for place, each in enumerate(examples):
        results.setdefault(place, _too_few(each))
    all_judged = _with_verdicts([results[place] for place in range(len(examples))])
    exchanged = exchange_words(judges, judged, held, seed, scaled(progress, 2 * steps, steps, 3 * steps))
    return Interpretation(
        signals=tuple(all_judged),
        controls=measure_controls(all_judged, exchanged, seed),
        settings={"explainer": options_of(explains), "judge": options_of(judges), "seed": seed},
        exchanged=tuple(exchanged),
        asked=_asked(explains, judges) - before,
    )


def _asked(*asking: Explainer | Judge) -> Ledger:
    """What was asked so far; explainer and judge of a run count in one ledger."""
    ledgers = {id(each.ledger): each.ledger for each in asking if each.ledger is not None}
    return sum(ledgers.values(), Ledger())


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
