"""The tables of a run besides nodes and edges (`headtrace.circuits.rows`): its plan, its prompts and its signals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headtrace.circuits import Circuit, Edge
from headtrace.circuits.rows import column_types, edge_table, node_table, rest_columns

LABEL, ROLE = "label:", "role:"
"""How columns begin that hold a prompt's labels, and the positions of its roles."""
DONE, FAILED = "done", "failed"
Outcome = Circuit | str
"""The result of a prompt: its circuit, or why there is none."""
_PLANNED = {
    "id": pa.string(),
    "index": pa.int64(),
    "text": pa.string(),
    "token_ids": pa.list_(pa.int64()),
    "tokens": pa.list_(pa.string()),
    "answer": pa.list_(pa.int64()),
    "wrong": pa.list_(pa.int64()),
    "root": pa.string(),
    "request": pa.string(),
    "problem": pa.string(),
}


def plan_schema(labels: Sequence[str], roles: Sequence[str]) -> dict[str, pa.DataType]:
    """The columns of a plan whose prompts have these labels and roles."""
    own = {LABEL + name: pa.string() for name in labels} | {ROLE + name: pa.int64() for name in roles}
    return {**_PLANNED, **own}


def reason_of(outcome: Outcome) -> str | None:
    """Why a prompt failed; None for a circuit that explains something."""
    if isinstance(outcome, str):
        return outcome
    return None if outcome.reason is None else f"no circuit: {outcome.reason}"


def prompt_table(plan: pa.Table, shard: int, outcomes: Sequence[Outcome]) -> pa.Table:
    """A shard's prompts: their columns of the plan, their outcomes, and what circuits have besides their graphs."""
    circuits = [found if isinstance(found, Circuit) else None for found in outcomes]
    reasons = [reason_of(found) for found in outcomes]
    status = [DONE if reason is None else FAILED for reason in reasons]
    own = [name for name in plan.column_names if name.startswith((LABEL, ROLE))]
    columns: dict[str, Any] = {name: plan[name] for name in ("id", "index")}
    columns["shard"] = pa.array([shard] * len(outcomes), pa.int64())
    columns |= {name: plan[name] for name in ("text", "token_ids", "tokens", "answer", "wrong")}
    columns["status"] = pa.array(status, pa.string())
    columns["reason"] = pa.array(reasons, pa.string())
    columns["root_value"] = pa.array([c.root.value if c else None for c in circuits], pa.float64())
    columns["n_nodes"] = pa.array([len(c.nodes) if c else None for c in circuits], pa.int64())
    columns["n_edges"] = pa.array([len(c.edges) if c else None for c in circuits], pa.int64())
    columns |= {name: plan[name] for name in own}
    columns |= {name: pa.array(texts, pa.string()) for name, texts in rest_columns(circuits).items()}
    return pa.table(columns)


def signal_table(keys: Sequence[tuple[str, Edge]], vectors: Sequence[Any]) -> pa.Table:
    """Signals, each a vector of d_model numbers, by prompt, source, target and side."""
    columns = {"prompt": pa.array([name for name, _ in keys], pa.string())}
    for field in ("source", "target", "side"):
        columns[field] = pa.array([getattr(edge, field) for _, edge in keys], column_types(Edge)[field])
    return pa.table({**columns, "signal": pa.array(vectors, pa.list_(pa.float32()))})


def empty_table(table: str, labels: Sequence[str], roles: Sequence[str]) -> pa.Table:
    """A table of a shard without rows."""
    if table == "prompts":
        plan = {name: pa.array([], kind) for name, kind in plan_schema(labels, roles).items()}
        return prompt_table(pa.table(plan), 0, [])
    return {"nodes": node_table([]), "edges": edge_table([]), "signals": signal_table([], [])}[table]
