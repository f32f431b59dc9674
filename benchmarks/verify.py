"""Cost of one intervention of a verification, as a ratio to a plain forward pass of the same prompt. Prints JSON."""

from __future__ import annotations

import json
import statistics
import time

import torch

import headtrace

PROMPT = "When Mary and John went to the store, John gave a drink to"
CONTROLS = 8


def main() -> None:
    model = headtrace.load("smollm2-135m")
    circuit = headtrace.Tracer(model).trace(PROMPT, answer=" Mary", wrong=" John")
    ids = torch.tensor([list(circuit.prompt.token_ids)])

    def forward() -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            model.hf(ids, use_cache=False)
        return time.perf_counter() - start

    headtrace.verify(circuit, model, edges="top:1", controls=1), forward()  # both warm
    inner = [edge for edge in circuit.edges if edge.side != "root"]
    ratios: list[float] = []
    count = predictions = 0
    # A few edges, then a few forward passes, in turn, so that a noisy machine disturbs both alike.
    for start in range(0, len(inner), 16):
        part = inner[start : start + 16]
        begun = time.perf_counter()
        report = headtrace.verify(circuit, model, edges=part, controls=CONTROLS)
        spent = time.perf_counter() - begun
        interventions = 2 * (CONTROLS + 1) * len(part)
        ratios.append(spent / interventions / statistics.median(forward() for _ in range(5)))
        count += interventions
        predictions = len(report.predictions)
    print(
        json.dumps(
            {
                "benchmark": "verify",
                "model": "smollm2-135m",
                "edges": len(inner),
                "controls": CONTROLS,
                "interventions": count,
                "prediction_checks_included_in_every_part": predictions,
                "intervention_over_forward": round(statistics.median(ratios), 3),
                "largest_part": round(max(ratios), 3),
                "required": 0.5,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
