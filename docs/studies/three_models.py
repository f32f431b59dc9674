"""Are mechanisms alike in three real models? Five tasks; heads, roles, damage, channels, sinks; and what it costs.

    python docs/studies/three_models.py --model smollm2-135m --prompts 10 --out build/three
    python docs/studies/three_models.py --model gemma-3-270m --prompts 10 --out build/three
    python docs/studies/three_models.py --model qwen2.5-coder-1.5b --prompts 2 --out build/three
    python docs/studies/three_models.py --report --out build/three

Prompts that the model answers rightly, each with a counterfactual made by hand. For each: its mechanism (steps and
their rules), how many heads its difference circuit has, what is lost when heads take what they had in the other run
(the first by flow alone, and together), channels per signal of its attention circuit, attention to the first token. A
prompt is a line of rows.jsonl, written when it is done; ``--costs`` measures forward passes and memory instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from differences import Asked, prompts
from sufficiency import RESAMPLES, median_interval

import headtrace
from headtrace.causal.patching import PatchingCase, measure
from headtrace.causal.sufficiency import patching_case
from headtrace.circuits import Circuit

SETS = ("ioi", "agreement", "capitals", "pronoun", "induction")
CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Italy": "Rome",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Russia": "Moscow",
    "China": "Beijing",
    "England": "London",
    "Egypt": "Cairo",
    "Greece": "Athens",
}
WORDS = ("cup", "blue", "seven", "dog", "red", "tree", "green", "five", "cat", "house", "black", "nine")
ALONE, TOGETHER = 6, (1, 2, 4, 8, 16)
"""How many heads are patched one by one, and in which numbers together."""
PROMPT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"


def asked_of(model: headtrace.Model, name: str) -> Iterator[Asked]:
    """Prompts of a set that are answered rightly, with counterfactuals of equal length."""
    if name in ("capitals", "induction"):
        made = _capitals() if name == "capitals" else _induction()
        for number, (text, other, answer, wrong) in enumerate(made):
            ids, theirs = model.to_ids(text), model.to_ids(other)
            try:
                answers = model.token_id(answer), model.token_id(wrong)
            except headtrace.errors.InputError:  # not one token
                continue
            logits = model.end_logits([ids])[0]
            if len(ids) == len(theirs) and logits[answers[0]] > logits[answers[1]]:
                yield Asked(f"{name}/{number}", ids, answers[:1], answers[1:], theirs)
    else:
        yield from prompts(model, name)


def _capitals() -> Iterator[tuple[str, str, str, str]]:
    countries = list(CAPITALS)
    for here, there in zip(countries, countries[1:] + countries[:1], strict=True):
        text = "The capital of {} is the city of"
        yield text.format(here), text.format(there), f" {CAPITALS[here]}", f" {CAPITALS[there]}"


def _induction() -> Iterator[tuple[str, str, str, str]]:
    """Four words, a fifth, and the four again: the fifth follows. The other prompt has another fifth word."""
    for start in range(len(WORDS)):
        *first, answer, wrong = (WORDS[(start + step) % len(WORDS)] for step in (0, 1, 2, 3, 4, 6))
        text = " ".join((*first, "{}", *first))
        yield f"The {text.format(answer)}", f"The {text.format(wrong)}", f" {answer}", f" {wrong}"


# -- one prompt ------------------------------------------------------------------------------------------------


def measured(tracer: headtrace.Tracer, asked: Asked) -> dict[str, Any]:
    """Everything about one prompt."""
    model, answer, wrong = tracer.model, list(asked.answer), list(asked.wrong)
    found = headtrace.why(model, asked.ids, answer, wrong, counterfactual=[asked.by_hand], measure=False)
    circuit, whole = found.circuit, found.whole
    recording = model.record([asked.ids])
    case, other = patching_case(recording, circuit.root, asked.by_hand)
    attention = tracer.trace(asked.ids, answer, wrong)
    channels = [len(edge.channels) for edge in attention.edges if edge.channels]
    first = recording.patterns[:, 0, :, 1:, 0].mean(-1)  # every head's mean attention to the first token
    return {
        "change": whole,
        "identity error": None if circuit.difference is None else circuit.difference.error,
        "steps": [
            {"role": step.role, "heads": len(step.heads), "flow": step.flow / whole} for step in found.steps
        ],
        "components": len(circuit.heads()),
        "heads": len({(node.layer, node.head) for node in circuit.heads()}),
        "damage": damage(case, circuit, case.clean - other),
        "firings": len(attention.heads()),
        "channels": channels,
        "sink": float(first.mean()),
        "sink heads": float((first > 0.5).float().mean()),
    }


def damage(case: PatchingCase, circuit: Circuit, whole: float) -> dict[str, Any]:
    """Heads by flow, at all their places: what is lost when each alone takes what it had in the other run, and when the
    first few do, as shares of the whole difference."""
    sign = 1.0 if circuit.difference is None or circuit.difference.change > 0 else -1.0
    flows: dict[tuple[int, int], float] = {}
    for node in circuit.heads():
        key = node.layer or 0, node.head or 0
        flows[key] = flows.get(key, 0.0) + sign * (node.flow or 0.0)
    ranked = sorted((key for key in flows if flows[key] > 0), key=lambda key: -flows[key])
    _, heads, length, _ = case.shape
    owner = case.places // (length * length)

    def without(some: Sequence[tuple[int, int]]) -> Any:
        chosen = sum((owner == layer * heads + head for layer, head in some), start=owner < 0)
        return case.without(case.places[chosen])

    groups = [[key] for key in ranked[:ALONE]] + [ranked[:n] for n in TOGETHER if n <= len(ranked)]
    lost = [(case.clean - value) / whole for value in measure([without(group) for group in groups])]
    alone = len(ranked[:ALONE])
    return {
        "heads": [f"L{layer}H{head}" for layer, head in ranked[:ALONE]],
        "alone": lost[:alone],
        "together": dict(zip(map(str, TOGETHER), lost[alone:], strict=False)),
    }


# -- all of them -------------------------------------------------------------------------------------------------


def costs(model: headtrace.Model) -> Iterator[dict[str, Any]]:
    """Processor time over that of a forward pass on one prompt, and the peak memory of the process: row by row."""
    tracer, ids = headtrace.Tracer(model), model.to_ids(PROMPT)

    def traced(**options: Any) -> Circuit:
        return tracer.trace(PROMPT, " Mary", " John", **options)

    def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
        start = time.process_time()
        done = work()
        return time.process_time() - start, done

    forward = min(seconds(lambda: model.end_logits([ids]))[0] for _ in range(3))
    loaded = _peak()
    asked: dict[str, Callable[[], Any]] = {
        "trace": traced,
        "complete": lambda: traced(paths="complete"),
        "difference": lambda: traced(paths="difference", counterfactual=OTHER),
        "why, the other prompt given": lambda: headtrace.why(model, PROMPT, " Mary", " John", OTHER),
        "verify, no edges": lambda: headtrace.verify(traced(), model, edges="none"),
    }
    rows: dict[str, Any] = {}
    traced()  # decompositions of heads are made once and kept on disk
    for name, work in asked.items():
        took, _ = seconds(work)
        rows[name] = {"forward passes": took / forward, "peak GB": _peak()}
        yield {"tokens": len(ids), "forward, seconds": forward, "loaded, GB": loaded, "rows": rows}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def results(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By model and set: medians with 95 % intervals."""
    found: dict[str, Any] = {}
    for model, name in itertools.product(dict.fromkeys(row["model"] for row in rows), SETS):
        own = [row for row in rows if (row["model"], row["set"]) == (model, name)]
        if not own:
            continue
        roles = Counter(role for row in own for role in {step["role"] for step in row["steps"]})
        worst = [
            max(zip(row["damage"]["alone"], row["damage"]["heads"], strict=True), default=(0.0, "none"))
            for row in own
        ]
        channels = [count for row in own for count in row["channels"]]
        found.setdefault(model, {})[name] = {
            "prompts": len(own),
            "largest identity error": max(row["identity error"] or 0.0 for row in own),
            "heads": median_interval([row["heads"] for row in own]),
            "steps": median(len(row["steps"]) for row in own),
            "roles": {role: count / len(own) for role, count in roles.most_common()},
            "most damage by one head": median_interval([lost for lost, _ in worst]),
            "that head": Counter(head for _, head in worst).most_common(3),
            "together": {
                n: median_interval(values)
                for n in map(str, TOGETHER)
                if (values := [row["damage"]["together"][n] for row in own if n in row["damage"]["together"]])
            },
            "channels": {
                "signals": len(channels),
                "median": median(channels),
                "one": share_interval([[c == 1 for c in row["channels"]] for row in own]),
            }
            if channels
            else None,
            "attention to the first token": share_interval([[row["sink"]] for row in own]),
            "heads that rest on it": share_interval([[row["sink heads"]] for row in own]),
        }
    return found


def share_interval(values: Sequence[Sequence[float]]) -> dict[str, float]:
    """The mean over all values of all prompts, and a 95 % interval from drawing prompts again."""
    sums = np.array([[sum(each), len(each)] for each in values if each], dtype=np.float64)
    drawn = sums[np.random.default_rng(0).integers(0, len(sums), (RESAMPLES, len(sums)))].sum(1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
    return {"mean": float(sums[:, 0].sum() / sums[:, 1].sum()), "low": float(low), "high": float(high)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=10, help="of each set")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--costs", action="store_true", help="measure costs instead")
    parser.add_argument("--report", action="store_true", help="only the tables of what was measured")
    parser.add_argument("--out", type=Path, default=Path("build/three"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "rows.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if options.costs:
        for said in costs(headtrace.load(options.model)):
            (options.out / f"costs-{options.model}.json").write_text(json.dumps(said, indent=1) + "\n")
            print(json.dumps(said), flush=True)
        return
    if not options.report:
        tracer = headtrace.Tracer(headtrace.load(options.model))
        known = {(row["model"], row["id"]) for row in done}
        streams = {name: asked_of(tracer.model, name) for name in options.sets.split(",")}
        with file.open("a") as out:
            for _, (name, stream) in itertools.product(range(options.prompts), streams.items()):
                asked = next(stream, None)
                if asked is None or (options.model, asked.id) in known:
                    continue
                row = {"model": options.model, "set": name, "id": asked.id, **measured(tracer, asked)}
                done.append(row)
                out.write(json.dumps(row) + "\n")
                out.flush()
                print(asked.id, row["heads"], row["damage"], flush=True)
    found = results(done)
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
