"""What do the signals of SmolLM2's circuits look for, and are the words right? `lexical`, in two corpora.

    python docs/studies/words_smollm2.py CORPUS SECOND_CORPUS [--signals 500] [--out words-smollm2]

Corpora are what `headtrace interpret --corpus` takes. The circuits are of six IOI prompts and ten others. Prints the
interpretable fraction with its interval, by layer, the controls, and twenty descriptions at random from those that
are supported, with the roles that the head has by its measures on the first corpus; then the words for all channels of
the heads that measure highest for induction, the same token and the token before. The same command again goes on where
it stopped.
"""

from __future__ import annotations

import argparse
import time
from random import Random

import headtrace
from headtrace.interpret import (
    HeadRole,
    Interpretation,
    ScoredSignal,
    head_roles,
    interpret,
    interpret_examples,
    scan,
)
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
Roles = dict[tuple[int, int], tuple[HeadRole, ...]]


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("corpora", nargs=2)
    asked.add_argument("--signals", type=int, default=500)
    asked.add_argument("--out", default="words-smollm2")
    given = asked.parse_args()
    model = headtrace.load("smollm2-135m")
    examples = load_task("ioi", model.tokenizer, n_per_cell=1, seed=5).examples[:6]
    tracer = headtrace.Tracer(model)
    circuits = [*tracer.trace_batch(examples, root="linear"), *map(tracer.trace, OTHERS)]
    start = time.process_time()
    found = interpret(circuits, model, given.corpora, limit=given.signals, out=given.out)
    print(found.summary())
    print(f"\n{time.process_time() - start:.0f} s of processor for both scans, words and judging\n")
    print_by_layer(found)
    roles = head_roles(model, given.corpora[0], tokens=8000)
    print_descriptions(found, roles)
    print_heads(model, given.corpora, roles)


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


def print_descriptions(found: Interpretation, roles: Roles, count: int = 20) -> None:
    """Some of the supported descriptions, at random, beside what the head does by its measures."""
    supported = [each for each in found.signals if each.supported]
    print("\n| signal | AUROC | words | roles of the head |\n| --- | --- | --- | --- |")
    for each in Random(1).sample(supported, min(count, len(supported))):
        words = each.description.text.replace("|", "\\|") if each.description else ""
        aurocs = " and ".join(f"{counts.auroc or 0:.2f}" for counts in (each.counts, each.in_second))
        own = ", ".join(map(str, roles[each.signal.layer, each.signal.head])) or "none"
        print(f"| {each.signal.name} | {aurocs} | {words} | {own} |")


if __name__ == "__main__":
    main()
