"""Which edges of compiled programs complete circuits find, of all that the weights have.

    python docs/studies/compiled_programs/measure.py build/compiled --prompts 8 --out build/compiled.json

Prompts are random, and the answer is the model's own. There are two truths, both computed from the
weights in numpy (`tests/truth/compiled.py`):

- **path**: an edge is true if it changes, along its path, what the path is followed for;
- **node**: an edge is true if it changes what its own reader does.

An edge that is found counts as extra if neither truth has it, even with up to two other components taken away.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import headtrace
from headtrace.vocabulary import SIDES, Side

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.truth.compiled import (
    as_model,
    edges_by_reader,
    read_weights,
    rotated_weights,
    true_edges,
)
from tests.truth.scoring import Place, found_edges

SHORTEST = 4


def questions(
    model: headtrace.Model, about: dict[str, Any], n: int, seed: Any
) -> Iterator[tuple[list[int], int, int]]:
    """Random prompts whose answer is clear, with another output; classes of answers in turn where there are two."""
    random, tokens, outputs = Random(str(seed)), about["tokens"], about["outputs"]
    vocabulary = [i for i, token in enumerate(tokens) if token not in ("BOS", "compiler_pad")]
    longest, found, tried = (model.max_positions or 0) - 1, 0, 0
    while found < n and tried < 200 * n:
        tried += 1
        ids = [
            tokens.index("BOS"),
            *random.choices(vocabulary, k=random.randint(min(SHORTEST, longest), longest)),
        ]
        logits = model.end_logits([ids])[0].tolist()
        if outputs is None:
            if abs(logits[0]) < 0.01:
                continue
            yield ids, *((0, 1) if logits[0] > 0 else (1, 0))
        else:
            ranked = sorted(range(len(outputs)), key=lambda i: -logits[i])
            if logits[ranked[0]] < logits[ranked[1]] + 0.1:
                continue
            if len(outputs) == 2 and ranked[0] != found % 2 and tried < 100 * n:
                continue
            yield ids, ranked[0], random.choice(ranked[1:])
        found += 1


def measure(folder: Path, program: str, n: int, seed: int, rotated: bool) -> dict[str, Any]:
    about = json.loads((folder / "programs.json").read_text())[program]
    axes = read_weights(folder / f"{program.replace(' ', '_')}.safetensors")
    model = as_model(rotated_weights(axes) if rotated else axes)
    tracer, counts = (
        headtrace.Tracer(model),
        {name: Counter[Side]() for name in ("found", "path", "node", "path found", "node found")},
    )
    beyond, source_missed = Counter[Side](), Counter[Side]()
    missed, extra, prompts, kept = list[Any](), list[Any](), 0, list[float]()
    started = time.process_time()
    tracing = 0.0
    for ids, answer, wrong in questions(as_model(axes), about, n, f"{program} {seed}"):
        prompts += 1
        now = time.process_time()
        circuit = tracer.trace(ids, answer, wrong, root="linear", paths="complete")
        tracing += time.process_time() - now
        found = set(found_edges(circuit, at=0.0))
        truths = {
            "path": true_edges(axes, ids, answer, wrong),
            "node": edges_by_reader(axes, ids, answer, wrong),
        }
        source_only = edges_by_reader(axes, ids, answer, wrong, all_keys=False)
        beyond.update(side for *_, side in found - truths["node"] - source_only)
        source_missed.update(side for *_, side in source_only - found - truths["node"])
        counts["found"].update(side for *_, side in found)
        kept.append(circuit.influence_kept)
        for name, true in truths.items():
            counts[name].update(side for *_, side in true)
            counts[f"{name} found"].update(side for *_, side in true & found)
        surplus = found - truths["path"] - truths["node"] - source_only
        if surplus:
            surplus -= true_edges(axes, ids, answer, wrong, together=2)
        question = {"ids": ids, "answer": answer, "wrong": wrong}
        for edge in sorted(surplus):
            extra.append({**question, "edge": shown(edge)})
        for name, true in truths.items():
            for edge in sorted(true - found):
                missed.append(
                    {**question, "truth": name, "edge": shown(edge), "told": bool(circuit.not_told)}
                )
    return {
        "program": program,
        "rotated": rotated,
        "prompts": prompts,
        "counts": {name: {side: own[side] for side in SIDES} for name, own in counts.items()},
        "extra": extra,
        "beyond": dict(beyond),
        "source missed": dict(source_missed),
        "missed": missed,
        "kept": min(kept, default=1.0),
        "seconds": [tracing, time.process_time() - started],
    }


def shown(edge: Place) -> str:
    source, target, side = edge
    return f"{source} -> {target} {side}"


def row(result: dict[str, Any]) -> str:
    counts = result["counts"]
    cells = [f"{result['program']}{', rotated' * result['rotated']}"]
    for name in ("path", "node"):
        cells += [f"{counts[f'{name} found'][side]}/{counts[name][side]}" for side in SIDES]
    silent = sum(not each["told"] for each in result["missed"] if each["truth"] == "path")
    cells += [
        str(len(result["extra"])),
        str(silent),
        str(result["beyond"]),
        str(result["source missed"]),
        f"{result['kept']:.3f}",
        f"{result['seconds'][0]:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", nargs="*")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--bases", choices=["axes", "rotated", "both"], default="both")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.programs or json.loads((options.folder / "programs.json").read_text())
    bases = {"axes": [False], "rotated": [True], "both": [False, True]}[options.bases]
    results = list[dict[str, Any]]()
    print(f"| program | path: {' | '.join(SIDES)} | node: {' | '.join(SIDES)} | extra | silent | kept | s |")
    for name in names:
        for rotated in bases:
            results.append(measure(options.folder, name, options.prompts, options.seed, rotated))
            print(row(results[-1]), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
