"""Cost of recording, as a ratio to a plain forward pass with attentions returned, in one run. Prints JSON."""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable

import torch

import headtrace


def paired_ratio(first: Callable[[], object], second: Callable[[], object], rounds: int) -> float:
    """Median of first/second, timed in turn so that a noisy machine disturbs both alike."""
    first(), second()
    ratios: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        second()
        middle = time.perf_counter()
        first()
        ratios.append((time.perf_counter() - middle) / (middle - start))
    return statistics.median(ratios)


def main() -> None:
    model = headtrace.load("smollm2-135m")
    model.record(list(range(100, 1124)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ratios: dict[str, float] = {}
    for length, rounds in ((16, 15), (128, 9), (1024, 3)):
        ids = torch.randint(100, 40000, (1, length), generator=torch.Generator().manual_seed(0))

        def plain(ids: torch.Tensor = ids) -> object:
            with torch.inference_mode():
                return model.hf(ids, output_attentions=True, use_cache=False)

        ratios[str(length)] = round(paired_ratio(lambda ids=ids: model.record(ids[0]), plain, rounds), 3)
    print(
        json.dumps(
            {
                "benchmark": "record",
                "model": "smollm2-135m",
                "record_over_forward_with_attentions": ratios,
                "required": 1.5,
                "peak_resident_gb_at_1024_tokens": round(peak / 1e9, 2),
                "required_gb": 4,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
