"""Where populations and circuits come from: runs, one circuit of a run, circuit files, Parquet tables, folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headtrace.circuits import Circuit, named_circuits, read_circuits
from headtrace.circuits.sources import RUN
from headtrace.errors import InputError
from headtrace.families.file import NAME, load_families
from headtrace.families.population import ROLE, Labels, Population
from headtrace.runs.frames import RunLike

T = TypeVar("T")


@dataclass(frozen=True)
class Named:
    """A circuit under the name that a user gave, with the roles of its prompt's positions."""

    name: str
    circuit: Circuit
    roles: dict[str, int] = field(default_factory=dict[str, int])


def population_of(
    source: RunLike | Population | Sequence[Circuit] | str | Path, labels: Sequence[Labels] | None = None
) -> Population:
    """The population of whatever holds circuits."""
    if isinstance(source, Population):
        return source
    if isinstance(source, (str, Path)):
        run = run_at(source)
        return population_of(read_circuits(source) if run is None else run, labels)
    if isinstance(source, Sequence):
        return Population.of(source, labels)
    if labels is not None:
        raise InputError("A run has its labels in its prompts: leave labels=... out.")
    return Population.of_run(source)


def run_at(place: str | Path) -> Any | None:
    """The run in a folder; None where there is none."""
    if not _has_run(str(place)):
        return None
    from headtrace.runs import open_run

    return open_run(place)


def _has_run(place: str) -> bool:
    """Whether it is a run's folder, by the file that marks one, or a URL, which only a run can be read from."""
    return "://" in place or os.path.isfile(os.path.join(place, RUN))


def circuits_at(source: str) -> list[Named]:
    """The circuits of a source: ``c.json``, ``many.parquet``, ``many.parquet#3``, a folder, ``RUN``, ``RUN#id``."""
    place, _, id = source.rpartition("#")
    if not os.path.lexists(source) and place and _has_run(place):
        run = run_at(place)
        return [Named(source, run.circuit(id), roles_in(run, id))] if run is not None else []
    run = run_at(source)
    if run is None:
        return [Named(name, circuit) for name, circuit in named_circuits(source)]
    import polars as pl

    ids: list[str] = run.prompts.filter(pl.col("status") == "done").sort("index").collect()["id"].to_list()
    return [Named(f"{source}#{id}", run.circuit(id), roles_in(run, id)) for id in ids]


def roles_in(run: RunLike, id: str) -> dict[str, int]:
    """The positions that have a role in a prompt of a run."""
    import polars as pl

    # As the run itself finds a circuit: by id, by number, by the beginning of an id.
    number = pl.col("index") == int(id) if id.isdecimal() else pl.lit(False)
    for condition in (pl.col("id") == id, number, pl.col("id").str.starts_with(id)):
        rows = run.prompts.filter(condition).head(1).collect()
        if rows.height:
            row = rows.row(0, named=True)
            return {k.removeprefix(ROLE): v for k, v in row.items() if k.startswith(ROLE) and v is not None}
    return {}


@dataclass(frozen=True)
class Side:
    """Circuits to be compared with others, under a name."""

    name: str
    circuits: list[Circuit]


def side_of(source: str, families: str | None = None, *, most: int, seed: int = 0) -> Side:
    """The circuits of a source, or of a family of it, at most so many.

    What follows ``#`` is a family if there is a file of families (``families``, or the folder of that name in a run)
    that has it; otherwise the id or number of one circuit.
    """
    place, _, name = source.rpartition("#")
    ids = None if os.path.lexists(source) or not place else _family(place, name, families)
    if ids is None:
        return Side(_last(source), _some([each.circuit for each in circuits_at(source)], most, seed))
    run = run_at(place)
    some = _some(ids, most, seed)
    if run is not None:
        found = [run.circuit(id) for id in some]
    else:
        every = population_of(place)
        found = [every.circuit(id) for id in some]
    return Side(f"family {name} of {_last(place)}", found)


def _family(place: str, name: str, families: str | None) -> list[str] | None:
    """The prompts of a family; None where the name is none's."""
    folder = families or os.path.join(place, "families")
    if families is None and not os.path.isfile(os.path.join(folder, NAME)):
        return None
    file = load_families(folder)
    known = name.isdigit() and int(name) in set(file.labels.values())
    if families is not None and not known:
        there = ", ".join(map(str, sorted(set(file.labels.values()))))
        raise InputError(f"{place}#{name}: {folder!r} has no family {name!r}; it has: {there}.")
    return file.members(int(name)) if known else None


def _some(values: list[T], most: int, seed: int) -> list[T]:
    if len(values) <= most:
        return values
    places = np.sort(np.random.default_rng(seed).permutation(len(values))[:most])
    return [values[place] for place in places]


def _last(source: str) -> str:
    return Path(source).name.removesuffix(".json") or source
