"""Cost of tracing in forward passes, all in one run: IOI prompts alone and in batches, growth with length, budget.

python benchmarks/trace.py [--quick]
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
from headtrace.tasks import load_task
from headtrace.vocabulary import Firing

TEXT = " ".join((Path(__file__).parent / "text.txt").read_text(encoding="utf-8").split())


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def forward(model: headtrace.Model, ids: list[int]) -> Callable[[], Any]:
    x = torch.tensor([ids])

    def run() -> None:
        with torch.inference_mode():
            model.hf(x)

    return run


def ioi(model: headtrace.Model, n: int) -> dict[str, Any]:
    """Whole circuits, recording included, against a plain forward pass of the same prompt; then in batches of 64."""
    examples = load_task("ioi", model.tokenizer, n_per_cell=4, seed=1).examples
    step = max(1, len(examples) // n)
    chosen = examples[::step][:n]
    tracer = headtrace.Tracer(model)
    ratios: list[float] = []
    firings: list[int] = []
    cold = timed(lambda: tracer.trace(chosen[0].text, chosen[0].answer, chosen[0].wrong, root="linear"))
    for example in chosen:  # once through, so that composed weights are there: they are made once per model
        tracer.trace(example.text, example.answer, example.wrong, root="linear")
    for example in chosen:
        plain = forward(model, model.to_ids(example.text))
        passes = statistics.median(timed(plain) for _ in range(3))
        traces = [
            timed(lambda e=example: tracer.trace(e.text, e.answer, e.wrong, root="linear")) for _ in range(3)
        ]
        ratios.append(statistics.median(traces) / passes)
        circuit = tracer.trace(example.text, example.answer, example.wrong, root="linear")
        firings.append(sum(node.expanded for node in circuit.nodes))
    batch = [{"text": e.text, "answer": e.answer, "wrong": e.wrong} for e in examples[:64]]
    single = statistics.median(timed(forward(model, model.to_ids(e.text))) for e in examples[:16])
    tracer.trace_batch(batch, root="linear")
    each = statistics.median(timed(lambda: tracer.trace_batch(batch, root="linear")) for _ in range(2)) / len(
        batch
    )
    return {
        "prompts": len(chosen),
        "circuit_over_forward_median": round(statistics.median(ratios), 3),
        "circuit_over_forward_max": round(max(ratios), 3),
        "first_trace_of_a_model_over_forward": round(cold / single, 2),
        "firings_median": statistics.median(firings),
        "batch_of_64_per_prompt_over_forward": round(each / single, 3),
        "required": {"median": 1.5, "batch": 0.6},
    }


def strongest(recording: headtrace.Recording) -> list[Firing]:
    """Firings of the upper half of the model at the far end of the prompt: the expensive ones."""
    length = recording.lengths[0]
    found = [
        (firing, attention)
        for firing, attention in recording.strongest_firings()
        if firing.layer >= recording.model.n_layers // 2 and firing.dest >= length // 2
    ]
    return [firing for firing, _ in sorted(found, key=lambda item: -item[1])]


def growth(model: headtrace.Model, lengths: list[int]) -> list[dict[str, Any]]:
    """One firing, and a whole circuit under the default budget, against a forward pass of the same length."""
    ids = model.to_ids(TEXT)
    ids = (ids * (max(lengths) // len(ids) + 1))[: max(lengths)]
    rows: list[dict[str, Any]] = []
    for length in lengths:
        prompt = ids[:length]
        plain = forward(model, prompt)
        plain()
        passes = statistics.median(timed(plain) for _ in range(3))
        tracer = headtrace.Tracer(model)
        recording = model.record(prompt, last_logits=True)
        firings = strongest(recording)[:3]
        tracer.trace_firings(recording, firings)
        one = statistics.median(
            timed(lambda f=f, r=recording, t=tracer: t.trace_firings(r, [f])) for f in firings
        )
        del recording
        start = time.perf_counter()
        circuit = tracer.trace(prompt, root="probability", top_k=1)
        whole = time.perf_counter() - start
        rows.append(
            {
                "tokens": length,
                "firing_over_forward": round(one / passes, 3),
                "circuit_over_forward": round(whole / passes, 2),
                "firings": sum(node.expanded for node in circuit.nodes),
                "edges": len(circuit.edges),
                "influence_kept": circuit.influence_kept,
                "peak_resident_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
            }
        )
    return rows


def budget(model: headtrace.Model) -> dict[str, Any]:
    """The default budget on 128 tokens of running text, and on IOI prompts, against no budget at all."""
    ids = model.to_ids(TEXT)[:128]
    kept = headtrace.Tracer(model).trace(ids, root="probability", top_k=1)
    full = headtrace.Tracer(model, max_firings=None, min_influence=0.0).trace(
        ids, root="probability", top_k=1
    )
    examples = load_task("ioi", model.tokenizer, n_per_cell=1, seed=2).examples
    prompts = [{"text": e.text, "answer": e.answer, "wrong": e.wrong} for e in examples]
    limited = headtrace.Tracer(model).trace_batch(prompts, root="linear")
    free = headtrace.Tracer(model, max_firings=None, min_influence=0.0).trace_batch(prompts, root="linear")
    return {
        "text_tokens": 128,
        "text_edges_full": len(full.edges),
        "text_firings_full": sum(n.expanded for n in full.nodes),
        "text_edges_budgeted": len(kept.edges),
        "text_firings_budgeted": sum(n.expanded for n in kept.nodes),
        "text_influence_kept": kept.influence_kept,
        "ioi_prompts": len(prompts),
        "ioi_prompts_changed_by_the_budget": sum(
            a.edges != b.edges for a, b in zip(limited, free, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer prompts, shorter texts")
    quick = parser.parse_args().quick
    model = headtrace.load("smollm2-135m")
    result = {
        "benchmark": "trace",
        "model": "smollm2-135m",
        "threads": torch.get_num_threads(),
        "ioi": ioi(model, 5 if quick else 20),
        "growth": growth(model, [16, 64] if quick else [16, 32, 64, 128, 256, 512, 1024]),
        "budget": budget(model),
        "required": {"firing at 128": 0.5, "firing at 1024": 1.0, "circuit at 1024": 30, "gb at 1024": 8},
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
