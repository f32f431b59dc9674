"""The study of families: cluster maps at three grains, agreement, stability, ablation, signals.

    python docs/studies/families.py --run runs/ioi --out build/families
    python docs/studies/families.py --model builtin --task ioi --n-per-cell 100 --out build/families

A run folder is read as it is; without one, the prompts of a task are traced first. ``results.json`` holds every number,
``results.md`` the same as tables.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from authors import against_chance

import headtrace
from headtrace.cli.output import plain
from headtrace.errors import InputError
from headtrace.families import Families, Population, find_families
from headtrace.families.clustering import square
from headtrace.families.files import population_of
from headtrace.families.population import GRAINS
from headtrace.tasks import load_task


def traced(model: headtrace.Model, task: str, per_cell: int, batch: int = 200) -> Population:
    """Circuits of a task's prompts, with their labels and roles."""
    examples = load_task(task, model.tokenizer, n_per_cell=per_cell).examples
    tracer = headtrace.Tracer(model)
    circuits = [
        c
        for start in range(0, len(examples), batch)
        for c in tracer.trace_batch(examples[start : start + batch])
    ]
    labels, roles = [e.labels for e in examples], [e.roles for e in examples]
    return Population.of(circuits, labels, roles, [f"{e.id}/{i}" for i, e in enumerate(examples)])


def told(families: Families) -> dict[str, Any]:
    """Everything that is said about the families of one grain, without who is in which."""
    kept = families.file.to_dict()
    for name in ("labels", "left_out", "schema"):
        kept.pop(name)
    kept["exclusive"] = {f: rows[:12] for f, rows in kept["exclusive"].items()}
    texts = {f: families.population.circuit(id).prompt.text for f, id in families.representatives.items()}
    return kept | {"representative_texts": texts}


def explained_by(families: Families) -> dict[str, dict[str, float]]:
    """Which share of the squared distances each label explains, and the name that is the answer.

    Beside labels that are permuted among prompts of one order (for the order: among those of one form). No clusters
    are needed: labels can explain a part of the distances of circuits that are one family.
    """
    population = families.population
    roots = [population.circuit(id).root for id in population.ids]
    names = ["/".join(getattr(root, "answer_tokens", None) or ()) for root in roots]
    labels = {name: population.column(name).to_list() for name in population.labels.columns} | {"name": names}
    within = {name: labels.get("form" if name == "order" else "order", [""] * len(names)) for name in labels}
    squared = square(families.sets.matrix).astype(np.float64) ** 2
    return {name: against_chance(squared, labels[name], within[name]) for name in labels}


def signals_between(families: Families, model: headtrace.Model, most: int, out: Path) -> dict[str, Any]:
    """What heads read in the two largest families."""
    sides = [families.circuits(f, most) for f in (1, 2)]
    found = headtrace.compare_signals(sides[0], sides[1], model, names=("family 1", "family 2"))
    found.save(out)
    return found.to_dict()


def signals_by_label(run: str, label: str, model: headtrace.Model, most: int, out: Path) -> dict[str, Any]:
    """What heads read in the prompts of the two commonest values of a label, spread evenly over each."""
    opened = headtrace.open_run(run)
    done = opened.prompts.filter(pl.col("status") == "done").sort("index").collect()
    column = f"label:{label}"
    values = sorted(done[column].value_counts(sort=True)[column][:2].to_list())
    ids = [done.filter(pl.col(column) == value)["id"].to_list() for value in values]
    sides = [[opened.circuit(id) for id in each[:: max(1, len(each) // most)][:most]] for each in ids]
    found = headtrace.compare_signals(sides[0], sides[1], model, names=(values[0], values[1]))
    found.save(out)
    return found.to_dict()


def study(families: Families, model: headtrace.Model | None, prompts: int, out: Path) -> dict[str, Any]:
    """One grain: figures, numbers, and with a model the ablation of exclusive edges and the signals."""
    results: dict[str, Any] = {"explained": explained_by(families)}
    if model is not None and families.n > 1:
        try:
            families = families.with_ablation(families.ablate_exclusive(model, prompts=prompts))
        except InputError as error:  # no family has an edge of its own: a result
            results["no_ablation"] = str(error)
        results["signals"] = signals_between(families, model, prompts, out)
    families.save(out)
    return told(families) | results


def markdown(results: dict[str, Any]) -> str:
    """The numbers of all grains as tables."""
    lines = [
        "| grain | families | sizes | silhouette (chance) | stability | agreement (ARI, p) |",
        "|---|---|---|---|---|---|",
    ]
    for grain, found in results["grains"].items():
        sizes = ", ".join(str(size) for size in found["sizes"].values())
        cuts = sorted(found["choice"]["cuts"], key=lambda row: row["silhouette"])
        # One family is no cut: the best of those that did not pass is shown, and into how many it is.
        cut = next((row for row in cuts if row["n"] == found["n"]), cuts[-1] if cuts else None)
        control = found["choice"].get("control")
        many = "" if cut is None or cut["n"] == found["n"] else f" with {cut['n']}"
        shown = "" if cut is None or control is None else f"{cut['silhouette']:.3f}{many} ({control:.3f})"
        agreed = "; ".join(f"{name} {a['ari']:.3f}, {a['p']:.3g}" for name, a in found["agreement"].items())
        lines.append(
            f"| {grain} | {found['n']} | {sizes} | {shown} | {found['stability']['mean']:.2f} | {agreed} |"
        )
    lines += ["", "| grain | label | share explained (chance) | p |", "|---|---|---|---|"]
    for grain, found in results["grains"].items():
        for name, said in found["explained"].items():
            share = f"{said['share']:.3f} ({said['by chance']:.3f})"
            lines.append(f"| {grain} | {name} | {share} | {said['p']:.3g} |")
    lines += ["", "| grain | edges of | exclusive edges | own minus others' (95 %) |", "|---|---|---|---|"]
    for grain, found in results["grains"].items():
        for row in found.get("ablation", {}).get("contrasts", []):
            low, high = row["difference_low"], row["difference_high"]
            interval = "" if low is None else f" ({low:.2f} to {high:.2f})"
            lines.append(
                f"| {grain} | {row['edges_of']} | {row['edges']} | {row['difference']:.2f}{interval} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", help="a run folder; without one, prompts are traced")
    parser.add_argument("--model", default=None, help="default: the run's model, or builtin")
    parser.add_argument("--task", default="ioi")
    parser.add_argument("--n-per-cell", type=int, default=10)
    parser.add_argument(
        "--prompts", type=int, default=40, help="prompts of each family to ablate on and to compare"
    )
    parser.add_argument("--n", type=int, help="as many families; without, as many as the rule finds")
    parser.add_argument("--label", help="also compare signals between the values of a label of the run")
    parser.add_argument("--no-model", action="store_true", help="leave out what needs the model")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    model = None
    if asked.run is None:
        model = headtrace.load(asked.model or "builtin")
        population = traced(model, asked.task, asked.n_per_cell)
    else:
        population = population_of(asked.run)
    if model is None and not asked.no_model:
        model = headtrace.load(asked.model or population.model.name)
    results: dict[str, Any] = {
        "circuits": len(population),
        "left_out": len(population.left_out),
        "grains": {},
    }
    for grain in GRAINS:
        start = time.perf_counter()
        found = find_families(population, grain, n=asked.n)
        seconds = time.perf_counter() - start
        print(f"{grain}: {found} in {seconds:.1f} s: {found.choice}", flush=True)
        chosen = None if asked.no_model else model
        results["grains"][grain] = study(found, chosen, asked.prompts, asked.out / grain) | {
            "seconds": seconds
        }
    if asked.label is not None and asked.run is not None and model is not None:
        results["signals_by_label"] = signals_by_label(
            asked.run, asked.label, model, asked.prompts, asked.out / asked.label
        )
    (asked.out / "results.json").write_text(json.dumps(plain(results), indent=1) + "\n")
    (asked.out / "results.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
