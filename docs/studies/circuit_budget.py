"""How much of a content or complete circuit is worth keeping: sufficiency against size, budget by budget.

    python docs/studies/circuit_budget.py --out build/budget

For each budget (the least share of the root's whole that a node needs to be expanded) and each kind of circuit: its
firings, nodes and edges, and its sufficiency at its own size, medians over prompts. The default budget is where more
adds next to nothing. About half a minute per prompt of SmolLM2-135M on one core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

import headtrace
from headtrace.causal.patching import measure, ranked_firings
from headtrace.causal.sufficiency import open_case
from headtrace.tasks import TASKS, load_task

BUDGETS = (0.1, 0.05, 0.03, 0.02, 0.01, 0.005)


def examine(
    model: headtrace.Model, example: Any, other: tuple[int, ...], task: str, budgets: Sequence[float]
) -> list[dict[str, Any]]:
    """All circuits of one prompt, and what each is enough for, measured in one batch of copies."""
    circuits = [
        (paths, budget, headtrace.Tracer(model, min_influence=budget).trace(example, paths=paths))
        for paths in ("content", "complete")
        for budget in budgets
    ]
    circuits.append(("attention", 0.0, headtrace.Tracer(model).trace(example)))
    case, floor = open_case(circuits[0][2], model, other, "counterfactual")
    kept = [case.places_of(ranked_firings(circuit)) for *_, circuit in circuits]
    values = measure([case.keeping(places) for places in kept])
    return [
        {
            "task": task,
            "prompt": example.id,
            "paths": paths,
            "budget": budget,
            "kept": len(places),
            "firings": sum(node.expanded for node in circuit.heads()),
            "nodes": len(circuit.nodes),
            "edges": len(circuit.edges),
            "sufficiency": (value - floor) / (case.clean - floor),
        }
        for (paths, budget, circuit), places, value in zip(circuits, kept, values, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--tasks", default="ioi:30,greater-than:10,pronoun:10,facts:10", help="task:prompts, ..."
    )
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--out", type=Path, default=Path("build/budget"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = headtrace.load(options.model)
    rows: list[dict[str, Any]] = []
    for each in options.tasks.split(","):
        task, number = each.split(":")
        per_cell = max(1, -(-int(number) // TASKS[task].n_cells))
        examples = load_task(task, model.tokenizer, n_per_cell=per_cell).examples
        in_turn = [one for turn in range(per_cell) for one in examples[turn::per_cell]]
        for example in in_turn[: int(number)]:
            other = TASKS[task].counterfactual(example, model.tokenizer, TASKS[task].kinds[0])
            if other is None:
                continue
            try:
                rows += examine(model, example, other.token_ids, task, options.budgets)
            except headtrace.errors.InputError as error:
                print(f"{example.id}: {error}", flush=True)
        pl.DataFrame(rows).write_parquet(options.out / "budget.parquet")  # so far
    table = pl.DataFrame(rows)
    numbers = ["kept", "firings", "nodes", "edges", "sufficiency"]
    medians = table.group_by("task", "paths", "budget", maintain_order=True).agg(
        pl.len().alias("prompts"), *(pl.col(name).median() for name in numbers)
    )
    (options.out / "budget.json").write_text(json.dumps(medians.to_dicts(), indent=1) + "\n")
    with pl.Config(tbl_rows=-1, tbl_cols=-1):
        print(medians)


if __name__ == "__main__":
    main()
