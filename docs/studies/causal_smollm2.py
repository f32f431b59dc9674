"""The causal study: ten IOI prompts on SmolLM2-135M. Writes tables, figures and results.json.

    python docs/studies/causal_smollm2.py --out build/causal

Takes about ten minutes on two cores. Figures can be drawn again from the tables with --redraw.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import polars as pl
from study_figures import faithfulness_panels

import headtrace
from headtrace.causal.experiments import (
    Additivity,
    EdgesIntoHead,
    ResidualChanges,
    SingleEdges,
    edge_pairs,
    edges_into_head,
    residual_changes,
    single_edges,
)
from headtrace.causal.faithfulness import faithfulness
from headtrace.circuits import Circuit
from headtrace.tasks import load_task

MODEL, PROMPTS, EDGES, CONTROLS = "smollm2-135m", 10, "random:20", 8
METRIC = "logit difference"
HEAD = "L20H0"
WAYS = (
    ("zero", "component", "keep"),
    ("mean", "component", "keep"),
    ("mean", "position", "keep"),
    ("mean", "head", "keep"),
    ("mean", "component", "ablate"),
)


def trace(model: headtrace.Model) -> tuple[list[Circuit], int]:
    """Circuits of the first prompts (one per form and order) that the model answers rightly; how many it does not."""
    tracer, circuits, wrong = headtrace.Tracer(model), [], 0
    for example in load_task("ioi", model.tokenizer, n_per_cell=1):
        circuit = tracer.trace(list(example.token_ids), list(example.answer_ids), list(example.wrong_ids))
        if circuit.reason or (circuit.root.value or 0) <= 0:
            wrong += 1
            continue
        circuits.append(circuit)
        if len(circuits) == PROMPTS:
            break
    return circuits, wrong


def predictions(circuits: list[Circuit], model: headtrace.Model) -> pl.DataFrame:
    parts = [
        headtrace.verify(circuit, model, edges="none").firings.with_columns(pl.lit(i).alias("circuit"))
        for i, circuit in enumerate(circuits)
    ]
    return pl.concat(parts)


def faithful(circuits: list[Circuit], model: headtrace.Model) -> pl.DataFrame:
    others = load_task("ioi", model.tokenizer, n_per_cell=1, seed=1)
    reference = model.record([list(e.token_ids) for e in others])
    rows: list[pl.DataFrame] = []
    for ablation, unit, mlps in WAYS:
        for i, circuit in enumerate(circuits):
            how: Any = {"ablation": ablation, "unit": unit, "mlps": mlps}
            found = faithfulness(circuit, model, reference=reference if ablation == "mean" else None, **how)
            labels = {
                "way": f"{ablation}, {unit}, MLPs {'kept' if mlps == 'keep' else 'ablated'}",
                "circuit": i,
            }
            ends = {"full": found.full, "empty": found.empty, "without": found.without, "total": found.total}
            ends |= {"without_random": found.without_random, "without_matched": found.without_matched}
            rows.append(found.curve.with_columns(**{k: pl.lit(v) for k, v in (labels | ends).items()}))
    return pl.concat(rows)


def measure(out: Path) -> None:
    model = headtrace.load(MODEL)
    circuits, wrong = trace(model)
    for number, circuit in enumerate(circuits):
        circuit.save(out / f"circuit-{number}.json")
    (out / "prompts.json").write_text(
        json.dumps(
            {
                "wrong": wrong,
                "edges": [len(c.edges) for c in circuits],
                "prompts": [list(c.prompt.tokens) for c in circuits],
            }
        )
    )
    predictions(circuits, model).write_parquet(out / "predictions.parquet")
    print("predictions", flush=True)
    single_edges(
        circuits,
        model,
        edges=EDGES,
        controls=CONTROLS,
        progress=lambda i, n: print(f"edges {i}/{n}", flush=True),
    ).table.write_parquet(out / "single.parquet")
    faithful(circuits, model).write_parquet(out / "faithfulness.parquet")
    print("faithfulness", flush=True)
    edge_pairs(circuits, model, pairs=10).table.write_parquet(out / "pairs.parquet")
    print("pairs", flush=True)
    heads = [n.name.split(" ")[0] for c in circuits for n in c.heads() if n.expanded]
    head = HEAD if HEAD in heads else max(sorted(set(heads)), key=heads.count)
    (out / "head.txt").write_text(head)
    edges_into_head(circuits, model, head).table.write_parquet(out / "head.parquet")
    residual_changes(circuits, model).table.write_parquet(out / "residual.parquet")


def draw(out: Path) -> dict[str, Any]:
    def read(name: str) -> pl.DataFrame:
        return pl.read_parquet(out / f"{name}.parquet")

    single, pairs = SingleEdges(read("single"), METRIC), Additivity(read("pairs"), METRIC)
    into = EdgesIntoHead((out / "head.txt").read_text(), read("head"), METRIC)
    residual, kept = ResidualChanges(read("residual")), read("faithfulness")
    single.plot(out / "causal-violins.png")
    pairs.plot(out / "causal-additivity.png")
    into.plot(out / "causal-edges-into-head.png")
    residual.plot(out / "causal-residual.png")
    faithfulness_panels(kept, METRIC, out / "causal-faithfulness.png")
    errors = read("predictions")["error"]
    last = kept.filter(pl.col("firings") == pl.col("firings").max().over("way", "circuit"))
    ends = last.group_by("way", maintain_order=True).agg(
        *(
            pl.col(c).mean()
            for c in (
                "full",
                "empty",
                "metric",
                "without",
                "without_random",
                "without_matched",
                "kept",
                "total",
            )
        ),
        pl.col("faithfulness").mean(),
        pl.col("faithfulness").median().alias("faithfulness_median"),
        pl.col("faithfulness").min().alias("faithfulness_min"),
        pl.col("faithfulness").max().alias("faithfulness_max"),
        pl.col("random").mean(),
    )
    return {
        "predictions": {"n": len(errors), "median": errors.median(), "max": errors.max()},
        "edges": read("single").filter(reach="local", action="ablate", measure="attention").height,
        "claimed_and_random": single.comparisons().to_dicts(),
        "additivity": pairs.summary().to_dicts(),
        "edges_into_head": {"head": into.head, "correlations": into.correlations().to_dicts()},
        "residual": residual.quantiles().to_dicts(),
        "faithfulness": ends.to_dicts(),
        "prompts": json.loads((out / "prompts.json").read_text()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/causal"))
    parser.add_argument(
        "--redraw", action="store_true", help="draw the figures from the tables of an earlier run"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.redraw:
        measure(options.out)
    results = draw(options.out)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({k: v for k, v in results.items() if k != "prompts"}, indent=1))


if __name__ == "__main__":
    main()
