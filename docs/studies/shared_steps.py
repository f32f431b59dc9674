"""Which steps the mechanisms of many IOI prompts share, and where ABBA and BABA prompts differ.

python docs/studies/shared_steps.py [--model builtin] [--prompts 300] --run FOLDER [--out FILE] [--partial]

The run is kept in FOLDER, and the same command resumes it; --partial tells of the prompts that are done. Prompts are
balanced over the forms and both orders of the task; counterfactuals are found by the model. A run traces short prompts
first, so what is done of a run that was stopped lacks long forms, and the result counts prompts by form and order. For
a smaller balanced set ask for fewer with --prompts, a multiple of 30 for IOI. How much the shown steps carry, and what
is left without them and with them alone, are medians with a 95 % interval over prompts (bootstrap, 2,000 draws), beside
as many random heads.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl

import headtrace
from headtrace.families import SharedSteps, shared_steps
from headtrace.tasks import load_task


def median_interval(values: list[float]) -> tuple[float, float, float]:
    drawn = np.random.default_rng(0).choice(np.array(values), (2000, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def tables(every: SharedSteps, groups: SharedSteps, least: float = 0.15) -> str:
    """The tables of the page: steps of so many prompts at least, and where the two groups differ."""
    lines = [
        "| step | prompts | flow | lost without it | lost without random ones | heads |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in every.table.filter(pl.col("share") >= least).to_dicts():
        random = "" if row["lost_random"] is None else f"{row['lost_random']:.2f}"
        lines.append(
            f"| {row['text'].replace('*', '`')} | {row['share']:.2f} [{row['share_low']:.2f}, {row['share_high']:.2f}] "
            f"| {row['flow']:+.2f} [{row['flow_low']:.2f}, {row['flow_high']:.2f}] | {row['lost']:.2f} | {random} "
            f"| {', '.join(row['usual'])} |"
        )
    names = [name.split(" ")[-1] for name in groups.groups]
    lines += ["", f"| step | {' | '.join(names)} | difference | |", "| --- | --- | --- | --- | --- |"]
    for row in groups.differences.to_dicts():
        if max(row["in_a"], row["in_b"]) < least:
            continue
        verdict = {"more in a": f"more in {names[0]}", "more in b": f"more in {names[1]}"}.get(row["verdict"])
        lines.append(
            f"| {row['text'].replace('*', '`')} | {row['in_a']:.2f} | {row['in_b']:.2f} | "
            f"{row['difference']:+.2f} [{row['low']:.2f}, {row['high']:.2f}] | {verdict or row['verdict']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--task", default="ioi")
    parser.add_argument("--by", default="order", help="the label whose groups are compared")
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--partial", action="store_true", help="tell of what is done, and do no more")
    given = parser.parse_args()
    if given.partial:
        run = headtrace.open_run(given.run)
    else:
        model = headtrace.load(given.model)
        examples = load_task(given.task, model.tokenizer, n=given.prompts).examples
        run = headtrace.run(model, examples, out=given.run, mechanisms=True, shard_size=4)
    status = run.status()
    every, groups = shared_steps(run), shared_steps(run, given.by)
    ids = [id for id, state in run.prompts.select("id", "status").collect().rows() if state == "done"]
    told = [run.mechanism(id) for id in ids]
    tested = [found for found in told if found.test is not None]
    tests = [found.test for found in tested if found.test is not None]
    whole = [test.before - test.other for test in tests]
    numbers = {
        "shown": [found.shown for found in tested],
        "lost without them": [test.necessity for test in tests],
        "lost without random heads": [
            (test.before - test.random_without) / all for test, all in zip(tests, whole, strict=True)
        ],
        "kept by them alone": [test.sufficiency for test in tests],
        "kept by random heads alone": [
            (test.random_kept - test.other) / all for test, all in zip(tests, whole, strict=True)
        ],
    }
    medians = {name: median_interval(values) for name, values in numbers.items()}
    steps = [step for found in tested for step in found.steps]
    doubts = Counter(step.doubt or "evidence" for step in steps if step.measured is not None)
    done = run.prompts.filter(pl.col("status") == "done").collect()
    kinds = Counter(done.select(pl.concat_str("^label:.*$", separator=", ")).to_series().to_list())
    result = {
        "model": given.model,
        "task": given.task,
        "done": status.done,
        "failed": status.failures,
        "prompts by label": dict(sorted(kinds.items())),
        "median [95 %]": medians,
        "measurements of steps": dict(doubts.most_common()),
        "all": every.to_dict(),
        "groups": groups.to_dict(),
    }
    print(
        every.summary(),
        groups.summary(),
        tables(every, groups),
        json.dumps(result["prompts by label"]),
        json.dumps(medians),
        json.dumps(doubts),
        sep="\n\n",
    )
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
