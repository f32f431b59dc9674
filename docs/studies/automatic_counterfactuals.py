"""Counterfactual prompts that the model finds itself: how often one flips the answer, how natural, at which cost.

    python docs/studies/automatic_counterfactuals.py --prompts 10 --out build/automatic

Prompts of five tasks that the model answers rightly. ``naturalness`` is the log-likelihood of the changed prompt less
that of the prompt itself; that of the task's own counterfactual, made by hand, stands beside it. About 3 seconds per
prompt of SmolLM2-135M on one core. Writes results.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

import headtrace
from headtrace.tasks import TASKS, load_task

AGREEMENT = (
    ("The {} to the cabinet", "key", "keys"),
    ("The {} near the garden", "dog", "dogs"),
    ("The {} of the company", "manager", "managers"),
    ("The {} beside the road", "tree", "trees"),
    ("The {} behind the house", "car", "cars"),
)
"""Subjects in singular and plural: *is* or *are* follows."""
Prompt = tuple[list[int], tuple[int, ...], tuple[int, ...], list[int] | None]
"""Token ids, ids of the answer and of the wrong one, and the token ids of the counterfactual that was made by hand."""


def prompts(model: headtrace.Model, task: str, wanted: int) -> Iterator[Prompt]:
    """Prompts of a task, those of every cell in turn."""
    if task == "agreement":
        is_, are = (model.token_id(word) for word in (" is", " are"))
        for frame, one, many in AGREEMENT:
            ids = [model.to_ids(frame.format(word)) for word in (one, many)]
            yield ids[0], (is_,), (are,), ids[1]
            yield ids[1], (are,), (is_,), ids[0]
        return
    per_cell = max(1, -(-3 * wanted // TASKS[task].n_cells))
    examples = load_task(task, model.tokenizer, n_per_cell=per_cell).examples
    for example in (one for turn in range(per_cell) for one in examples[turn::per_cell]):
        other = TASKS[task].counterfactual(example, model.tokenizer)
        by_hand = None if other is None else list(other.token_ids)
        yield list(example.token_ids), tuple(example.answer_ids), tuple(example.wrong_ids), by_hand


def log_likelihood(model: headtrace.Model, ids: list[int]) -> float:
    logits = model.record([ids], keep=()).logits[0, :-1].log_softmax(-1)
    return float(logits.gather(-1, torch.tensor(ids[1:], device=logits.device)[:, None]).sum())


def measured(model: headtrace.Model, prompt: Prompt) -> dict[str, Any]:
    ids, answer, wrong, by_hand = prompt
    found = headtrace.importance(model, ids, list(answer), list(wrong))
    best = found.flips[0] if found.flips else None
    row: dict[str, Any] = {
        "changes": len(found.measured.changes),
        "flips": len(found.flips),
        "change": None if best is None else str(best),
        "words": None if best is None else 1 + best.before.count(" + "),
        "naturalness": None if best is None else best.naturalness,
        "by_hand": None,
    }
    if by_hand is not None and len(by_hand) == len(ids):
        row["by_hand"] = log_likelihood(model, by_hand) - log_likelihood(model, ids)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", default="ioi,greater-than,pronoun,facts,agreement")
    parser.add_argument("--prompts", type=int, default=40, help="of each task")
    parser.add_argument("--out", type=Path, default=Path("build/automatic"))
    options = parser.parse_args()
    model = headtrace.load(options.model)
    rows: list[dict[str, Any]] = []
    for task in options.tasks.split(","):
        used = 0
        for prompt in prompts(model, task, options.prompts):
            logits = model.end_logits([prompt[0]])[0]
            if logits[list(prompt[1])].mean() <= logits[list(prompt[2])].mean():
                continue
            rows.append({"task": task, **measured(model, prompt)})
            print(rows[-1], flush=True)
            used += 1
            if used == options.prompts:
                break
    found: dict[str, Any] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        natural = [row["naturalness"] for row in own if row["naturalness"] is not None]
        by_hand = [row["by_hand"] for row in own if row["by_hand"] is not None]
        found[task] = {
            "prompts": len(own),
            "with a flip": sum(row["flips"] > 0 for row in own),
            "by one word": sum(row["words"] == 1 for row in own),
            "changed prompts (median)": median(row["changes"] for row in own),
            "naturalness (median)": median(natural) if natural else None,
            "made by hand (median)": median(by_hand) if by_hand else None,
        }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps({"tasks": found, "rows": rows}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
