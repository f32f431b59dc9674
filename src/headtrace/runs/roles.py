"""Names for positions, so that circuits of different sentences can be laid over each other.

A position is called by its role (``IO``, ``S1``, ``S2``, ``end`` in IOI). The token after S1 is ``S1+1``, as in the
literature; the first token is ``BOS`` where it is a special one and ``first`` where it is a word, and everything else
is ``other``. Where two names fit, a role comes before a neighbour, a neighbour before the first token; of two roles
at one position, the one whose column comes first.

>>> from headtrace.circuits.describe import example
>>> from headtrace.runs.frames import frames_of
>>> frames = frames_of([example()], roles=[{"end": 1}])
>>> named(frames, "roles").sort("position").collect().rows()
[('0', 0, 'first'), ('0', 1, 'end')]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import polars as pl

from headtrace.errors import InputError
from headtrace.runs.frames import ROLE, Frames

By = Literal["roles", "positions"]
OTHER, FIRST, BOS = "other", "first", "BOS"
AFTER = ("S1",)
"""Roles whose next token has a name of its own."""
_SPECIAL = r"^(<.*>|\[.*\])$"
"""How special tokens read: ``<|endoftext|>``, ``<s>``, ``[CLS]``."""


def chosen(frames: Frames, by: By | None) -> By:
    """By roles wherever there are some."""
    if by not in ("roles", "positions", None):
        raise InputError(f"by={by!r}: expected 'roles' or 'positions'.")
    names = [f"{ROLE}{name}" for name in frames.roles]
    known = (
        bool(names)
        and not frames.prompts.select(pl.all_horizontal(pl.col(names).is_null().all())).collect().item()
    )
    if by == "roles" and not known:
        raise InputError(
            "These circuits say nothing of roles. Merge them by positions, or use a run of a task, or give roles= in "
            "Python (the examples they were traced from)."
        )
    return by or ("roles" if known else "positions")


def named(frames: Frames, by: By, after: Sequence[str] = AFTER) -> pl.LazyFrame:
    """The positions that have a name: ``prompt``, ``position``, ``place``. By positions, none has."""
    prompts = frames.prompts
    if by == "positions":
        return prompts.head(0).select(prompt="id", position=pl.lit(0, pl.Int64), place=pl.lit("", pl.String))
    names = frames.roles
    tables = [_at(prompts, pl.col(f"{ROLE}{name}"), pl.lit(name)) for name in names]
    tables += [
        _at(prompts, pl.col(f"{ROLE}{name}") + 1, pl.lit(f"{name}+1")) for name in names if name in after
    ]
    tables.append(_at(prompts, pl.lit(0), _first(prompts)))
    order = [table.with_columns(rank=pl.lit(rank)) for rank, table in enumerate(tables)]
    return (
        pl.concat(order)
        .drop_nulls("position")
        .sort("rank")
        .unique(("prompt", "position"), keep="first", maintain_order=True)
        .drop("rank")
    )


def _at(prompts: pl.LazyFrame, position: pl.Expr, place: pl.Expr) -> pl.LazyFrame:
    return prompts.select(prompt="id", position=position.cast(pl.Int64), place=place)


def _first(prompts: pl.LazyFrame) -> pl.Expr:
    """A special token is known by how it reads, where the tokens are known."""
    if prompts.collect_schema().get("tokens") != pl.List(pl.String):
        return pl.lit(FIRST)
    special = pl.col("tokens").list.first().str.contains(_SPECIAL)
    return pl.when(special).then(pl.lit(BOS)).otherwise(pl.lit(FIRST))


def with_places(table: pl.LazyFrame, names: pl.LazyFrame, by: By, columns: Sequence[str]) -> pl.LazyFrame:
    """The table with places (text) in the columns that held positions."""
    for column in columns:
        position, place = pl.col(column), pl.col(column).cast(pl.String)
        if by == "roles":
            there = names.select("prompt", pl.col("position").alias(column), name="place")
            table = table.join(there, on=("prompt", column), how="left")
            place = pl.when(position.is_not_null()).then(pl.col("name").fill_null(OTHER))
        table = table.with_columns(place.alias(column)).drop("name", strict=False)
    return table


def in_order(frames: Frames, names: pl.LazyFrame, by: By) -> tuple[str, ...]:
    """The places that nodes sit at or read, from the left to the right of a sentence: by their mean position."""
    seen = pl.concat(
        [
            frames.nodes.select("prompt", at=column, where=column).drop_nulls("where")
            for column in ("dest", "src")
        ]
    )
    means = with_places(seen, names, by, ("at",)).group_by("at").agg(pl.col("where").mean())
    return tuple(means.sort("where", "at").collect()["at"])
