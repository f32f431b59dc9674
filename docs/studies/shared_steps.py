"""Which steps the mechanisms of many IOI prompts share, and where ABBA and BABA prompts differ.

python docs/studies/shared_steps.py [--model builtin] [--prompts 300] --run FOLDER [--out FILE]

The run is kept in FOLDER, and the same command resumes it. Prompts are balanced over the forms and both orders of the
task; counterfactuals are found by the model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import headtrace
from headtrace.families import shared_steps
from headtrace.statistics import intervals
from headtrace.tasks import load_task


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--task", default="ioi")
    parser.add_argument("--by", default="order", help="the label whose groups are compared")
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = headtrace.load(given.model)
    examples = load_task(given.task, model.tokenizer, n=given.prompts)
    run = headtrace.run(model, examples, out=given.run, mechanisms=True, shard_size=8)
    status = run.status()
    every, groups = shared_steps(run), shared_steps(run, given.by)
    ids = [id for id, state in run.prompts.select("id", "status").collect().rows() if state == "done"]
    told = [run.mechanism(id) for id in ids]
    tested = [found for found in told if found.test is not None]
    numbers = {
        "shown": [found.shown for found in tested],
        "lost without them": [found.test.necessity for found in tested if found.test],
        "kept by them alone": [found.test.sufficiency for found in tested if found.test],
    }
    means: dict[str, tuple[float, float, float]] = {}
    for name, values in numbers.items():
        low, high = intervals(values)
        means[name] = (sum(values) / len(values), float(low), float(high))
    result = {
        "model": given.model,
        "task": given.task,
        "done": status.done,
        "failed": status.failures,
        "mean [95 %]": means,
        "all": every.to_dict(),
        "groups": groups.to_dict(),
    }
    print(every.summary(), groups.summary(), json.dumps(means), sep="\n\n")
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
