"""`headtrace bench` on several models, a prompt at a time: resumable, with intervals and differences prompt by prompt.

    python docs/studies/bench_prompts.py --model gemma-3-270m --prompts DIR --rounds 10 --out build/bench
    python docs/studies/bench_prompts.py --model qwen2.5-coder-1.5b --prompts DIR --rounds 3 --out build/bench
    python docs/studies/bench_prompts.py --report --out build/bench

DIR holds a .jsonl file for each set. A round measures the next prompt of every set with every method, so that sets have
equally many whenever the study is stopped. A prompt is a line of rows.jsonl, also one that cannot be measured, with the
reason. ``--report`` makes the tables: medians over prompts with 95 % intervals from drawing prompts again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sufficiency import median_interval

import headtrace
from headtrace.causal.bench import METHODS, bench
from headtrace.errors import InputError

SIZES = ("at 5", "at 10", "at 20", "at 40")
PAIRED = ("integrated gradients", "attribution patching", "content")
"""What difference circuits are compared with on the same prompt."""


def measured(model: headtrace.Model, name: str, line: str) -> dict[str, Any]:
    """One prompt with every method, or why it cannot be measured."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.jsonl"
        file.write_text(line + "\n", encoding="utf-8")
        try:
            found = bench(model, file, methods=METHODS, n=1)
        except InputError as error:
            return {"unused": str(error).partition("(1: ")[2].partition(").")[0] or str(error)}
    return {"methods": {row["method"]: dict(row) for row in found.rows}}


def study(model: headtrace.Model, folder: Path, rounds: int, file: Path) -> None:
    """Measure until every set has so many prompts, going on from the rows that are there."""
    done = [row for row in read(file) if row["model"] == model.name]
    lines = {
        path.stem: path.read_text(encoding="utf-8").splitlines() for path in sorted(folder.glob("*.jsonl"))
    }
    if not lines:
        raise SystemExit(f"There are no .jsonl files in {folder}.")
    # Decompositions of heads are made, or read from the cache, once: no method's cost should hold them.
    headtrace.Tracer(model).trace(
        "When Mary and John went to the store, John gave a drink to", " Mary", " John"
    )
    used = Counter(row["set"] for row in done if "methods" in row)
    places = Counter(row["set"] for row in done)
    with file.open("a", encoding="utf-8") as out:
        for round, (name, prompts) in itertools.product(range(1, rounds + 1), lines.items()):
            while used[name] < round and places[name] < len(prompts):
                found = measured(model, name, prompts[places[name]])
                row = {"model": model.name, "set": name, "prompt": places[name], **found}
                places[name] += 1
                used[name] += "methods" in found
                out.write(json.dumps(row) + "\n")
                out.flush()
                print(model.name, name, row["prompt"], found.get("unused", "measured"), flush=True)


def read(file: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    )


# -- the tables --------------------------------------------------------------------------------------------------


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """For each model: medians with intervals, differences prompt by prompt, and which prompts were left out."""
    lines: list[str] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        lines += [
            f"## {model}",
            "",
            "| set | prompts | method | components | " + " | ".join(SIZES) + " | CPR | CMD | cost |",
        ]
        lines += ["| --- " * (7 + len(SIZES)) + "|"]
        sets = {
            name: [row["methods"] for row in own if row["set"] == name and "methods" in row]
            for name in dict.fromkeys(row["set"] for row in own)
        }
        for (name, prompts), method in itertools.product(sets.items(), METHODS):
            values = [each[method] for each in prompts if method in each]
            if not values:
                continue
            cells = [said([each[size] for each in values]) for size in SIZES]
            more = [f"{median([each[key] for each in values]):.2f}" for key in ("cpr", "cmd")]
            size = f"{median([each['own size'] for each in values]):.0f}"
            cost = f"{median([each['cost'] for each in values]):.1f}" if method != "random" else ""
            lines.append(
                f"| {name} | {len(values)} | {method} | {size} | " + " | ".join([*cells, *more, cost]) + " |"
            )
        lines += [
            "",
            "| set | "
            + " | ".join(f"less {other}, {size[3:]}" for other in PAIRED for size in SIZES[1:3])
            + " |",
        ]
        lines += ["| --- " * (1 + 2 * len(PAIRED)) + "|"]
        for name, prompts in sets.items():
            cells = [
                said([each["difference"][size] - each[other][size] for each in prompts], sign="+")
                for other in PAIRED
                for size in SIZES[1:3]
            ]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        unused = Counter((row["set"], row["unused"]) for row in own if "unused" in row)
        lines += ["", *(f"- {name}: {count} left out: {why}" for (name, why), count in unused.items()), ""]
    return "\n".join(lines) + "\n"


def said(values: list[float], sign: str = "") -> str:
    """The median and its interval."""
    if not values:
        return ""
    found = median_interval(values)
    return f"{found['median']:{sign}.2f} [{found['low']:{sign}.2f}, {found['high']:{sign}.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, help="a folder of .jsonl files")
    parser.add_argument("--rounds", type=int, default=10, help="prompts of each set")
    parser.add_argument("--report", action="store_true", help="only the tables of what was measured")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / "rows.jsonl"
    if not asked.report:
        if asked.prompts is None:
            raise SystemExit("Give --prompts DIR, a folder of .jsonl files, or --report.")
        study(headtrace.load(asked.model), asked.prompts, asked.rounds, file)
    (asked.out / "results.md").write_text(tables(read(file)), encoding="utf-8")
    print(tables(read(file)))


if __name__ == "__main__":
    main()
