"""Cost of content and complete circuits in forward passes, all in one run; a long prompt with its memory.

python benchmarks/complete.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import headtrace
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.tasks import load_task
from headtrace.tracing.attribute_root import attribute_root
from headtrace.tracing.content import Content

TEXT = " ".join((Path(__file__).parent / "text.txt").read_text(encoding="utf-8").split())


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def forward(model: headtrace.Model, ids: list[int]) -> float:
    x = torch.tensor([ids])
    with torch.inference_mode():
        return statistics.median(timed(lambda: model.hf(x)) for _ in range(3))


def contributions(model: headtrace.Model, circuit: headtrace.Circuit) -> Callable[[], Any]:
    """Content contributions of all components of a recorded prompt to its root."""
    recording = model.record([list(circuit.prompt.token_ids)], last_logits=True, keep=CONTENT_FIELDS)

    def run() -> None:
        with torch.inference_mode():
            parts = attribute_root(circuit.root, recording, 0, 64).parts
            g = Content.of(recording, [parts]).gradients
            for layer in range(
                model.n_layers
            ):  # every head component: attention, times its value along the gradient
                values = recording.bare_values[layer, :, 0]
                _ = recording.patterns[layer, 0] * (g.values[layer, 0] @ values.transpose(-1, -2))
            _ = (recording.mlp_writes * g.mlp).sum(-1), g.embedding()

    return run


def ioi(model: headtrace.Model, n: int) -> dict[str, Any]:
    examples = load_task("ioi", model.tokenizer, n_per_cell=1, seed=1).examples[:n]
    tracer = headtrace.Tracer(model)
    for example in examples:
        for paths in ("content", "complete"):
            tracer.trace(example, paths=paths)
    ratios: dict[str, list[float]] = {"contributions": [], "content": [], "complete": []}
    sizes: list[tuple[int, int, int]] = []
    for example in examples:
        plain = forward(model, list(example.token_ids))
        for paths in ("content", "complete"):
            spent = statistics.median(
                timed(lambda e=example, p=paths: tracer.trace(e, paths=p)) for _ in range(3)
            )
            ratios[paths].append(spent / plain)
        circuit = tracer.trace(example, paths="complete")
        sizes.append((sum(node.expanded for node in circuit.heads()), len(circuit.nodes), len(circuit.edges)))
        run = contributions(model, circuit)
        ratios["contributions"].append(statistics.median(timed(run) for _ in range(3)) / plain)
    batch = list(examples[:16])
    tracer.trace_batch(batch, paths="complete")
    single = statistics.median(forward(model, list(e.token_ids)) for e in batch)
    together = timed(lambda: tracer.trace_batch(batch, paths="complete")) / len(batch)
    return {
        "prompts": len(examples),
        **{name: round(statistics.median(found), 2) for name, found in ratios.items()},
        "complete, batch of 16, per prompt": round(together / single, 2),
        "firings, nodes, edges (medians)": [statistics.median(each) for each in zip(*sizes, strict=True)],
        "required": {"contributions": 3, "complete": 8},
    }


def long(model: headtrace.Model, n_tokens: int) -> dict[str, Any]:
    ids = model.to_ids(TEXT)
    ids = (ids * (1 + n_tokens // len(ids)))[:n_tokens]
    plain = forward(model, ids)
    tracer = headtrace.Tracer(model)
    circuit: list[headtrace.Circuit] = []
    spent = timed(lambda: circuit.append(tracer.trace(ids, top_k=1, paths="complete")))
    return {
        "tokens": n_tokens,
        "complete": round(spent / plain, 2),
        "nodes": len(circuit[0].nodes),
        "edges": len(circuit[0].edges),
        "peak GB of the process": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "required": {"complete": 40, "GB": 6},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    model = headtrace.load(options.model)
    found = {
        "threads": torch.get_num_threads(),
        "ioi": ioi(model, 4 if options.quick else 16),
        "long": long(model, 256 if options.quick else 1024),
    }
    print(json.dumps({"benchmark": "complete", "model": options.model, **found}, indent=1))


if __name__ == "__main__":
    main()
