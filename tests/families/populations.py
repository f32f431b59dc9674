"""Populations for tests: made-up ones whose families are known, and circuits of the built-in model."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl

import headtrace
from headtrace.circuits import Circuit, Edge, LogitDifference, MethodInfo, ModelInfo, Node, PromptInfo
from headtrace.families import Population
from headtrace.tasks import Example, load_task


def made_up(
    edges: list[tuple[int, int, tuple[int, ...]]],
    *,
    sha: str | None = "ab" * 32,
    name: str = "made-up",
    length: int = 3,
) -> Circuit:
    """A circuit whose edges go from head (0, i) to the query of head (1, j), in channels, and on to the root."""
    places = sorted({(0, i) for i, _, _ in edges} | {(1, j) for _, j, _ in edges})
    ids = {place: 1 + k for k, place in enumerate(places)}
    nodes = [Node(0, "root"), *(Node(ids[p], "head", *p, dest=2, src=1, influence=0.5) for p in places)]
    nodes.append(Node(len(nodes), "embedding", dest=2))
    made = [Edge(ids[(0, i)], ids[(1, j)], "query", 0.1, channels) for i, j, channels in edges]
    made += [Edge(ids[p], 0, "root", 1.0) for p in places if p[0] == 1]
    made += [Edge(len(nodes) - 1, ids[p], "query", 0.1, (0,)) for p in places if p[0] == 1]
    tokens = tuple(f" {i}" for i in range(length))
    return Circuit(
        ModelInfo(name, None, "gpt2", sha),
        PromptInfo(None, tuple(range(length)), tokens),
        LogitDifference(answer=(1,), wrong=(2,), value=1.0),
        MethodInfo("acc++"),
        tuple(nodes),
        tuple(made),
    )


def drawn(
    mechanisms: list[list[int]], per: int, *, seed: int = 0, keep: float = 0.8, noise: int = 2
) -> np.ndarray:
    """Incidence of circuits that each have most items of their mechanism, and a few of any; mechanism by mechanism."""
    rng = np.random.default_rng(seed)
    items = 1 + max(max(m) for m in mechanisms)
    rows = []
    for mechanism in mechanisms:
        for _ in range(per):
            row = np.zeros(items, dtype=np.float32)
            row[[i for i in mechanism if rng.random() < keep]] = 1
            row[rng.integers(0, items, noise)] = 1
            rows.append(row)
    return np.array(rows)


def circuits_of(incidence: np.ndarray) -> list[Circuit]:
    """Circuits whose edges are the items of an incidence."""
    return [
        made_up([(i // 4, i % 4, (1 + i % 3,)) for i in np.flatnonzero(row).tolist()])
        for row in incidence.astype(int)
    ]


@cache
def builtin() -> headtrace.Model:
    return headtrace.load("builtin")


@cache
def traced(task: str, per_cell: int) -> tuple[tuple[Example, ...], tuple[Circuit, ...]]:
    """Examples of a task and their circuits on the built-in model."""
    examples = load_task(task, builtin().tokenizer, n_per_cell=per_cell).examples
    return examples, tuple(headtrace.Tracer(builtin()).trace_batch(list(examples)))


@cache
def ioi() -> Population:
    examples, circuits = traced("ioi", 3)
    return Population.of(
        circuits,
        [e.labels for e in examples],
        [e.roles for e in examples],
        [f"p{i}" for i in range(len(circuits))],
    )


def fake_run(population_circuits: list[Circuit], *, failed: int = 0, **labels: list[str]) -> Any:
    """What a run store gives: lazy tables of prompts, nodes and edges, and circuits by id."""
    ids = [f"prompt-{i}" for i in range(len(population_circuits))]
    prompts: dict[str, Any] = {"id": ids, "index": list(range(len(ids))), "status": ["done"] * len(ids)}
    prompts |= {f"label:{name}": values for name, values in labels.items()}
    prompts["role:end"] = [2] * len(ids)
    table = pl.DataFrame(prompts)
    lost = pl.DataFrame(
        {"id": [f"lost-{i}" for i in range(failed)], "index": range(100, 100 + failed)},
        schema={"id": pl.String, "index": pl.Int64},
    )
    table = pl.concat([lost.with_columns(status=pl.lit("failed")), table], how="diagonal")
    nodes = [
        {"prompt": id, "kind": n.kind, "layer": n.layer, "head": n.head}
        for id, c in zip(ids, population_circuits, strict=True)
        for n in c.nodes
    ]
    edges = [
        {"prompt": id, "channels": None if e.channels is None else list(e.channels)}
        | {
            f"{end}_{key}": getattr(c.node(getattr(e, end)), key)
            for end in ("source", "target")
            for key in ("kind", "layer", "head")
        }
        for id, c in zip(ids, population_circuits, strict=True)
        for e in c.edges
    ]
    by_id = dict(zip(ids, population_circuits, strict=True))
    return SimpleNamespace(
        prompts=table.lazy(),
        nodes=pl.DataFrame(nodes, infer_schema_length=None).lazy(),
        edges=pl.DataFrame(
            edges, infer_schema_length=None, schema_overrides={"channels": pl.List(pl.Int64)}
        ).lazy(),
        circuit=by_id.__getitem__,
    )
