"""Cost of difference circuits and of measured importance in forward passes, all in one run; a long prompt with memory.

    python benchmarks/difference.py [--quick] [--model smollm2-135m]

Prints JSON. Aims: one difference circuit (both runs recorded, swept, drawn) 5 forward passes of the prompt or less;
importance of a prompt of about 14 tokens with 120 changed prompts 40 or less; 1,024 tokens within 6 GB.
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

TEXT = " ".join((Path(__file__).parent / "text.txt").read_text(encoding="utf-8").split())
PROMPT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"


def timed(action: Callable[[], Any], repeats: int) -> float:
    """The median of some runs, in seconds, after one that warms up."""
    action()
    found: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def forward(model: headtrace.Model, ids: list[int], repeats: int) -> float:
    x = torch.tensor([ids])
    with torch.inference_mode():
        return timed(lambda: model.hf(x), repeats)


def long_prompt(tracer: headtrace.Tracer, length: int) -> dict[str, Any]:
    """A long prompt against itself with one token exchanged: its time and the peak memory of the process."""
    model = tracer.model
    ids = (model.to_ids(TEXT) * 8)[:length]
    other = [*ids]
    other[length // 2] = ids[length // 3]
    answer = int(model.end_logits([ids])[0].argmax())
    passed = forward(model, ids, 1)
    start = time.perf_counter()
    tracer.trace(ids, answer=answer, paths="difference", counterfactual=[other])
    took = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"tokens": length, "seconds": took, "forward_passes": took / passed, "peak_gb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quick", action="store_true", help="short prompts only")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    model = headtrace.load(given.model)
    tracer = headtrace.Tracer(model)
    ids = model.to_ids(PROMPT)
    passed = forward(model, ids, 2 * given.repeats)
    about = {"answer": " Mary", "wrong": " John", "paths": "difference"}
    circuit = timed(lambda: tracer.trace(PROMPT, counterfactual=OTHER, **about), given.repeats)
    matters = timed(lambda: headtrace.importance(model, PROMPT, " Mary", " John"), 2)
    automatic = timed(lambda: tracer.trace(PROMPT, counterfactual="auto", **about), 2)
    found: dict[str, Any] = {
        "model": model.name,
        "threads": torch.get_num_threads(),
        "tokens": len(ids),
        "forward_seconds": passed,
        "difference_circuit": circuit / passed,
        "importance_120_changes": matters / passed,
        "automatic_difference_circuit": automatic / passed,
    }
    if not given.quick:
        found["long"] = long_prompt(tracer, 1024)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
