"""What holds up the signals that MLPs wrote: predicted by the trace, measured in the running model.

    python docs/studies/mlp_causes.py --prompts 8 --out build/mlp_causes.json

For every query or key signal of a complete circuit that an MLP wrote, the trace names the components without which less
than half of it is left, and how much. Each is removed from the MLP's input in the model's own forward pass.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median, quantiles

import headtrace
from headtrace.causal.content_checks import share_left
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.tasks import load_task


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = headtrace.load(options.model)
    tracer = headtrace.Tracer(model)
    examples = load_task("ioi", model.tokenizer, n_per_cell=1).examples
    errors, sizes, kinds = list[float](), list[int](), list[str]()
    below = 0
    for example in examples[:: max(1, len(examples) // options.prompts)][: options.prompts]:
        circuit = tracer.trace(example, paths="complete")
        recording = model.record([list(circuit.prompt.token_ids)], keep=CONTENT_FIELDS)
        edges = [edge for edge in circuit.edges if edge.left is not None and edge.through]
        for edge in edges:
            assert edge.left is not None
            value = share_left(recording, circuit, edge)
            errors.append(abs(value - edge.left))
            sizes.append(len(edge.through or ()))
            kinds += [circuit.node(i).kind for i in edge.through or ()]
            below += value < 0.5
        print(f"{example.id}: {len(edges)} signals, worst {max(errors, default=0):.1e}", flush=True)
    found = {
        "model": options.model,
        "signals": len(errors),
        "causes": sum(sizes),
        "largest error": max(errors),
        "below half": below / len(errors),
        "components": {
            "median": median(sizes),
            "ninth decile": quantiles(sizes, n=10)[8],
            "most": max(sizes),
        },
        "kinds": {kind: kinds.count(kind) / len(kinds) for kind in sorted(set(kinds))},
    }
    print(json.dumps(found, indent=1))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
