"""Difference circuits: are they enough, do flows agree with patches, can the model find what to compare with?

    python docs/studies/differences.py --rounds 25 --out build/differences
    python docs/studies/differences.py --report --out build/differences

Prompts of five tasks that the model answers rightly and that have a counterfactual made by hand, task by task in turn.
For each, on the hand-made pair: sufficiency of head components by difference flow, traced with that pair and with
prompts that the model found itself, beside attribution patching and integrated gradients; the same with 10 and 20
components on the model's own pair; for the first prompts, flow against measured effect of the twenty heads with most
flow; whether some change flips the answer, and how natural it is. A prompt is a line of rows.jsonl, written when it is
done: the study goes on where it was stopped. About ten seconds per prompt of SmolLM2-135M on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from sufficiency import median_interval

import headtrace
from headtrace.causal.bench import GRADIENTS
from headtrace.causal.patching import (
    ComponentRanking,
    PatchingCase,
    as_given,
    by_score,
    measure,
)
from headtrace.causal.sufficiency import SHOWN, measured_curves, patching_case
from headtrace.circuits import Circuit, ComparedPrompt
from headtrace.roots import Root
from headtrace.tasks import TASKS, load_task
from headtrace.tracing.difference_circuit import PairFlow, PromptPair, trace_pairs

TASK_NAMES = ("ioi", "greater-than", "pronoun", "facts", "agreement")
FRAMES = (
    "The {} to the cabinet",
    "The {} near the garden",
    "The {} of the company",
    "The {} beside the road",
    "The {} behind the house",
)
NOUNS = (("key", "keys"), ("dog", "dogs"), ("manager", "managers"), ("tree", "trees"), ("car", "cars"))
"""Agreement: subjects in singular and plural; *is* or *are* follows."""
PATCHED, HEADS = 10, 20
"""Prompts of each task, and heads of each, whose flow is compared with a patch."""


@dataclass(frozen=True)
class Asked:
    """A prompt, its answers, and the counterfactual prompt that was made by hand."""

    id: str
    ids: list[int]
    answer: tuple[int, ...]
    wrong: tuple[int, ...]
    by_hand: list[int]


def prompts(model: headtrace.Model, task: str) -> Iterator[Asked]:
    """Prompts of a task that are answered rightly, those of every cell in turn."""
    for asked in _all_prompts(model, task):
        logits = model.end_logits([asked.ids])[0]
        right = logits[list(asked.answer)].mean() > logits[list(asked.wrong)].mean()
        if right and len(asked.by_hand) == len(asked.ids):
            yield asked


def _all_prompts(model: headtrace.Model, task: str) -> Iterator[Asked]:
    if task == "agreement":
        is_, are = (model.token_id(word) for word in (" is", " are"))
        for number, (pair, frame) in enumerate(itertools.product(NOUNS, FRAMES)):
            one, many = (model.to_ids(frame.format(noun)) for noun in pair)
            yield Asked(f"{task}/{number}/one", one, (is_,), (are,), many)
            yield Asked(f"{task}/{number}/many", many, (are,), (is_,), one)
        return
    per_cell = max(1, -(-120 // TASKS[task].n_cells))
    examples = load_task(task, model.tokenizer, n_per_cell=per_cell).examples
    for turn in range(per_cell):
        for place, example in enumerate(examples[turn::per_cell]):
            other = TASKS[task].counterfactual(example, model.tokenizer)
            if other is not None:
                yield Asked(
                    f"{task}/{turn}/{place}",
                    list(example.token_ids),
                    tuple(example.answer_ids),
                    tuple(example.wrong_ids),
                    list(other.token_ids),
                )


def log_likelihood(model: headtrace.Model, ids: list[int]) -> float:
    logits = model.record([ids], keep=()).logits[0, :-1].log_softmax(-1)
    return float(logits.gather(-1, torch.tensor(ids[1:], device=logits.device)[:, None]).sum())


# -- one prompt ------------------------------------------------------------------------------------------------


def measured(tracer: headtrace.Tracer, asked: Asked, patched: bool) -> dict[str, Any]:
    """Everything about one prompt."""
    model, answer, wrong = tracer.model, list(asked.answer), list(asked.wrong)
    start = time.process_time()
    model.end_logits([asked.ids])
    forward = time.process_time() - start
    start = time.process_time()
    found = headtrace.importance(model, asked.ids, answer, wrong)
    searched = time.process_time() - start
    best = found.flips[0] if found.flips else None
    row: dict[str, Any] = {
        "search": {
            "changes": len(found.measured.changes),
            "passes": searched / forward,
            "flips": len(found.flips),
            "words": None if best is None else 1 + best.before.count(" + "),
            "naturalness": None if best is None else best.naturalness,
            "by_hand": log_likelihood(model, asked.by_hand) - log_likelihood(model, asked.ids),
        }
    }
    own = tracer.trace(asked.ids, answer, wrong, paths="difference", counterfactual=[asked.by_hand])
    recording = model.record([asked.ids])
    case, other = patching_case(recording, own.root, asked.by_hand)
    by_model = flows_against(case, own.root, [list(change.ids) for change in found.counterfactuals])
    orders = {
        "difference": by_flow(case, flows_against(case, own.root, [asked.by_hand])),
        "difference, automatic": by_flow(case, by_model),
        **{name: rank(case) for name, rank in GRADIENTS.items()},
    }
    curves, _ = measured_curves(case, other, [([order], (0, *SHOWN)) for order in orders.values()])
    row["circuit"] = as_given(case, own).own
    row["by hand"] = {
        name: {**{f"at {n}": curve.at(n) for n in SHOWN}, "cpr": curve.cpr, "cmd": curve.cmd}
        for name, curve in zip(orders, curves, strict=True)
    }
    row["by model"] = on_own_pair(case, own.root, by_model[:1])
    if patched:
        row["patches"] = against_patches(case, own)
    return row


def flows_against(case: PatchingCase, root: Root, others: Sequence[list[int]]) -> list[PairFlow]:
    """The flows between a prompt and each of some others."""
    ids = case.recording.token_ids[0].tolist()
    return trace_pairs(
        case.model, [PromptPair(ids, each, root, ComparedPrompt(None, tuple(each), 0.0)) for each in others]
    )


def by_flow(case: PatchingCase, flows: Sequence[PairFlow]) -> ComponentRanking:
    """All head components by flow, the mean over pairs: a circuit has the first of them."""
    total = torch.zeros(case.shape)
    for each in flows:
        sign = 1.0 if each.value > each.other_value else -1.0
        layers = [each.flow.heads(layer) for layer in range(case.model.n_layers)]
        total += sign * torch.stack([layer.flow[each.prompt] for layer in layers])
    return by_score(case, total.flatten()[case.places])


def on_own_pair(hand_made: PatchingCase, root: Root, flows: Sequence[PairFlow]) -> dict[str, Any]:
    """The same rankings where the counterfactual that they are measured with is the model's own find."""
    case, value = patching_case(hand_made.recording, root, list(flows[0].compared.token_ids))
    orders = {"difference": by_flow(case, flows), **{name: rank(case) for name, rank in GRADIENTS.items()}}
    sizes = (10, 20)
    values = iter(measure([case.keeping(order.first(n)) for order in orders.values() for n in sizes]))
    return {
        name: {f"at {n}": (next(values) - value) / (case.clean - value) for n in sizes} for name in orders
    }


def against_patches(case: PatchingCase, circuit: Circuit) -> dict[str, Any]:
    """Flow of the heads with most flow, and the loss when each alone takes what it had in the other run."""
    assert circuit.difference is not None
    heads = sorted(circuit.heads(), key=lambda node: -abs(node.flow or 0.0))[:HEADS]
    values = measure([case.without(case.places_of([node.site.firing])) for node in heads])
    return {
        "change": circuit.difference.change,
        "flow": [node.flow for node in heads],
        "measured": [case.clean - value for value in values],
    }


# -- all of them -------------------------------------------------------------------------------------------------


def results(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over prompts with 95 % intervals, task by task."""
    found: dict[str, Any] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        searches = [row["search"] for row in own]
        natural = [each["naturalness"] for each in searches if each["naturalness"] is not None]
        found[task] = {
            "prompts": len(own),
            "with a flip": sum(each["flips"] > 0 for each in searches),
            "by one word": sum(each["words"] == 1 for each in searches),
            "changed prompts": median(each["changes"] for each in searches),
            "search, forward passes": median(each["passes"] for each in searches),
            "naturalness": median_interval(natural) if natural else None,
            "naturalness by hand": median_interval([each["by_hand"] for each in searches]),
            **{
                pair: {
                    method: {
                        name: median_interval([row[pair][method][name] for row in own])
                        for name in own[0][pair][method]
                    }
                    for method in own[0][pair]
                }
                for pair in ("by hand", "by model")
            },
            "prompt by prompt": {
                f"{ours} less {theirs}, {size}": median_interval(
                    [row["by hand"][ours][size] - row["by hand"][theirs][size] for row in own]
                )
                for ours in ("difference", "difference, automatic")
                for theirs in GRADIENTS
                for size in ("at 10", "at 20")
            },
            "heads of the circuit": median(row["circuit"] for row in own),
            "patches": agreement_with_patches([row["patches"] for row in own if "patches" in row]),
        }
    return found


def agreement_with_patches(patches: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Correlation of flow and measured effect within each prompt, and the median residual as a share of J - J'."""
    pairs = [(torch.tensor([p["flow"], p["measured"]], dtype=torch.float64), p["change"]) for p in patches]
    pairs = [(pair, change) for pair, change in pairs if pair.shape[1] > 2]
    if not pairs:
        return None
    ranked = [pair.argsort(1).argsort(1).double() for pair, _ in pairs]
    return {
        "prompts": len(pairs),
        "correlation": median_interval([float(torch.corrcoef(pair)[0, 1]) for pair, _ in pairs]),
        "rank correlation": median_interval([float(torch.corrcoef(pair)[0, 1]) for pair in ranked]),
        "residual": median_interval(
            [float((pair[1] - pair[0]).abs().median()) / abs(change) for pair, change in pairs]
        ),
    }


def show(found: Mapping[str, Any]) -> None:
    def cell(value: Mapping[str, float] | None) -> str:
        return "" if value is None else f"{value['median']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"

    for task, each in found.items():
        print(f"\n{task}: {each['prompts']} prompts, {each['with a flip']} with a flip")
        for pair in ("by hand", "by model"):
            for method, numbers in each[pair].items():
                print(f"| {pair} | {method} | " + " | ".join(map(cell, numbers.values())) + " |")
        print("prompt by prompt:", {name: cell(value) for name, value in each["prompt by prompt"].items()})
        said = each["patches"] or {}
        print("patches:", {name: cell(value) for name, value in said.items() if name != "prompts"})
        print("naturalness:", cell(each["naturalness"]), "by hand", cell(each["naturalness by hand"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", default=",".join(TASK_NAMES))
    parser.add_argument("--rounds", type=int, default=50, help="prompts of each task; of IOI twice as many")
    parser.add_argument("--report", action="store_true", help="only the tables of what was measured")
    parser.add_argument("--out", type=Path, default=Path("build/differences"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "rows.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not options.report:
        model = headtrace.load(options.model)
        tracer, known = headtrace.Tracer(model), {row["id"] for row in done}
        tasks = options.tasks.split(",")
        streams = {task: prompts(model, task) for task in tasks}
        with file.open("a") as out:
            for number in range(options.rounds):
                for task in (*tasks, *({"ioi"} & {*tasks})):
                    asked = next(streams[task], None)
                    if asked is None or asked.id in known:
                        continue
                    try:
                        row = measured(tracer, asked, patched=number < PATCHED)
                    except headtrace.errors.InputError as error:  # a metric that does not change
                        print(f"{asked.id}: {error}", flush=True)
                        continue
                    done.append({"task": task, "id": asked.id, **row})
                    out.write(json.dumps(done[-1]) + "\n")
                    out.flush()
                    print(asked.id, row["search"], flush=True)
    found = results(done)
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    main()
