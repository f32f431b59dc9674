"""How much of the difference the steps of a mechanism carry, and whether the shown heads are needed and enough.

python docs/studies/mechanisms.py [--model smollm2-135m] [--prompts 20] [--out FILE]

One prompt of each draw of the task; answers and counterfactuals of the task, or found by the model (--auto). Prints a
table: median with a 95 % interval over prompts (bootstrap, 2,000 draws), beside as many random heads.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np

import headtrace
from headtrace.errors import HeadtraceError
from headtrace.tasks import load_task


def median_interval(values: list[float], rng: np.random.Generator) -> tuple[float, float, float]:
    drawn = rng.choice(np.array(values), (2000, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--task", default="ioi")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = headtrace.load(given.model)
    examples = load_task(given.task, model.tokenizer, n_per_cell=8, seed=3).examples
    step = max(1, len(examples) // given.prompts)
    rows: list[dict[str, float]] = []
    roles: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for example in examples[::step][: given.prompts]:
        try:
            found = headtrace.why(model, example.text, example.answer, example.wrong, budget=60)
        except HeadtraceError as error:
            left_out[str(error)[:80]] += 1
            continue
        if found.test is None:
            left_out["no step"] += 1
            continue
        test, whole = found.test, found.test.before - found.test.other
        rows.append(
            {
                "shown": found.shown,
                "lost without them": test.necessity,
                "lost without random heads": (test.before - test.random_without) / whole,
                "kept by them alone": test.sufficiency,
                "kept by random heads alone": (test.random_kept - test.other) / whole,
                "ledger error": abs(sum(line.amount for line in found.ledger) - found.whole)
                / abs(found.whole),
            }
        )
        roles.update({step.role for step in found.steps})
    rng = np.random.default_rng(0)
    table = {name: median_interval([row[name] for row in rows], rng) for name in rows[0]}
    result = {
        "model": given.model,
        "task": given.task,
        "prompts": len(rows),
        "left out": dict(left_out),
        "median [95 %]": table,
        "share of prompts with a step of each role": {name: n / len(rows) for name, n in roles.most_common()},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
