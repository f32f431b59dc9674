"""Long prompts: recording, one firing and a circuit against plain forward passes of the same prompt, and peak memory.

    python benchmarks/long_prompts.py --lengths 16 128 512 2048 --shape smollm2
    python benchmarks/long_prompts.py --lengths 16 128 512 --shape llama-3.2-1b

Each length runs in a process of its own, so that its peak memory is its own. ``llama-3.2-1b`` has that model's shape
and random weights. "first answer" is why one head attends where it does, asked of a model that was just loaded: nothing
folded, decomposed or composed yet, and no cache; "first circuit" is the first one after that. Ratios are of processor
time of all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

import headtrace

T = TypeVar("T")
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 128, 512])
    parser.add_argument("--shape", choices=("smollm2", "llama-3.2-1b"), default="smollm2")
    parser.add_argument("--only", choices=("firing", "both"), default="both")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.shape, options.one, options.only)))
        return
    rows = []
    for length in options.lengths:
        command = [
            sys.executable,
            __file__,
            "--shape",
            options.shape,
            "--only",
            options.only,
            "--one",
            str(length),
        ]
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "HEADTRACE_CACHE": cache}
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"shape": options.shape, "threads": torch.get_num_threads(), "rows": rows}, indent=1))


def measure(shape: str, length: int, only: str) -> dict[str, Any]:
    model = headtrace.load("smollm2-135m") if shape == "smollm2" else random_llama()
    ids = prompt(model, length)
    batch, last = torch.tensor([ids]), torch.tensor([[length - 1]])
    repeats = 2 if length > 1000 else REPEATS
    forward = timed(lambda: model.run(batch, keep=last), repeats)
    asked: dict[str, Any] = {"root": "probability", "top_k": 1}
    found: dict[str, Any] = {"tokens": length, "weights_gb": peak(), "forward_s": forward}
    tracer = headtrace.Tracer(model)
    recording = once(found, "record", forward, lambda: model.record([ids], last_logits=True))
    found["patterns"] = "kept" if "patterns" in recording.tensors else "recomputed"
    firing = strongest(recording)
    causes = once(found, "first firing", forward, lambda: tracer.trace_firings(recording, [firing])[0])
    found |= {"traced": str(firing), "causes": len(causes.query.causes) + len(causes.key.causes)}
    found["first answer"] = found["record"] + found["first firing"]
    once(found, "firing", forward, lambda: tracer.trace_firings(recording, [firing]))
    if only == "both":
        del recording
        circuit = once(found, "first circuit", forward, lambda: tracer.trace(ids, **asked))
        if length <= 1000:
            once(found, "circuit", forward, lambda: tracer.trace(ids, **asked))
        found |= {"edges": len(circuit.edges), "expanded": sum(node.expanded for node in circuit.nodes)}
    return found | {"heads decomposed": model.channels.n_known, "peak_gb": peak()}


def once(found: dict[str, Any], name: str, forward: float, work: Callable[[], T]) -> T:
    """Do the work, and note what it costs in forward passes."""
    start = time.process_time()
    result = work()
    found[name] = (time.process_time() - start) / forward
    return result


def prompt(model: headtrace.Model, length: int) -> list[int]:
    """Running text, again and again until it is long enough; random tokens for a model without a tokenizer."""
    if model.tokenizer is None:
        generator = torch.Generator().manual_seed(length)
        text = torch.randint(100, model.d_vocab - 100, (max(8, length // 2),), generator=generator).tolist()
    else:
        text = model.to_ids(
            " ".join((Path(__file__).parent / "text.txt").read_text(encoding="utf-8").split())
        )
    return (text * (length // len(text) + 1))[:length]


def strongest(recording: headtrace.Recording) -> headtrace.Firing:
    """A firing of the last token in the upper half of the model, past the first token."""
    last, best = recording.lengths[0] - 1, (0.0, headtrace.Firing(0, 0, 0, 0))
    model = recording.model
    for layer in range(model.n_layers // 2, model.n_layers):
        for head in range(model.n_heads):
            row = recording.attention.row(layer, 0, head, last)[1:last]
            src = int(row.argmax())
            best = max(best, (float(row[src]), headtrace.Firing(layer, head, last, src + 1)))
    return best[1]


def random_llama() -> headtrace.Model:
    """The shape of Llama-3.2-1B with random weights, sharp enough that heads attend somewhere."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rope_parameters=rope,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    hf = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(4.0)
            elif "o_proj" in name or "v_proj" in name:
                parameter.mul_(3.0)
    return headtrace.load(hf)


def timed(work: Callable[[], object], repeats: int) -> float:
    """The median processor time of some repetitions after a first one."""
    work()
    times: list[float] = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == "__main__":
    main()
