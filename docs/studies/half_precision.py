"""Circuits of a model in half precision against those of the same weights in float32.

    python docs/studies/half_precision.py --prompts 30 --out build/half_precision.json

The weights are those that half precision can hold, raised to float32 for the comparison, so that only the arithmetic
differs. Reported: the share of edges that both circuits have (Jaccard), of the ten strongest edges of the float32
circuit that the other has, of channels on shared edges, how far shared weights lie apart, and what rounding added per
layer.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from statistics import mean, median

import torch

import headtrace
from headtrace.circuits import Circuit, Edge
from headtrace.tasks import load_task

STRONGEST = 10
Name = tuple[str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    base = headtrace.load(options.model)
    examples = load_task("ioi", base.tokenizer, n_per_cell=1).examples
    examples = examples[:: max(1, len(examples) // options.prompts)][: options.prompts]
    found = {"model": options.model, "prompts": len(examples)}
    for dtype in (torch.bfloat16, torch.float16):
        hf = copy.deepcopy(base.hf).to(dtype)
        half = headtrace.load(hf, tokenizer=base.tokenizer)
        full = headtrace.load(copy.deepcopy(hf).float(), tokenizer=base.tokenizer)
        pairs = [(headtrace.Tracer(m).trace_batch(examples)) for m in (half, full)]
        compared = [compare(a, b) for a, b in zip(*pairs, strict=True) if a.edges and b.edges]
        found[half.own_dtype] = summary(compared, pairs[0], half, [e.text for e in examples[:4]])
        print(json.dumps({half.own_dtype: found[half.own_dtype]}, indent=1), flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1))


def named(circuit: Circuit) -> dict[Name, Edge]:
    """Edges by the names of what they join; rounding is a component of one of the two only."""
    return {
        (circuit.node(e.source).name, circuit.node(e.target).name, e.side): e
        for e in circuit.edges
        if circuit.node(e.source).kind != "rounding"
    }


def compare(half: Circuit, full: Circuit) -> dict[str, float]:
    a, b = named(half), named(full)
    shared = sorted(a.keys() & b.keys())
    flows = full.flows()
    strongest = sorted(b, key=lambda name: -flows[b[name]])[:STRONGEST]
    channels = [(set(a[n].channels or ()), set(b[n].channels or ())) for n in shared if b[n].channels]
    return {
        "edges": len(shared) / len(a.keys() | b.keys()),
        "strongest": len([name for name in strongest if name in a]) / len(strongest),
        "channels": mean(len(x & y) / len(x | y) for x, y in channels) if channels else 1.0,
        "weights": median(abs(a[n].weight - b[n].weight) / max(abs(b[n].weight), 1e-9) for n in shared),
    }


def summary(
    compared: list[dict[str, float]], circuits: list[Circuit], model: headtrace.Model, prompts: list[str]
) -> dict[str, object]:
    values = {key: [each[key] for each in compared] for key in compared[0]}
    reports = [model.record(prompt).check() for prompt in prompts]
    layers = [
        {
            "worst": max(r.rounding[l].worst for r in reports),
            "median": median(r.rounding[l].median for r in reports),
        }
        for l in range(model.n_layers)
    ]
    heads = [node for circuit in circuits for node in circuit.nodes if node.expanded and node.kind == "head"]
    return {
        "compared": len(compared),
        **{key: {"mean": mean(v), "least": min(v), "most": max(v)} for key, v in values.items()},
        "rounding among causes": sum(n.kind == "rounding" for c in circuits for n in c.nodes),
        "firings that rest on rounding": sum(node.rounding is not None for node in heads) / len(heads),
        "rounding": layers,
    }


if __name__ == "__main__":
    main()
