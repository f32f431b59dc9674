"""Words by a language model behind an endpoint, for signals of SmolLM2's IOI circuits; and are the statistics right?

    python docs/studies/words_endpoint.py --base-url http://localhost:8000/v1 --model-name NAME [--explainer openai]
        [--corpus benchmarks/text.txt] [--signals 20] [--pairs 16] [--batch 1] [--out words-endpoint]

The endpoint judges; `--explainer lexical` lets it judge words that are clear. Few pairs are kept per signal,
so that a model on a laptop can do it. Prints the summary and some descriptions, and computes every number of
`interpretation.json` once more from the labels in it, by scipy and nothing of headtrace; a difference is an error. The
same command again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scipy import stats

RATE = 0.05


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--base-url", required=True)
    asked.add_argument("--model-name", required=True)
    asked.add_argument("--explainer", default="openai", choices=["openai", "lexical"])
    asked.add_argument("--corpus", default="benchmarks/text.txt")
    asked.add_argument("--prompts", type=int, default=2)
    asked.add_argument("--signals", type=int, default=20)
    asked.add_argument("--pairs", type=int, default=16)
    asked.add_argument("--batch", type=int, default=1)
    asked.add_argument("--out", default="words-endpoint")
    given = asked.parse_args()
    start = time.perf_counter()
    found = put_into_words(given)
    print(found.summary())
    print(f"\n{time.perf_counter() - start:.0f} s\n")
    for text, count in Counter(
        each.description.text for each in found.signals if each.description
    ).most_common(8):
        print(f"- {count} x {text}")
    for reason, count in Counter(each.reason[:160] for each in found.signals if each.reason).most_common(5):
        print(f"- {count} x no result: {reason}")
    check_statistics(json.loads((Path(given.out) / "interpretation.json").read_text("utf-8")))
    print("\nEvery number was computed again from the labels, and is the same.")


def put_into_words(given: argparse.Namespace) -> Any:
    import headtrace
    from headtrace.interpret import EndpointExplainer, EndpointJudge, interpret
    from headtrace.tasks import load_task

    where = {"base_url": given.base_url, "model_name": given.model_name, "concurrency": 1, "timeout": 300.0}
    model = headtrace.load("smollm2-135m")
    examples = load_task("ioi", model.tokenizer, n_per_cell=1, seed=5).examples[: given.prompts]
    return interpret(
        headtrace.Tracer(model).trace_batch(examples, root="linear"),
        model,
        given.corpus,
        explainer=EndpointExplainer(**where) if given.explainer == "openai" else given.explainer,
        judge=EndpointJudge(**where, batch=given.batch),
        limit=given.signals,
        out=given.out,
        scanning=partial(few_pairs, given.pairs),
    )


@dataclass
class FewPairs:
    """A scan of which fewer random pairs are looked at."""

    scan: Any
    pairs: int

    @property
    def signals(self) -> Any:
        return self.scan.signals

    def examples(self, signal: Any) -> Any:
        return self.scan.examples(signal, random=self.pairs)


def few_pairs(pairs: int, *given: Any, **more: Any) -> FewPairs:
    from headtrace.interpret import scan

    return FewPairs(scan(*given, top=pairs, **more), pairs)


# -- every number once more ----------------------------------------------------------------------------------


def check_statistics(told: dict[str, Any]) -> None:
    """Compute the numbers of an interpretation.json again from its labels; raises AssertionError on a difference."""
    tested = [each for each in told["signals"] if each["status"] in ("described", "none")]
    p_values = [p_value(each["labels"]) if each["status"] == "described" else 1.0 for each in tested]
    adjusted = stats.false_discovery_control(p_values) if p_values else []
    for each, p, q in zip(tested, p_values, adjusted, strict=True):
        same(each["p_value"], p)
        same(each["q_value"], q)
        assert each["supported"] == (each["status"] == "described" and supported(each["labels"], q)), each[
            "id"
        ]
    for each in told["signals"]:
        if each["labels"]:
            check_counts(each["in_second"], each["labels"]["second_top"], each["labels"]["second_random"])
            check_counts(each["against_random"], each["labels"]["top"], each["labels"]["random"])
            check_counts(each["against_middle"], each["labels"]["top"], each["labels"]["middle"])
            check_counts(each["against_sibling"], each["labels"]["top"], each["labels"]["sibling"])
    check_proportion(told["interpretable"], sum(each["supported"] for each in tested), len(tested))
    check_controls(told, without=sum(each["status"] == "none" for each in tested))


def check_controls(told: dict[str, Any], without: int) -> None:
    """The controls by words of another signal."""
    judged = [each for each in told["exchanged"] if each["status"] == "described"]
    for name, chosen in (
        ("shuffled_words", [*judged, *[None] * without]),
        ("different_words", [each for each in judged if each["differ"]]),
    ):
        p_values = [1.0 if each is None else p_value(each["labels"]) for each in chosen]
        q_values = stats.false_discovery_control(p_values) if p_values else []
        passing = [
            each for each, q in zip(chosen, q_values, strict=True) if each and supported(each["labels"], q)
        ]
        check_proportion(told["controls"][name], len(passing), len(chosen))


CORPORA = (("top", "random"), ("second_top", "second_random"))


def p_value(labels: dict[str, str]) -> float:
    """That the AUROC is above 0.75 in both corpora: the z at which Newcombe's interval of the larger p ends there."""

    def level(top: str, random: str) -> float:
        if not labels.get(top, "").strip("?") or not labels.get(random, "").strip("?"):
            return 1.0
        low, high = -40.0, 40.0
        while high - low > 1e-13 * max(1.0, abs(low)):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if lower_end(labels[top], labels[random], middle) > 0.75 else (low, middle)
            )
        return float(stats.norm.sf(low))

    return max(level(*groups) for groups in CORPORA)


def supported(labels: dict[str, str], q: float) -> bool:
    """Whether both intervals end above 0.75, after the correction for many signals."""
    z = float(stats.norm.ppf(0.975))
    return q <= RATE and all(lower_end(labels[top], labels[random], z) > 0.75 for top, random in CORPORA)


def lower_end(top: str, random: str, z: float) -> float:
    """The lower end of the AUROC's interval (the upper one for a negative z): (1 + difference of two shares) / 2."""
    (p, p_low, p_high), (q, q_low, q_high) = (
        wilson(each.count("y"), each.count("n"), abs(z)) for each in (top, random)
    )
    if z >= 0:
        return (1 + p - q - math.hypot(p - p_low, q_high - q)) / 2
    return (1 + p - q + math.hypot(p_high - p, q - q_low)) / 2


def wilson(yes: int, no: int, z: float) -> tuple[float, float, float]:
    of = yes + no
    if not of:
        return 0.5, 0.0, 1.0
    share = yes / of
    middle, half = share + z**2 / (2 * of), z * math.sqrt(share * (1 - share) / of + z**2 / (4 * of**2))
    return share, max(0.0, (middle - half) / (1 + z**2 / of)), min(1.0, (middle + half) / (1 + z**2 / of))


def check_counts(told: dict[str, Any], top: str, others: str) -> None:
    yes, no, alarms, right = top.count("y"), top.count("n"), others.count("y"), others.count("n")
    found = (told["true_positive"], told["false_negative"], told["false_positive"], told["true_negative"])
    assert found == (yes, no, alarms, right)
    assert told["failed"] == (top + others).count("?")
    check_proportion(told["accuracy"], yes + right, yes + no + alarms + right)
    check_proportion(told["precision"], yes, yes + alarms)
    check_proportion(told["recall"], yes, yes + no)


def check_proportion(told: dict[str, Any], count: int, of: int) -> None:
    """So many of so many, and Wilson's interval by its formula."""
    assert (told["count"], told["of"]) == (count, of), told
    if not of:
        return
    share, z = count / of, float(stats.norm.ppf(0.975))
    middle, half = share + z**2 / (2 * of), z * math.sqrt(share * (1 - share) / of + z**2 / (4 * of**2))
    same(told["value"], share)
    same(told["low"], (middle - half) / (1 + z**2 / of))
    same(told["high"], (middle + half) / (1 + z**2 / of))


def same(told: float, found: float) -> None:
    assert math.isclose(told, found, rel_tol=1e-7, abs_tol=1e-12), (told, found)


if __name__ == "__main__":
    main()
