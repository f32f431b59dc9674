"""What "rather than" and pairs add to an explanation, in forward passes, at 128 tokens. All in one run.

python benchmarks/questions.py [--model smollm2-135m]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import headtrace
from headtrace.tracing.rather_than import FiringParts, RatherThan

TEXT = " ".join((Path(__file__).parent / "text.txt").read_text(encoding="utf-8").split())


def median_time(action: Callable[[], Any], n: int = 7) -> float:
    times: list[float] = []
    for _ in range(n):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    model = headtrace.load(given.model)
    tracer, ids = headtrace.Tracer(model), model.to_ids(TEXT)[: given.tokens]
    recording = model.record(ids, last_logits=True)
    firings = recording.strongest_firings()
    late = [f for f, _ in sorted(firings, key=lambda each: -each[1]) if f.layer >= model.n_layers * 2 // 3]
    firing = next(f for f in late if f.dest >= given.tokens // 2)
    tokens, other = recording.tokens(), headtrace.Firing(firing.layer, firing.head, firing.dest, 0)

    def compare() -> RatherThan:
        return RatherThan.of(FiringParts.of(recording, tracer.composer, [firing, other]), model.name, tokens)

    why = tracer.explain_recorded(recording, firing, rather_than=0)
    with torch.inference_mode():
        forward = median_time(lambda: model.hf(torch.tensor([ids])))
    found = {
        "model": model.name,
        "tokens": len(ids),
        "firing": str(firing),
        "explanation": median_time(lambda: tracer.trace_firings(recording, [firing])) / forward,
        "rather than, all terms": median_time(compare) / forward,
        "its five largest terms": median_time(lambda: why.rather_than and why.rather_than.top(5)) / forward,
        "pairs(20)": median_time(lambda: why.pairs(20)) / forward,
    }
    print(
        json.dumps({name: round(v, 4) if isinstance(v, float) else v for name, v in found.items()}, indent=2)
    )


if __name__ == "__main__":
    main()
