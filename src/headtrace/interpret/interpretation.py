"""Signals in words, end to end: scan two corpora, explain, judge blind, give verdicts, write the words on the circuits.

>>> from headtrace.interpret.scored_signals import Pair
>>> def pairs(back, first=0):
...     ids = tuple(range(first, first + 50))
...     return tuple(Pair(f"text {i}", i + back, i, 1.0, ids, tuple(f" t{id}" for id in ids)) for i in range(40))
>>> others = tuple(pair for back in (2, 5, 7) for pair in pairs(back)[::2])
>>> signal = ScoredSignal("L0H0:0", 0, 0, "channel", (0,))
>>> one, other = (SignalExamples(signal, pairs(1, first), others) for first in (0, 50))     # two corpora
>>> found = interpret_examples([one], second=[other])
>>> found.signals[0].description.text, found.signals[0].supported
('The source is the token just before the destination.', True)
>>> print(found.fraction)
1.000 [0.207, 1.000]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.circuits import Circuit, write_parquet
from headtrace.errors import InputError, shown
from headtrace.interpret.annotate import annotate
from headtrace.interpret.answer_files import BatchQuestions
from headtrace.interpret.explainers import (
    Description,
    Estimate,
    Explainer,
    Judge,
    QuestionCounts,
    RunContext,
    TokenBudget,
    make_both,
)
from headtrace.interpret.judging import (
    GROUPS,
    LEAST_AUROC,
    PER_HIGHEST,
    Counts,
    Judged,
    judge_all,
    split,
    with_other_tokens,
)
from headtrace.interpret.scan import RANDOM
from headtrace.interpret.scan_run import TOP, scan
from headtrace.interpret.scored_signals import ScoredSignal, SignalExamples, circuit_signals
from headtrace.interpret.verdicts import (
    FALSE_DISCOVERY_RATE,
    Controls,
    Exchange,
    discoveries,
    exchanges,
    measure_controls,
    shuffled_places,
    with_verdicts,
)
from headtrace.interpret.word_classes import note, word_lists
from headtrace.progress import Progress, scaled
from headtrace.statistics import Proportion
from headtrace.writing import check_writable, replacing, write_report

if TYPE_CHECKING:
    import polars as pl

    from headtrace.models import Model

SCHEMA = "headtrace.interpretation/2"
SECOND_CORPUS = "sampled:8192"
"""Text drawn from the model itself is the second corpus where only one is given."""
FEWEST_TOP = 8
"""A signal with fewer pairs of different tokens above zero is not judged: half of them would say nothing."""


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
    batch_out: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    scanning: Callable[..., Any] | None = None,
) -> Interpretation:
    """Describe what the signals of circuits respond to in a corpus, and test the descriptions there and in another.

    ``corpus`` is one corpus or two, as in ``open_corpus``; with one alone, the second is text that the model makes up
    (``SECOND_CORPUS``). The explainer only sees the first. ``limit`` takes the strongest signals. With ``out``, the
    scans and the answers of an endpoint are kept there, and the same call resumes an interrupted run. With
    ``batch_out``, questions to a language model are written to that file instead of being sent, and `BatchWritten` is
    raised; once ``read_batch_results`` has read the answers into ``out``, the same call goes on. ``scanning`` replaces
    ``headtrace.interpret.scan``.
    """
    from headtrace.causal.opening import require_own_model

    several = (circuits,) if isinstance(circuits, Circuit) else tuple(circuits)
    chosen = {signal.id for signal in _strongest(several, limit)}
    for circuit in several:
        require_own_model(circuit, model)
    corpora = two_corpora(corpus)
    explains, judges = make_both(explainer, judge)
    folder = None if out is None else Path(out)
    context = RunContext(model, folder, TokenBudget(budget), batch=batch_questions(batch_out, folder))
    explains, judges = explains.prepare(context), judges.prepare(context)
    scans = [
        (scanning or scan)(
            model,
            text,
            signals=list(several),
            seed=seed,
            out=None if folder is None else folder / name,
            progress=scaled(progress, 100 * place, 100, 300),
        )
        for place, (name, text) in enumerate(zip(("scan", "second-scan"), corpora, strict=True))
    ]
    examples, second = ([scanned.examples(signal) for signal in scanned.signals] for scanned in scans)
    # Edges into the same channels of the same head are one signal: described and counted once.
    distinct: dict[Any, SignalExamples] = {}
    for each in examples:
        if each.signal.id in chosen:
            distinct.setdefault(each.signal.reads, each)
    found = interpret_examples(
        list(distinct.values()),
        second=second,
        explainer=explains,
        judge=judges,
        siblings=examples,
        seed=seed,
        progress=scaled(progress, 200, 100, 300),
    )
    judged = {each.signal.reads: each for each in found.signals}
    edges = [
        replace(judged[each.signal.reads], signal=each.signal)
        for each in examples
        if each.signal.id in chosen
    ]
    found = replace(
        found,
        circuits=tuple(annotate(circuit, edges, explains.name, judges.name) for circuit in several),
        settings={
            **found.settings,
            "model": model.name,
            "weights_sha256": model.weights_sha256,
            "computation_sha256": model.computation_sha256,
            "corpora": [str(getattr(text, "source", text)) for text in corpora],
        },
    )
    if folder is not None:
        found.save(folder)
    return found


def batch_questions(file: str | Path | None, folder: Path | None) -> BatchQuestions | None:
    """Where a run writes its questions, if it is to write them."""
    if file is None:
        return None
    if folder is None:
        raise InputError("batch_out= needs out=, a folder: the answers to the questions are kept there.")
    check_writable(file)
    return BatchQuestions(Path(file), folder)


def two_corpora(corpus: Any) -> tuple[Any, Any]:
    """The two corpora of a test: those that are given, or the one that is, and text drawn from the model.

    >>> two_corpora("book.txt")
    ('book.txt', 'sampled:8192')
    """
    given = list(corpus) if isinstance(corpus, (list, tuple)) else [corpus]
    if len(given) == 1:
        given.append(
            SECOND_CORPUS if str(getattr(given[0], "source", given[0])) != SECOND_CORPUS else "sampled:8193"
        )
    names = [str(getattr(each, "source", each)) for each in given]
    if len(given) != 2 or names[0] == names[1]:
        raise InputError(
            f"Words are tested in two different corpora, and {shown(names)} was given. Give two different ones, "
            f"or one: the second is then {SECOND_CORPUS}, text that the model makes up."
        )
    return given[0], given[1]


def _strongest(circuits: Sequence[Circuit], limit: int | None) -> list[ScoredSignal]:
    """The signals of all edges, or of those that carry one of the ``limit`` strongest: edges into the same channels of
    the same head are one signal, as strong as the largest weight among them."""
    ranked: list[tuple[float, str, ScoredSignal]] = []
    for circuit in circuits:
        for signal in circuit_signals(circuit):
            assert signal.edge is not None
            number = signal.edge[1]
            ranked.append((-circuit.edges[number].weight, f"{circuit.content_id}:{number}", signal))
    if not ranked:
        raise InputError(
            f"The {len(circuits)} circuits given have no signals to explain: no query or key edge with channels. "
            "Trace with the method acc++ (`headtrace trace`)."
        )
    if limit is not None and limit < 1:
        raise InputError(f"limit={limit}: how many signals to explain is at least 1.")
    signals = [signal for *_, signal in sorted(ranked, key=lambda each: each[:2])]
    wanted = set(list(dict.fromkeys(signal.reads for signal in signals))[:limit])
    return [signal for signal in signals if signal.reads in wanted]


def count_signals(circuits: Sequence[Circuit], limit: int | None = None) -> int:
    """How many different signals ``interpret`` explains for these circuits."""
    return len({signal.reads for signal in _strongest(circuits, limit)})


def estimate(n_signals: int, explainer: str | Explainer, judge: str | Judge) -> Estimate:
    """What explaining and judging some signals costs, controls included, without the scan.

    >>> estimate(100, "lexical", "lexical").tokens
    0
    """
    explains, judges = make_both(explainer, judge)
    # Held out are half of what the first corpus has, and what the second has; as many hard negatives of two kinds, and
    # pairs at the same distance, which the control with the description of another signal does without.
    high = (TOP // 2, TOP)
    tested = _at_most(judges, *high, RANDOM // 2, RANDOM)
    further = _at_most(judges, *high[:1] * 2, *(PER_HIGHEST * size for size in high))
    cost = explains.estimate(n_signals, TOP // 2) + judges.estimate(n_signals, tested + further)
    return cost + judges.estimate(n_signals, tested)


def _at_most(judge: Judge, *sizes: int) -> int:
    """How many pairs a judge is asked about of groups of these sizes."""
    return sum(min(size, judge.per_group or size) for size in sizes)


def interpret_examples(
    examples: Sequence[SignalExamples],
    *,
    second: Sequence[SignalExamples] = (),
    explainer: str | Explainer = "lexical",
    judge: str | Judge = "lexical",
    siblings: Sequence[SignalExamples] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Interpretation:
    """Describe signals from the examples of a scan, and test the descriptions.

    ``second`` has examples of the same signals in another corpus: without it nothing is supported. ``siblings`` are
    searched for other channels of the same heads (default: ``examples``).
    """
    explains, judges = make_both(explainer, judge)
    before = _questions_asked(explains, judges)

    # Hold out half of each signal's pairs. Signals with too few of them are not explained.
    elsewhere = {each.signal.reads: each for each in second}
    rivals = examples if siblings is None else siblings
    parts = [split(each, rivals, seed, elsewhere.get(each.signal.reads)) for each in examples]
    parts = [(seen, held_out.at_most(judges.per_group)) for seen, held_out in parts]
    judged: dict[int, Judged] = {}
    usable: list[int] = []
    for place, (seen, held_out) in enumerate(parts):
        if len(seen.top) + len(held_out.top) >= FEWEST_TOP and seen.random and held_out.random:
            usable.append(place)
            continue
        positive = sum(pair.score > 0 for pair in examples[place].top)
        reason = f"Only {positive} pairs of different tokens score high, and {FEWEST_TOP} are needed."
        reason = "; ".join(examples[place].notes) or reason
        judged[place] = Judged(examples[place].signal, "too few", reason=reason)

    # Explain: a rule or a sentence for each, from the half that is shown.
    steps = max(1, len(usable))
    explained = explains.explain_all(
        [parts[place][0] for place in usable], scaled(progress, 0, steps, 3 * steps)
    )
    described: dict[int, Description] = {}
    for place, words in zip(usable, explained, strict=True):
        if isinstance(words, Description):
            described[place] = words
            continue
        signal, pairs = examples[place].signal, tuple((pair, None) for pair in parts[place][1].top)
        if words is None:
            reason = "Nothing was found that tells its pairs from others."
            judged[place] = Judged(signal, "none", reason=reason, examples=pairs)
        else:
            judged[place] = Judged(signal, "failed", reason=words.reason, examples=pairs)

    # Judge each description by the pairs held out; and, as a control, each signal by the description of another,
    # without hard negatives. All questions are put to the judge at once: neither depends on the other's answers.
    signals = [examples[place].signal for place in described]
    words = list(described.values())
    own = [with_other_tokens(parts[place][1], parts[place][0], each) for place, each in described.items()]
    others = {group: () for group in GROUPS if group not in ("top", "random", "second_top", "second_random")}
    bare = [replace(parts[place][1], **others) for place in described]
    order = shuffled_places([each.text for each in words], seed)
    found = judge_all(
        judges,
        [*signals, *signals],
        [*words, *(words[place] for place in order)],
        [*own, *bare],
        seed,
        scaled(progress, steps, 2 * steps, 3 * steps),
        seen=2 * [parts[place][0] for place in described],
    )
    with_words, with_others = found[: len(words)], found[len(words) :]

    # Verdicts over all signals together, and controls: the words of others, and labels dealt at random.
    judged |= zip(described, with_words, strict=True)
    verdicts = with_verdicts([judged[place] for place in range(len(examples))])
    exchanged = exchanges(with_others, words, order)
    return Interpretation(
        signals=tuple(verdicts),
        controls=measure_controls(verdicts, exchanged, seed),
        settings={
            "explainer": options_of(explains),
            "judge": options_of(judges),
            "seed": seed,
            "word_lists": word_lists().sources(),
        },
        exchanged=tuple(exchanged),
        asked=_questions_asked(explains, judges) - before,
    )


def _questions_asked(*asking: Explainer | Judge) -> QuestionCounts:
    """The questions asked so far; the explainer and the judge of a run share one count."""
    counts = {id(each.question_counts): each.question_counts for each in asking}
    return sum((each for each in counts.values() if each is not None), QuestionCounts())


def options_of(made: Explainer | Judge) -> dict[str, Any]:
    """The name and the options, as far as they are plain values.

    >>> from headtrace.interpret import make_explainer, make_judge
    >>> options_of(make_judge("lexical")), options_of(make_explainer("vocabulary"))
    ({'name': 'lexical'}, {'name': 'vocabulary', 'tokens': 10})
    """
    options = {each.name: getattr(made, each.name) for each in fields(made)}
    plain = {name: value for name, value in options.items() if isinstance(value, (str, int, float))}
    return {"name": made.name} | plain


# -- The result --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Interpretation:
    """Signals, their descriptions, and the verdicts on them."""

    signals: tuple[Judged, ...]
    controls: Controls
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    circuits: tuple[Circuit, ...] = ()
    """The circuits with descriptions on their edges."""
    exchanged: tuple[Exchange, ...] = ()
    """The signals as judged by the descriptions of others: what the controls are computed from."""
    asked: QuestionCounts = field(default_factory=QuestionCounts)
    """Questions to language models, and how many of them got no usable answer."""

    @cached_property
    def fraction(self) -> Proportion:
        """The interpretable fraction: of the signals that were tested, those whose description is supported."""
        return self._fraction(self.signals)

    @cached_property
    def by_layer(self) -> dict[int, Proportion]:
        """The interpretable fraction of each layer."""
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
        """What is not counted: signals without an answer, signals with too few examples, pairs without a label."""
        return {
            "signals": sum(each.status == "failed" for each in self.signals),
            "too few examples": sum(each.status == "too few" for each in self.signals),
            "pairs": sum(each.counts.failed for each in self.signals),
        }

    @property
    def counts(self) -> Counts:
        """Over all supported signals: highest pairs against random ones."""
        return sum((each.counts for each in self.signals if each.supported), Counts())

    @property
    def against_middle(self) -> Counts:
        """Over all supported signals: highest pairs against those in the middle."""
        return sum((each.against_middle for each in self.signals if each.supported), Counts())

    @property
    def against_sibling(self) -> Counts:
        """Over all supported signals: highest pairs against those of other channels of the same head."""
        return sum((each.against_sibling for each in self.signals if each.supported), Counts())

    @property
    def beyond_distance(self) -> Proportion:
        """Of the supported signals, those whose words also tell their pairs from others at the same distance."""
        supported = [each for each in self.signals if each.supported]
        return Proportion(sum(each.beyond_distance for each in supported), len(supported))

    def frame(self) -> pl.DataFrame:
        """All rows, as ``table`` has them."""
        return self.table

    def __repr__(self) -> str:
        return f"Interpretation({len(self.signals)} signals, {self.fraction.count} of {self.fraction.total} supported)"

    def _repr_html_(self) -> str:
        from headtrace.tables import frame, paragraph

        return "".join(map(paragraph, self.summary().splitlines())) + frame(self.table.head(20))

    def summary(self) -> str:
        """A few lines: the fraction, its controls, what failed."""
        failed, controls, asked = self.failures, self.controls, self.asked
        described = sum(each.description is not None for each in self.signals)
        weaker = discoveries([each.fisher_p for each in self.signals if each.tested])
        in_one = Proportion(sum(weaker), len(weaker))
        lines = [
            f"{len(self.signals)} signals, {described} with words; supported in two corpora: {self.fraction.count} of "
            f"{self.fraction.total} = {self.fraction} (AUROC above {LEAST_AUROC}, 95%; false-discovery rate "
            f"{FALSE_DISCOVERY_RATE:.0%}); better than chance in the first alone: {in_one}",
            f"With the words of another signal: {controls.shuffled_words} pass; with words of another that have "
            f"nothing in common with their own: {controls.different_words} of {controls.different_words.total}; with "
            f"labels dealt at random: {controls.shuffled_labels}; words shared by several signals: "
            f"{controls.shared_words}",
            f"Supported words hold for {self.counts.recall} of their own held-out pairs, "
            f"{self.counts.false_positive_rate} of random ones, {self.against_middle.false_positive_rate} of those "
            f"that score in the middle, {self.against_sibling.false_positive_rate} of another channel's highest",
            f"Against pairs at the same distance: {self.beyond_distance.count} of {self.beyond_distance.total} "
            "supported words do better than chance in both corpora; what the others get right is the distance",
        ]
        lines += [
            f"Do not trust this run: the control {name.replace('_', ' ')} passes in {each}, above the rate"
            for name, each in controls.above_rate.items()
        ]
        if any(failed.values()):
            lines.append(
                f"Not counted: {failed['signals']} signals without an answer, {failed['too few examples']} with fewer "
                f"than {FEWEST_TOP} high pairs of different tokens; {failed['pairs']} pairs without a label"
            )
        if asked.questions:
            lines.append(
                f"Of {asked.questions} questions to a language model {asked.unanswered} have no answer, and "
                f"{asked.unreadable} one that is not in the requested format"
            )
        if sources := self.settings.get("word_lists"):
            lines.append(note(sources))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, as in ``interpretation.json``."""
        return {
            "schema": SCHEMA,
            "settings": dict(self.settings),
            "interpretable": self.fraction.to_dict(),
            "by_layer": {str(layer): each.to_dict() for layer, each in self.by_layer.items()},
            "controls": {name: each.to_dict() for name, each in vars(self.controls).items()},
            "failures": self.failures,
            "asked": dict(vars(self.asked)),
            "supported": {
                "against_random": self.counts.to_dict(),
                "against_middle": self.against_middle.to_dict(),
                "against_sibling": self.against_sibling.to_dict(),
                "beyond_distance": self.beyond_distance.to_dict(),
            },
            "signals": [each.to_dict() for each in self.signals],
            "exchanged": [each.to_dict() for each in self.exchanged],
        }

    @property
    def table(self) -> pl.DataFrame:
        """One row per signal."""
        import polars as pl

        rows: list[dict[str, Any]] = []
        for each in self.signals:
            row = each.to_dict()
            row |= {name: getattr(each.counts, name).value for name in ("accuracy", "precision", "recall")}
            row |= {"channels": "+".join(map(str, each.signal.channels)), "failed": each.counts.failed}
            for name, counts in (
                ("auroc", each.counts),
                ("second_auroc", each.in_second),
                ("same_distance_auroc", each.against_same_distance),
                ("second_same_distance_auroc", each.second_same_distance),
            ):
                row |= {name: counts.auroc, f"{name}_low": counts.auroc_interval[0]}
            rows.append({name: row[name] for name in COLUMNS})
        return pl.DataFrame(rows, schema=COLUMNS)

    def save(self, folder: str | Path) -> Path:
        """Write interpretation.json, descriptions.parquet and the circuits with their words into a folder."""
        folder = Path(folder)
        write_report(folder / "interpretation.json", self.to_dict())
        with replacing(folder / "descriptions.parquet") as temporary:
            self.table.write_parquet(temporary)
        if len(self.circuits) == 1:
            self.circuits[0].save(folder / "circuit.json")
        elif self.circuits:
            write_parquet(self.circuits, folder / "circuits.parquet")
        return folder


COLUMNS: dict[str, Any] = {
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
    "fisher_p": float,
    "auroc": float,
    "auroc_low": float,
    "second_auroc": float,
    "second_auroc_low": float,
    "same_distance_auroc": float,
    "same_distance_auroc_low": float,
    "second_same_distance_auroc": float,
    "second_same_distance_auroc_low": float,
    "beyond_distance": bool,
    "accuracy": float,
    "precision": float,
    "recall": float,
    "failed": int,
}
"""Columns of ``descriptions.parquet``."""
