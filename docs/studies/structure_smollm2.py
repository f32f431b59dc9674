"""The structure study: 300 IOI prompts on SmolLM2-135M, merged by roles. Writes networks and
figures.

    python docs/studies/structure_smollm2.py --out build/structure
    python docs/studies/structure_smollm2.py --run runs/ioi --out build/structure

Without --run it traces the prompts itself (fifteen forms, two orders, ten fill-ins; attention paths), which takes one
to two minutes on two cores, and keeps the circuits in circuits.parquet.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import polars as pl

import headtrace
from headtrace.circuits import Circuit, write_parquet
from headtrace.runs.frames import Frames, frames_of
from headtrace.runs.merging import merge, skeleton, trace_network
from headtrace.runs.network import Network
from headtrace.tasks import load_task

MODEL, PER_CELL, CHUNK = "smollm2-135m", 10, 30
DRAWN = 40
READERS = {
    "name mover (end -> IO)": ("end", "IO"),
    "S-inhibition (end -> S2)": ("end", "S2"),
    "end -> S1": ("end", "S1"),
    "induction (S2 -> S1+1)": ("S2", "S1+1"),
    "duplicate token (S2 -> S1)": ("S2", "S1"),
    "previous token (S1+1 -> S1)": ("S1+1", "S1"),
}
"""Where the classes of the published IOI circuits attend."""


def traced(out: Path) -> Frames:
    """The circuits of the prompts, traced in chunks and kept."""
    model = headtrace.load(MODEL)
    examples = list(load_task("ioi", model.tokenizer, n_per_cell=PER_CELL))
    tracer, circuits = headtrace.Tracer(model), list[Circuit]()
    for start in range(0, len(examples), CHUNK):
        circuits += tracer.trace_batch(examples[start : start + CHUNK])
        print(f"{len(circuits)} of {len(examples)} prompts")
    write_parquet(circuits, out / "circuits.parquet")
    right = sum((circuit.root.value or 0) > 0 for circuit in circuits)
    print(f"{right} of {len(circuits)} answered rightly")
    return frames_of(circuits, roles=examples)


def readers(network: Network) -> pl.DataFrame:
    """For each class of the published circuits, the heads that attend where it does, most frequent first."""
    rows: list[dict[str, Any]] = []
    for name, (dest, src) in READERS.items():
        heads = [node for node in network.nodes if (node.kind, node.dest, node.src) == ("head", dest, src)]
        heads.sort(key=lambda node: -node.count)
        rows += [
            {"class": name, "head": f"L{node.layer}H{node.head}", "share": node.count / network.prompts}
            for node in heads[:6]
        ]
    return pl.DataFrame(rows)


def by_order(frames: Frames) -> dict[str, int]:
    """How many prompts there are of each order, known by which of the names comes first."""
    order = pl.when(pl.col("role:IO") < pl.col("role:S1")).then(pl.lit("ABBA")).otherwise(pl.lit("BABA"))
    table = frames.prompts.select(order.alias("order")).collect()
    return dict(table.group_by("order").len().sort("order").iter_rows())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", help="a run of IOI prompts; without it, prompts are traced here")
    parser.add_argument("--out", type=Path, default=Path("build/structure"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    frames = frames_of(given.run) if given.run else traced(given.out)
    networks = {"network": merge(frames), "trace": trace_network(frames), "skeleton": skeleton(frames)}
    for name, network in networks.items():
        print(name, network)
        network.save(given.out / f"{name}.json")
        network.plot(given.out / f"{name}.png", k=DRAWN)
    found = {
        "orders": by_order(frames),
        "sizes": {name: [len(each.nodes), len(each.edges)] for name, each in networks.items()},
        "prompts": networks["network"].prompts,
        "without": networks["network"].without,
        "skeleton_heads": [f"L{layer}H{head}" for layer, head in networks["skeleton"].heads()],
        "readers": readers(networks["network"]).to_dicts(),
        "top": networks["network"].frame().head(DRAWN).to_dicts(),
        "skeleton": networks["skeleton"].frame().to_dicts(),
    }
    (given.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
