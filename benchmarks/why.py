"""What `headtrace why` costs in forward passes of the prompt, by its parts, in one run. Prints JSON.

python benchmarks/why.py [--quick] [--model NAME]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import headtrace
from headtrace.mechanism.asking import tell
from headtrace.mechanism.folding import fold_flows
from headtrace.tracing.prompt_words import ask

PROMPTS = {
    "indirect object": "When Mary and John went to the store, John gave a drink to",
    "agreement": "The keys to the cabinet",
    "fact": "The capital of France is",
}


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    found = action()
    return time.process_time() - start, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the built-in model")
    parser.add_argument("--model", default="smollm2-135m")
    given = parser.parse_args()
    model = headtrace.load("builtin" if given.quick else given.model)
    tracer = headtrace.Tracer(model)
    rows: dict[str, Any] = {}
    for name, prompt in list(PROMPTS.items())[: 1 if given.quick else None]:
        ids = torch.tensor([model.to_ids(prompt)])
        headtrace.why(model, prompt)  # what is kept for later: channels, embeddings of the vocabulary
        with torch.inference_mode():
            passes = [timed(lambda ids=ids: model.hf(ids))[0] for _ in range(9)]
        forward = statistics.median(passes)
        asked = ask(model, prompt, paths="difference")
        compare, compared = timed(lambda asked=asked: tracer.compare(asked))
        fold, _ = timed(lambda found=compared: fold_flows(found.flows, found.circuit))
        told, mechanism = timed(lambda found=compared: tell(tracer, found))
        rows[name] = {
            "tokens": ids.shape[1],
            "find counterfactuals and trace": compare / forward,
            "fold MLPs": fold / forward,
            "fold, name, explain and measure": told / forward,
            "whole": (compare + told) / forward,
            "steps": len(mechanism.steps),
            "shown": mechanism.shown,
        }
    print(json.dumps({"benchmark": "why", "model": model.name, "unit": "forward passes", "prompts": rows}))


if __name__ == "__main__":
    main()
