"""What do the signals of SmolLM2's circuits look for, and are the words right? `lexical`, in two corpora.

    python docs/studies/words_smollm2.py CORPUS SECOND_CORPUS [--signals 500] [--no-heads] [--out words-smollm2]

Corpora are what `headtrace interpret --corpus` takes. The circuits are of six IOI prompts and ten others. Prints the
interpretable fraction with its interval, by layer, the controls, and twenty descriptions at random from all that there
are, supported or not, with what the head does by its measures on the first corpus. They are to be graded without
knowing which are supported: that is written to drawn.json alone. Then the words for all channels of the heads that
measure highest for induction, the same token and the token before (not with --no-heads). The same command again goes
on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import headtrace
from headtrace.circuits import read_circuits, write_parquet
from headtrace.interpret import (
    HeadRole,
    Interpretation,
    Judged,
    ScoredSignal,
    SignalExamples,
    interpret_examples,
    scan,
)
from headtrace.interpret.head_roles import roles_of_sums
from headtrace.interpret.scored_signals import circuit_signals
from headtrace.tasks import load_task
from headtrace.vocabulary import head_name

OTHERS = (
    "The Eiffel Tower is in the city of",
    "The keys to the cabinet next to the door",
    "The capital of Japan is Tokyo, and the capital of France is",
    "Monday, Tuesday, Wednesday,",
    "def add(a, b):\n    return a +",
    "The war lasted from the year 1732 to the year 17",
    "When the teacher asked the girls a question, the youngest of",
    "She opened the box (the one with the red lid) and took out the",
    "My favourite colour is blue. My sister's favourite colour is green. My favourite colour is",
    "One, two, three, four,",
)
SEED = 11
"""Of the descriptions that are graded."""
Roles = dict[tuple[int, int], tuple[HeadRole, ...]]


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("corpora", nargs=2)
    asked.add_argument("--signals", type=int, default=500)
    asked.add_argument("--no-heads", action="store_true")
    asked.add_argument("--out", default="words-smollm2")
    given = asked.parse_args()
    model, folder = headtrace.load("smollm2-135m"), Path(given.out)
    signals = strongest(traced(model, folder / "circuits.parquet"), given.signals)
    start = time.process_time()
    scans = [scan(model, text, signals, out=folder / f"scan-{n}") for n, text in enumerate(given.corpora)]
    one, other = ([each.examples(signal) for signal in signals] for each in scans)
    found = interpret_examples(one, second=other)
    found.save(folder)
    print(found.summary())
    print(f"\n{time.process_time() - start:.0f} s of processor for both scans, words and judging\n")
    print_supported(found)
    print_distances(found, one, other)
    print_by_layer(found)
    measured = Measured.of(model, given.corpora[0])
    print_drawn(found, measured, folder / "drawn.json")
    if not given.no_heads:
        print_heads(model, given.corpora, measured.roles)


def traced(model: headtrace.Model, file: Path) -> list[headtrace.Circuit]:
    """The sixteen circuits, from the file if they are there already."""
    if not file.exists():
        examples = load_task("ioi", model.tokenizer, n_per_cell=1, seed=5).examples[:6]
        tracer = headtrace.Tracer(model)
        circuits = [*tracer.trace_batch(examples, root="linear"), *map(tracer.trace, OTHERS)]
        write_parquet(circuits, file)
    return read_circuits(file)


def strongest(circuits: list[headtrace.Circuit], most: int) -> list[ScoredSignal]:
    """The signals with the largest weights; edges into the same channels of a head are one signal."""
    weights = {
        signal: circuit.edges[signal.edge[1]].weight
        for circuit in circuits
        for signal in circuit_signals(circuit)
        if signal.edge
    }
    distinct: dict[Any, ScoredSignal] = {}
    for signal in sorted(weights, key=lambda each: (-weights[each], each.id)):
        distinct.setdefault(signal.reads, signal)
    return list(distinct.values())[:most]


@dataclass
class Measured:
    """What the heads of the model do over a corpus."""

    roles: Roles
    scores: dict[str, Any]
    """Of each measure, a table of layers and heads."""

    @classmethod
    def of(cls, model: headtrace.Model, corpus: str) -> Measured:
        one = scan(model, corpus, "L0H0:0", tokens=8000, heads=True).heads
        assert one is not None
        return cls(roles_of_sums(one), one.measures())

    def said(self, layer: int, head: int) -> str:
        """The shares of attention, and the distance, on the corpus."""
        names = ("previous", "self", "duplicate", "induction", "sink", "distance")
        return ", ".join(f"{name} {self.scores[name][layer, head]:.2f}" for name in names)


def print_heads(model: headtrace.Model, corpora: list[str], roles: Roles, most: int = 6) -> None:
    """The words for all channels of the heads that do something most, by their measures."""
    chosen: dict[tuple[int, int], str] = {}
    for name in ("induction", "same token", "previous token"):
        scores = {place: role.score for place, own in roles.items() for role in own if role.name == name}
        for place in sorted(scores, key=lambda place: -scores[place])[:most]:
            chosen.setdefault(place, f"{name} {scores[place]:.2f}")
    signals = [
        ScoredSignal(f"{head_name(*place)}:all", *place, "channel", tuple(range(model.d_head)))
        for place in chosen
    ]
    scans = [scan(model, corpus, signals, tokens=16000) for corpus in corpora]
    one, other = ([each.examples(signal) for signal in signals] for each in scans)
    print("\n| head | measured | supported | AUROC | words |\n| --- | --- | --- | --- | --- |")
    found = interpret_examples(one, second=other).signals
    for measured, each in zip(chosen.values(), found, strict=True):
        words = each.description.text if each.description else "none"
        aurocs = " and ".join(f"{counts.auroc or 0:.2f}" for counts in (each.counts, each.in_second))
        name = head_name(each.signal.layer, each.signal.head)
        print(f"| {name} | {measured} | {'yes' if each.supported else 'no'} | {aurocs} | {words} |")


def print_by_layer(found: Interpretation) -> None:
    print("| layer | supported | of | share |\n| --- | --- | --- | --- |")
    for layer, share in found.by_layer.items():
        print(f"| {layer} | {share.count} | {share.total} | {share} |")


def print_supported(found: Interpretation) -> None:
    """The words that are supported, and how well they tell pairs from others at the same distance."""
    supported = [each for each in found.signals if each.supported and each.description]
    by_words: dict[str, list[Judged]] = {}
    for each in supported:
        assert each.description is not None
        by_words.setdefault(each.description.text, []).append(each)
    print("| signals | beyond distance | AUROC at the same distance | words |\n| --- | --- | --- | --- |")
    for words, signals in sorted(by_words.items(), key=lambda item: -len(item[1])):
        both = (
            counts for each in signals for counts in (each.against_same_distance, each.second_same_distance)
        )
        aurocs = [counts.auroc for counts in both if counts.auroc is not None]
        beyond = sum(each.beyond_distance for each in signals)
        print(f"| {len(signals)} | {beyond} | {min(aurocs):.2f} to {max(aurocs):.2f} | {words} |")
    described = [each for each in found.signals if each.status == "described"]
    beyond = [each for each in described if each.beyond_distance]
    print(f"\nOf all {len(described)} with words, {len(beyond)} are beyond distance:")
    for each in sorted(beyond, key=lambda each: each.p_value)[:25]:
        aurocs = [each.counts, each.in_second, each.against_same_distance, each.second_same_distance]
        said = " ".join(f"{counts.auroc or 0:.2f}" for counts in aurocs)
        print(f"- {each.signal.name} {said} {'supported' if each.supported else ''} {each.description.text}")  # type: ignore[union-attr]


def print_distances(found: Interpretation, first: list[SignalExamples], second: list[SignalExamples]) -> None:
    """How far apart highest and random pairs are, in both corpora, of supported signals and of the others."""
    print("\n| signals | median distance of the highest pairs | of random ones |\n| --- | --- | --- |")
    for name, wanted in (("supported", True), ("not supported", False)):
        both = zip(found.signals, first, second, strict=True)
        chosen = [each for judged, *both in both if judged.supported is wanted for each in both]
        high, low = (
            [pair.dest - pair.src for each in chosen for pair in getattr(each, group)]
            for group in ("top", "random")
        )
        print(f"| {name} | {median(high):g} | {median(low):g} |")
    print()


def print_drawn(found: Interpretation, measured: Measured, file: Path, count: int = 20) -> None:
    """Some descriptions at random beside what the head does, to be graded blind; the verdicts go to a file."""
    described = [each for each in found.signals if each.description is not None]
    drawn = Random(SEED).sample(described, min(count, len(described)))
    print(f"\n{len(drawn)} of {len(described)} descriptions, drawn with seed {SEED}")
    print("\n| | signal | words | roles of the head | attention to |\n| --- | --- | --- | --- | --- |")
    for number, each in enumerate(drawn, start=1):
        words = each.description.text.replace("|", "\\|") if each.description else ""
        place = each.signal.layer, each.signal.head
        own = ", ".join(map(str, measured.roles[place])) or "none"
        print(f"| {number} | {each.signal.name} | {words} | {own} | {measured.said(*place)} |")
    key = [
        {"signal": each.signal.name, "supported": each.supported, "auroc": each.counts.auroc}
        for each in drawn
    ]
    file.write_text(json.dumps(key, indent=1), "utf-8")


if __name__ == "__main__":
    main()
