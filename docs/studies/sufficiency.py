"""The table on sufficiency: what is enough, method by method. Writes tables, a figure, results.json.

    python docs/studies/sufficiency.py --out build/sufficiency
    python docs/studies/sufficiency.py --model builtin --tasks ioi:30 --out build/builtin

Prompts of each task are taken from every cell in turn, those that the model answers rightly and that have a
counterfactual of equal length. About 7 seconds per prompt of SmolLM2-135M on one core. A method is a function in
``METHODS``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import headtrace
from headtrace.causal import Curve, Sufficiency, sufficiency
from headtrace.causal.patching import Ranked
from headtrace.causal.sufficiency import SHARES, SHOWN
from headtrace.circuits import Circuit
from headtrace.figures.causal import sufficiency_by_method
from headtrace.tasks import TASKS, Counterfactual, Example, load_task

BASELINES = ("random", "attention", "attribution patching", "integrated gradients")
SIZES = (1, 2, *SHOWN)
RESAMPLES = 4000


@dataclass(frozen=True)
class Asked:
    """One prompt, what stands against it, and the tracer that all methods share."""

    tracer: headtrace.Tracer
    example: Example
    counterfactual: Counterfactual


def attention_circuit(asked: Asked) -> Circuit:
    return asked.tracer.trace(asked.example)


def content_circuit(asked: Asked) -> Circuit:
    return asked.tracer.trace(asked.example, paths="content")


def complete_circuit(asked: Asked) -> Circuit:
    return asked.tracer.trace(asked.example, paths="complete")


def difference_circuit(asked: Asked) -> Circuit:
    """What changed the answer against the task's counterfactual prompt, which all methods are measured with."""
    other = [list(asked.counterfactual.token_ids)]
    return asked.tracer.trace(asked.example, paths="difference", counterfactual=other)


def automatic_difference_circuit(asked: Asked) -> Circuit:
    """The same against prompts that the model finds itself: nobody wrote the counterfactual that it is traced with."""
    return asked.tracer.trace(asked.example, paths="difference", counterfactual="auto")


METHODS: dict[str, Callable[[Asked], Ranked]] = {
    "acc++": attention_circuit,
    "content": content_circuit,
    "complete": complete_circuit,
    "difference": difference_circuit,
    "difference, automatic": automatic_difference_circuit,
}
"""Beside the baselines: a circuit (its heads by falling influence), or head components, most important first."""


def prompts(
    tracer: headtrace.Tracer, task: str, kind: str, wanted: int, counts: dict[str, int]
) -> Iterator[Asked]:
    """The first prompts that can be measured, of every cell in turn; how many were passed over is counted."""
    model = tracer.model
    per_cell = max(1, -(-2 * wanted // TASKS[task].n_cells))
    examples = load_task(task, model.tokenizer, n_per_cell=per_cell).examples
    for example in (one for turn in range(per_cell) for one in examples[turn::per_cell]):
        other = TASKS[task].counterfactual(example, model.tokenizer, kind)
        logits = model.end_logits([example.token_ids])[0]
        right, wrong = (logits[list(ids)].mean() for ids in (example.answer_ids, example.wrong_ids))
        reason = "no counterfactual" if other is None else "answered wrongly" if right <= wrong else "used"
        counts[reason] = counts.get(reason, 0) + 1
        if other is not None and reason == "used":
            yield Asked(tracer, example, other)
        if counts.get("used", 0) == wanted:
            return


def measured(asked: Asked, ablation: str) -> Sufficiency:
    found = {name: method(asked) for name, method in METHODS.items()}
    base = found["acc++"]
    assert isinstance(base, Circuit)
    ids = asked.counterfactual.token_ids if ablation == "counterfactual" else None
    # An empty circuit keeps nothing, which is a result and no reason to leave its prompt out: the others are measured.
    ranking = None if base.heads() else ["L0H0:0:0"]
    how: dict[str, Any] = {"baselines": BASELINES, "compare": found, "ablation": ablation, "draws": 2}
    return sufficiency(base, asked.tracer.model, ids, ranking=ranking, **how)


def row(task: str, asked: Asked, name: str, curve: Curve, found: Sufficiency) -> dict[str, Any]:
    ranked_all = curve.own == len(found.case.places)
    own = len(found.circuit.heads()) if ranked_all else curve.own
    need = found.necessity if name == "acc++" and own else None
    return {
        "task": task,
        "prompt": asked.example.id,
        "method": name,
        **{f"at {n}": curve.at(n) for n in SIZES},
        "own size": own,
        "at own size": curve.at(own),
        "cpr": curve.cpr,
        "cmd": curve.cmd,
        **{f"{100 * s:g} %": value for s, (_, value) in zip(SHARES, curve.continued, strict=True)},
        "loss": None if need is None else need.loss,
        "random loss": None if need is None else need.random_loss,
        "attended loss": None if need is None else need.attended_loss,
        "clean": found.clean,
        "counterfactual": found.counterfactual,
        "total": len(found.case.places),
    }


def measure(options: argparse.Namespace) -> tuple[pl.DataFrame, dict[str, Any]]:
    model = headtrace.load(options.model)
    tracer, rows, passed = headtrace.Tracer(model), [], {}
    for each in options.tasks.split(","):
        task, number, *kinds = each.split(":")
        kind = kinds[0] if kinds else TASKS[task].kinds[0]
        name = f"{task}, {kind}"
        counts = passed[name] = dict[str, int]()
        for asked in prompts(tracer, task, kind, int(number), counts):
            try:
                found = measured(asked, options.ablation)
            except headtrace.errors.InputError as error:  # a metric that does not change
                print(f"{asked.example.id}: {error}", flush=True)
                counts["not measured"] = counts.get("not measured", 0) + 1
                continue
            rows += [row(name, asked, method, curve, found) for method, curve in found.compared.items()]
            print(f"{asked.example.id}: {found!r}", flush=True)
    return pl.DataFrame(rows, infer_schema_length=None), passed


def median_interval(values: list[float]) -> dict[str, float]:
    """The median over prompts, and a 95 % interval from drawing prompts again."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return {"median": float(np.median(values)), "low": float(low), "high": float(high)}


def results(table: pl.DataFrame, passed: dict[str, Any]) -> dict[str, Any]:
    numbers = [*(f"at {n}" for n in SHOWN), "at own size", "own size", "cpr", "cmd", "loss", "random loss"]
    numbers += ["attended loss", *(f"{100 * share:g} %" for share in SHARES)]
    found: dict[str, Any] = {}
    for (task, method), part in table.group_by("task", "method", maintain_order=True):
        values = {name: part[name].drop_nulls().to_list() for name in numbers}
        found.setdefault(str(task), {})[str(method)] = {
            "prompts": part.height,
            **{name: median_interval(each) for name, each in values.items() if each},
        }
    return {"prompts": passed, "medians": found}


def show(found: dict[str, Any]) -> None:
    for task, methods in found["medians"].items():
        print(f"\n{task}: {found['prompts'][task]}")
        names = [*(f"at {n}" for n in SHOWN), "at own size", "cpr", "cmd"]
        print("| ranking | " + " | ".join(names) + " |")
        print("| --- " * (1 + len(names)) + "|")
        for method, numbers in methods.items():
            cells = [f"{n['median']:.2f} [{n['low']:.2f}, {n['high']:.2f}]" for n in map(numbers.get, names)]
            print(f"| {method} | " + " | ".join(cells) + " |")


def draw(table: pl.DataFrame, path: Path) -> None:
    names = {f"at {n}": n for n in SIZES}
    long = table.unpivot(
        list(names),
        index=["task", "prompt", "method"],
        variable_name="components",
        value_name="sufficiency",
    )
    sufficiency_by_method(long.with_columns(pl.col("components").replace_strict(names)), path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--tasks",
        default="ioi:30,greater-than:12,pronoun:12,facts:12",
        help="task:prompts[:kind of counterfactual], ...",
    )
    parser.add_argument("--ablation", default="counterfactual", help="counterfactual, mean or zero")
    parser.add_argument("--out", type=Path, default=Path("build/sufficiency"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    table, passed = measure(options)
    table.write_parquet(options.out / "table.parquet")
    found = results(table, passed)
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(table, options.out / "sufficiency.png")
    show(found)


if __name__ == "__main__":
    main()
