"""What a run costs: forward passes per prompt with the store included, the store's own share, memory against length.

python benchmarks/runs.py [--quick] [--model NAME]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import headtrace
from headtrace.runs.work import ShardWork
from headtrace.tasks import TaskSet, load_task

MEMORY = """
import json, sys, tempfile, headtrace
from pathlib import Path
from headtrace.tasks import load_task
model = headtrace.load("builtin")
prompts = load_task("ioi", model.tokenizer, n_per_cell=int(sys.argv[1]) // 30)
def peak_mb():
    # Not ru_maxrss, which begins with the peak of the process that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e3
before = peak_mb()
with tempfile.TemporaryDirectory() as folder:
    run = headtrace.run(model, prompts, out=folder)
    peak = peak_mb()
    status = run.status()
    told = {"loaded_mb": before, "peak_mb": peak, "failed": status.failed, "bytes": status.bytes}
    print(json.dumps(told))
"""


class Clock:
    """Seconds spent inside a method, call by call."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds: list[float] = []
        self.owner, self.name, self.kept = owner, name, getattr(owner, name)

    def __enter__(self) -> Clock:
        kept, seconds = self.kept, self.seconds

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return kept(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - start)

        setattr(self.owner, self.name, timed)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self.owner, self.name, self.kept)


def forward_seconds(model: headtrace.Model, prompts: TaskSet, n: int = 24) -> float:
    """A plain forward pass of one prompt, the median over some."""

    def run(ids: tuple[int, ...]) -> Callable[[], Any]:
        return lambda: model.hf(torch.tensor([list(ids)]))

    seconds: list[float] = []
    with torch.inference_mode():
        for example in prompts.examples[:: max(1, len(prompts) // n)]:
            start = time.perf_counter()
            run(example.token_ids)()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def cost(model: headtrace.Model, prompts: TaskSet, paths: Any) -> dict[str, Any]:
    """Forward passes per prompt. The first shard also composes the model's weights, once per run."""
    before = forward_seconds(model, prompts)
    with (
        tempfile.TemporaryDirectory() as folder,
        Clock(ShardWork, "trace") as shards,
        Clock(headtrace.Tracer, "trace_batch") as traces,
    ):
        start = time.perf_counter()
        run = headtrace.run(model, prompts, out=folder, paths=paths, shard_size=32)
        whole = time.perf_counter() - start
        status = run.status()
    forward = statistics.mean([before, forward_seconds(model, prompts)])
    later = sum(shards.seconds[1:]) / (len(prompts) - 32)  # without the first shard
    return {
        "prompts": len(prompts),
        "failed": status.failed,
        "passes_per_prompt_all_included": round(whole / len(prompts) / forward, 3),
        "passes_per_prompt_after_the_first_shard": round(later / forward, 3),
        "store_in_passes_per_prompt": round(
            (sum(shards.seconds) - sum(traces.seconds)) / len(prompts) / forward, 4
        ),
        "store_milliseconds_per_prompt": round(
            1e3 * (sum(shards.seconds) - sum(traces.seconds)) / len(prompts), 3
        ),
        "plan_and_checks_milliseconds_per_prompt": round(
            1e3 * (whole - sum(shards.seconds)) / len(prompts), 3
        ),
        "forward_milliseconds": round(1e3 * forward, 2),
        "bytes_per_prompt": {name: round(size / len(prompts)) for name, size in status.bytes.items()},
        "edges_per_prompt": round(status.rows["edges"] / len(prompts), 1),
    }


def memory(n: int) -> dict[str, Any]:
    """Peak memory of a process that makes a run of so many prompts on the built-in model."""
    found = subprocess.run([sys.executable, "-c", MEMORY, str(n)], capture_output=True, text=True, check=True)
    return {"prompts": n, **json.loads(found.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer prompts")
    parser.add_argument("--model", default="smollm2-135m")
    given = parser.parse_args()
    model = headtrace.load(given.model)
    result: dict[str, Any] = {"benchmark": "runs", "model": given.model, "threads": torch.get_num_threads()}
    for paths, cells in (("attention", 2 if given.quick else 10), ("complete", 2 if given.quick else 4)):
        result[paths] = cost(model, load_task("ioi", model.tokenizer, n_per_cell=cells), paths)
    result["memory"] = [memory(n) for n in ((60, 300) if given.quick else (300, 3000))]
    result["required"] = {"attention": 1.2, "complete": 6}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
