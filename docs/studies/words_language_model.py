"""Words for signals by a real language model, and judged by it: does it read, what is supported, and what does it cost?

    python docs/studies/words_language_model.py CORPUS SECOND_CORPUS --base-url http://localhost:8000/v1
        --model-name NAME [--signals 100] [--first 100] [--shown 6] [--around 0] [--pid SERVER] [--out words-model]

Signals are drawn at random (with a seed) from those of the circuits of six IOI prompts on SmolLM2. Of each signal, in
the order drawn, the language model

- describes what sets some of its highest pairs apart from random ones;
- says how probable it is that a description is true of held-out pairs, one by one, for three descriptions: those of
  `lexical`, its own, and its own of another signal (a control).

What counts of these probabilities is their order, within one description: a model that says yes to everything may still
say it more readily where it is true. The literal judge labels the same pairs by the words of `lexical`: Cohen's kappa
says how well the language model reads. Words are supported if all of ten highest pairs come before all of ten random
ones, in each of two corpora (labels that are all right pass the test of `interpret`; with one wrong they fail it). So
two and two pairs are asked of every signal, and further ones only while their order is right. The pooled numbers are of
the first four pairs alone.

The server needs logprobs. The command can be stopped and given again: answers are kept, and it goes on with what is
missing. `--first` limits it to the first so many of the signals drawn; then it prints its results. costs.jsonl has what
was asked for each signal: requests, tokens, and the processor time of the server (`--pid`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import headtrace
from headtrace.circuits import read_circuits, write_parquet
from headtrace.interpret import (
    Description,
    EndpointExplainer,
    EndpointJudge,
    Failure,
    LiteralJudge,
    SignalExamples,
    interpret_examples,
    make_explainer,
    scan,
)
from headtrace.interpret.explainers import Explanation, RunContext
from headtrace.interpret.judging import LEAST_AUROC, Counts, split
from headtrace.interpret.scored_signals import Pair, ScoredSignal, circuit_signals
from headtrace.statistics import Proportion, q_values
from headtrace.tasks import load_task

TOKENS = 8000
"""Tokens of each corpus that are scanned."""
PER_GROUP, AT_ONCE = 10, 4
"""Highest and random pairs of each corpus that the test is on, and pairs asked about together, half of them highest."""
BLOCK = 20
"""Signals that are described before they are judged: a server keeps what the last questions have in common."""
Weighed = tuple[bool, float]
"""Whether a pair is one of the highest, and the log-odds that the words are true of it."""
SOURCES = ("lexical's words", "its own words", "its words of another signal")


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("corpora", nargs=2)
    asked.add_argument("--base-url", required=True)
    asked.add_argument("--model-name", required=True)
    asked.add_argument("--signals", type=int, default=100)
    asked.add_argument("--first", type=int, default=100)
    asked.add_argument("--shown", type=int, default=6)
    asked.add_argument("--around", type=int, default=0)
    asked.add_argument("--pid", type=int)
    asked.add_argument("--out", default="words-model")
    study = Study(asked.parse_args())
    one_wrong = Counts(PER_GROUP, 0, 1, PER_GROUP - 1), Counts(PER_GROUP - 1, 1, 0, PER_GROUP)
    assert all(each.auroc_interval[0] < LEAST_AUROC for each in one_wrong), "a wrong label fails the test"
    results = study.run()
    report(results)
    study.say_costs(len(results))


@dataclass
class Result:
    """A signal, what was said of it, and the labels."""

    signal: ScoredSignal
    own: Description | None
    lexical: Description | None
    odds: dict[str, list[Weighed]] = field(default_factory=dict[str, list[Weighed]])
    """By source of the words, of as many pairs as were asked about."""
    literal: list[tuple[bool, bool]] = field(default_factory=list[tuple[bool, bool]])
    """The literal judge's labels, by lexical's words, of all forty pairs."""
    failed: bool = False
    """Whether the language model gave no words for want of an answer."""

    def supported(self, source: str) -> tuple[bool, float]:
        """Whether all forty pairs are in the right order, and the p of the test of labels that are all right."""
        if source == "literal":
            found = [(high, float(label)) for high, label in self.literal]
        else:
            found = self.odds.get(source, [])
        if len(found) < 4 * PER_GROUP or not all(map(in_order, by_corpus(found))):
            return False, 1.0
        return True, Counts(PER_GROUP, 0, 0, PER_GROUP).p_above


@dataclass
class Study:
    given: argparse.Namespace

    @cached_property
    def folder(self) -> Path:
        return Path(self.given.out)

    @cached_property
    def context(self) -> RunContext:
        return RunContext(folder=self.folder)

    @cached_property
    def explainer(self) -> EndpointExplainer:
        return EndpointExplainer(**self.options).prepare(self.context)

    @cached_property
    def judge(self) -> EndpointJudge:
        return EndpointJudge(**self.options, weigh=True).prepare(self.context)

    @property
    def options(self) -> dict[str, Any]:
        names = ("base_url", "model_name", "around")
        return {name: getattr(self.given, name) for name in names} | {"concurrency": 1, "timeout": 900.0}

    def scanned(self) -> list[tuple[SignalExamples, SignalExamples]]:
        """The signals drawn, with their pairs in both corpora; prints what the scans cost."""
        model, file = headtrace.load("smollm2-135m"), self.folder / "circuits.parquet"
        if not file.exists():
            examples = load_task("ioi", model.tokenizer, n_per_cell=1, seed=5).examples[:6]
            write_parquet(headtrace.Tracer(model).trace_batch(examples, root="linear"), file)
        circuits = read_circuits(file)
        distinct = {signal.reads: signal for circuit in circuits for signal in circuit_signals(circuit)}
        drawn = Random(7).sample(sorted(distinct.values(), key=lambda each: each.id), self.given.signals)
        start = time.process_time()
        scans = [
            scan(model, corpus, drawn, tokens=TOKENS, out=self.folder / f"scan-{place}")
            for place, corpus in enumerate(self.given.corpora)
        ]
        scan_seconds = time.process_time() - start
        start = time.process_time()
        for _ in range(3):
            model.record([list(range(1000, 1128))], last_logits=True)
        pass_seconds = (time.process_time() - start) / 3
        print(
            f"{len(drawn)} of {len(distinct)} signals; processor time of both scans {scan_seconds:.1f} s (short if "
            f"they were there already), of a pass over 128 tokens {pass_seconds:.2f} s",
            flush=True,
        )
        one, other = ([replace(each.examples(signal), middle=()) for signal in drawn] for each in scans)
        return list(zip(one, other, strict=True))[: self.given.first]

    def run(self) -> list[Result]:
        scanned = self.scanned()
        # All pairs, as a run of `interpret` would have them: what the literal judge supports.
        full = interpret_examples([one for one, _ in scanned], second=[other for _, other in scanned])
        print(f"all pairs, lexical's words, literal judge: {full.fraction} supported\n")
        results: list[Result] = []
        for start in range(0, len(scanned), BLOCK):
            block = range(start, min(start + BLOCK, len(scanned)))
            parts = {number: split(scanned[number][0], second=scanned[number][1]) for number in block}
            described = {number: self.describe(number, seen) for number, (seen, _) in parts.items()}
            for number, own in described.items():
                seen, held = parts[number]
                (lexical,) = make_explainer("lexical").explain_all([seen])
                result = Result(
                    seen.signal,
                    own if isinstance(own, Description) else None,
                    lexical if isinstance(lexical, Description) else None,
                    failed=isinstance(own, Failure),
                )
                before = self.spent()
                self.weigh(result, rounds(held, Random(number)), another(results, result.own))
                self.keep_cost(number, "judge", before)
                results.append(result)
                said = {name: f"{in_order(odds)} ({len(odds)})" for name, odds in result.odds.items()}
                print(
                    f"{number + 1}. {seen.signal.name}: {result.own and result.own.text!r} {said}", flush=True
                )
        return results

    def describe(self, number: int, seen: SignalExamples) -> Explanation:
        before = self.spent()
        (own,) = self.explainer.explain_all(
            [
                replace(
                    seen, top=spread(seen.top, self.given.shown), random=spread(seen.random, self.given.shown)
                )
            ]
        )
        self.keep_cost(number, "explain", before)
        return own

    def weigh(
        self, result: Result, asked: Sequence[Sequence[tuple[bool, Pair]]], others: Description | None
    ) -> None:
        """Ask about pairs by each description, four at a time, until a random one comes before one of the highest."""
        for source, words in zip(SOURCES, (result.lexical, result.own, others), strict=True):
            if words is None:
                continue
            found = result.odds.setdefault(source, [])
            for pairs in asked:
                odds = self.judge.odds([(words, pair) for _, pair in pairs])
                found += [(high, odd) for (high, _), odd in zip(pairs, odds, strict=True) if odd is not None]
                if None in odds or not all(map(in_order, by_corpus(found))):
                    break
        if result.lexical is not None:
            every = [pair for pairs in asked for pair in pairs]
            said = LiteralJudge().judge(result.lexical, [pair for _, pair in every])
            result.literal = [(high, bool(label)) for (high, _), label in zip(every, said, strict=True)]

    # -- What it costs -------------------------------------------------------------------------------------------

    def spent(self) -> Counter[str]:
        """Questions, tokens and the processor time of the server, up to now."""
        seconds = 0.0
        if self.given.pid is not None:
            import psutil

            times = psutil.Process(self.given.pid).cpu_times()
            seconds = times.user + times.system
        counts = self.context.counts
        found: Counter[str] = Counter(questions=counts.questions, tokens=self.context.budget.spent)
        found.update(unanswered=counts.unanswered, unreadable=counts.unreadable, seconds=seconds)  # type: ignore[arg-type]
        return found

    def keep_cost(self, number: int, what: str, before: Counter[str]) -> None:
        """Append what was asked, unless every answer was there already."""
        now = self.spent()
        if now["tokens"] > before["tokens"]:
            cost = {"signal": number, "what": what} | {name: now[name] - before[name] for name in now}
            with (self.folder / "costs.jsonl").open("a") as file:
                file.write(json.dumps(cost) + "\n")

    def say_costs(self, signals: int) -> None:
        lines = (self.folder / "costs.jsonl").read_text().splitlines()
        costs = [cost for cost in map(json.loads, lines) if cost["signal"] < signals]
        print("\ncosts:")
        for what in ("explain", "judge"):
            own = [cost for cost in costs if cost["what"] == what]
            names = ("questions", "tokens", "seconds", "unanswered", "unreadable")
            total = {name: round(sum(cost[name] for cost in own), 1) for name in names}
            print(f"  {what}, {len({cost['signal'] for cost in own})} signals: {total}")


def spread(pairs: Sequence[Pair], count: int) -> tuple[Pair, ...]:
    """So many pairs at most, spread evenly over all."""
    places = np.linspace(0, len(pairs) - 1, min(count, len(pairs))).round().astype(int)
    return tuple(pairs[place] for place in places)


def rounds(held: Any, random: Random) -> list[list[tuple[bool, Pair]]]:
    """The pairs of the test, a list for each question: half of them highest, in random order."""
    found: list[list[tuple[bool, Pair]]] = []
    for top, others in ((held.top, held.random), (held.second_top, held.second_random)):
        most = min(PER_GROUP, len(top), len(others))
        high, low = (random.sample(pairs, most) for pairs in (top, others))
        for start in range(0, most, AT_ONCE // 2):
            part = [(True, pair) for pair in high[start : start + AT_ONCE // 2]]
            part += [(False, pair) for pair in low[start : start + AT_ONCE // 2]]
            random.shuffle(part)
            found.append(part)
    return found


def another(results: Sequence[Result], own: Description | None) -> Description | None:
    """The language model's words of the last signal before that it described otherwise."""
    texts = (each.own for each in reversed(results))
    return next((each for each in texts if each and own and each.text != own.text), None)


# -- What was found ----------------------------------------------------------------------------------------------


def report(results: Sequence[Result]) -> None:
    words = Counter(each.own.text for each in results if each.own)
    failed = sum(each.failed for each in results)
    print(
        f"\n{len(results)} signals, {sum(words.values())} with its words, {failed} failures; {len(words)} different:"
    )
    for text, count in words.most_common(25):
        print(f"- {count} x {text}")
    print("\nagreement of the two judges, by lexical's words:")
    with_words = [each for each in results if each.lexical]
    say_agreement("all words", with_words)
    for kind, wanted in (("words that tell a distance", True), ("other words", False)):
        chosen = [each for each in with_words if each.lexical and mentions_distance(each.lexical) is wanted]
        say_agreement(kind, chosen)
    print("\nsupported, of all signals, and the AUROC of the first four pairs, within each signal:")
    for source in (*SOURCES, "literal"):
        say_supported(source, results)


def say_agreement(kind: str, results: Sequence[Result]) -> None:
    """Of the first four pairs of each signal: the literal judge's labels, and the language model's answers."""
    asked: list[list[tuple[bool, float]]] = []
    for each in results:
        odds = [odd for _, odd in each.odds.get(SOURCES[0], [])[:AT_ONCE]]
        if len(odds) == AT_ONCE:
            asked.append([(label, odd) for (_, label), odd in zip(each.literal, odds, strict=False)])
    every = [pair for pairs in asked for pair in pairs]
    if not every:
        return
    yes = [odd > 0 for _, odd in every]
    print(f"  {kind}: {len(asked)} signals, {len(every)} pairs, {sum(label for label, _ in every)} of them true to "
          f"the letter; yes to {sum(yes)}")  # fmt: skip
    plain = [[(label, odd > 0) for label, odd in pairs] for pairs in asked]
    halves = [
        [(label, odd > float(np.median([x for _, x in pairs]))) for label, odd in pairs] for pairs in asked
    ]
    for name, found in (("its answers", plain), ("the two of four that it finds more probable", halves)):
        own = kappa([pair for pairs in found for pair in pairs])
        low, high = bootstrap(found, kappa)
        print(f"    kappa, {name}: {own:.3f} [{low:.3f}, {high:.3f}] (bootstrap over signals)")
    both = [pairs for pairs in asked if 0 < sum(label for label, _ in pairs) < len(pairs)]
    if both:
        low, high = bootstrap(both, within, flat=False)
        print(
            f"    AUROC within a signal, of {len(both)} that have both: {within(both):.3f} [{low:.3f}, {high:.3f}]"
        )


def say_supported(source: str, results: Sequence[Result]) -> None:
    verdicts = [each.supported(source) for each in results]
    passed = [
        q <= 0.05 and ok for q, (ok, _) in zip(q_values([p for _, p in verdicts]), verdicts, strict=True)
    ]
    share = Proportion(sum(passed), len(results))
    found = [
        [(high, float(label)) for high, label in each.literal]
        if source == "literal"
        else each.odds.get(source, [])
        for each in results
    ]
    first = [each[:AT_ONCE] for each in found if len(each) >= AT_ONCE]
    if not first:
        return
    low, high = bootstrap(first, within, flat=False)
    random = np.random.default_rng(1)
    dealt = [within([shuffled(pairs, random) for pairs in first]) for _ in range(2000)]
    chance = np.quantile(dealt, [0.025, 0.975])
    print(
        f"  {source}: {share}; AUROC {within(first):.3f} [{low:.3f}, {high:.3f}] of {len(first)} signals (dealt at "
        f"random [{chance[0]:.3f}, {chance[1]:.3f}]); {sum(len(each) > AT_ONCE for each in found)} asked further"
    )


def by_corpus(found: Sequence[Weighed]) -> tuple[Sequence[Weighed], Sequence[Weighed]]:
    return found[: 2 * PER_GROUP], found[2 * PER_GROUP :]


def in_order(found: Sequence[Weighed]) -> bool:
    """Whether all of the highest pairs come before all random ones."""
    high, low = ([odd for is_high, odd in found if is_high is wanted] for wanted in (True, False))
    return not high or not low or min(high) > max(low)


def within(per_signal: Sequence[Sequence[tuple[bool, float]]]) -> float:
    """The mean over signals of the AUROC of four pairs: how often one that counts comes before one that does not."""
    found: list[float] = []
    for pairs in per_signal:
        high, low = ([odd for wanted, odd in pairs if wanted is which] for which in (True, False))
        found.append(float(np.mean([(a > b) + (a == b) / 2 for a in high for b in low])))
    return float(np.mean(found))


def mentions_distance(words: Description) -> bool:
    rules = (words.structure or {})["any"]
    return any(each["feature"] == "distance" for rule in rules for each in rule["all"])


def kappa(pairs: Sequence[tuple[Any, Any]]) -> float:
    """Cohen's kappa of two judges' labels of the same pairs."""
    one, two = np.array(pairs, dtype=float).reshape(-1, 2).T
    alike = (one == two).mean()
    chance = one.mean() * two.mean() + (1 - one.mean()) * (1 - two.mean())
    return float((alike - chance) / (1 - chance)) if chance < 1 else 0.0


def shuffled(pairs: Sequence[Weighed], random: np.random.Generator) -> list[Weighed]:
    order = random.permutation(len(pairs))
    return [(high, pairs[i][1]) for (high, _), i in zip(pairs, order, strict=True)]


def bootstrap(
    per_signal: Sequence[Sequence[tuple[Any, Any]]],
    of: Callable[[Any], float],
    samples: int = 2000,
    *,
    flat: bool = True,
) -> tuple[float, float]:
    """The 95% interval of a number over samples of signals, since pairs of one signal go together."""
    random, n = np.random.default_rng(0), len(per_signal)
    found: list[float] = []
    for _ in range(samples):
        drawn = [per_signal[place] for place in random.integers(n, size=n)]
        found.append(of([pair for pairs in drawn for pair in pairs] if flat else drawn))
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    main()
