"""What do the signals of SmolLM2's IOI circuits look for, and are the words right? At least 300 signals, `lexical`.

    python docs/studies/words_smollm2.py CORPUS [--prompts 4] [--signals 300] [--out words-smollm2]

CORPUS is what `headtrace interpret --corpus` takes: a file, or sampled:20000 for text drawn from the model itself.
Prints the interpretable fraction with its interval, by layer, the controls, and ten descriptions that pass and ten that
do not, each with an example, as Markdown. The same command again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import time

import headtrace
from headtrace.interpret import Interpretation, Judged, interpret
from headtrace.tasks import load_task


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("corpus")
    asked.add_argument("--prompts", type=int, default=4)
    asked.add_argument("--signals", type=int, default=300)
    asked.add_argument("--out", default="words-smollm2")
    given = asked.parse_args()
    model = headtrace.load("smollm2-135m")
    examples = load_task("ioi", model.tokenizer, n_per_cell=1, seed=5).examples[: given.prompts]
    circuits = headtrace.Tracer(model).trace_batch(examples, root="linear")
    start = time.perf_counter()
    found = interpret(circuits, model, given.corpus, limit=given.signals, out=given.out)
    print(found.summary())
    print(f"\n{time.perf_counter() - start:.0f} s for scan, words and judging\n")
    print_by_layer(found)
    print_descriptions(found)


def print_by_layer(found: Interpretation) -> None:
    print("| layer | supported | of | share |\n| --- | --- | --- | --- |")
    for layer, share in found.by_layer.items():
        print(f"| {layer} | {share.count} | {share.of} | {share} |")


def print_descriptions(found: Interpretation, each: int = 10) -> None:
    """The best and the worst of those with words, one per text of description."""
    by_text: dict[str, Judged] = {}
    for one in sorted(found.signals, key=lambda one: one.p_value):
        if one.description is not None:
            by_text.setdefault(one.description.text, one)
    good = [one for one in by_text.values() if one.supported][:each]
    bad = [one for one in by_text.values() if not one.supported][-each:]
    print("\n| signal | supported | p | words | example |\n| --- | --- | --- | --- | --- |")
    for one in (*good, *bad):
        example = one.examples[0][0].excerpt(around=3).replace("\n", "⏎").replace("|", "\\|")
        words = one.description.text.replace("|", "\\|") if one.description else ""
        shown = "yes" if one.supported else "no"
        print(f"| {one.signal.name} | {shown} | {one.p_value:.1g} | {words} | `{example}` |")


if __name__ == "__main__":
    main()
