"""Reading and writing: the file ``families.json``, and circuits from runs, tables, folders and single files.

>>> import tempfile
>>> agreed = {"order": {"ari": 1.0, "nmi": 1.0, "p": 0.01}}
>>> file = FamiliesFile("edges", {"a": 1, "b": 1, "c": 2}, {"1": "a", "2": "c"}, agreed)
>>> with tempfile.TemporaryDirectory() as folder:
...     again = load_families(file.save(folder))
>>> again == file, again.members(1)
(True, ['a', 'b'])
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl

from headtrace.circuits import Circuit, named_circuits, read_circuits
from headtrace.circuits.files import RUN
from headtrace.errors import InputError
from headtrace.families.population import Labels, Population
from headtrace.runs.frames import RunLike
from headtrace.runs.manifest import ROLE
from headtrace.validation import Index, Text, checked, file_text, parse
from headtrace.writing import write_report

SCHEMA = "headtrace.families/1"
NAME = "families.json"
T = TypeVar("T")


@checked
class FamiliesFile:
    """The content of ``families.json``. Families are numbered from 1 by decreasing size."""

    grain: Text
    """What circuits were compared by: ``components``, ``edges`` or ``edge-channel``."""
    labels: Mapping[Text, Index] = field(hash=False)
    """The family of each prompt, by its id."""
    representatives: Mapping[Text, Text] = field(hash=False)
    """The prompt whose circuit has the least summed distance to the others of its family, by family."""
    agreement: Mapping[Text, Mapping[Text, float]] = field(hash=False)
    """By label column: the adjusted Rand index, normalised mutual information, and a p-value by permutation."""
    n: Index | None = None
    """How many families there are."""
    left_out: tuple[Text, ...] = ()
    """Prompts that failed, or whose circuits have no edges."""
    more: Mapping[Text, Any] | None = field(default=None, hash=False)
    """How the number was chosen, stability, exclusive edges, their ablation; see the documentation."""

    def members(self, family: int) -> list[str]:
        """The prompts of a family."""
        found = [id for id, each in self.labels.items() if each == family]
        if not found:
            there = ", ".join(map(str, sorted(set(self.labels.values())))) or "none"
            raise InputError(f"There is no family {family}; there are: {there}.")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The content of the file, with its schema."""
        known = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "more"}
        return {"schema": SCHEMA, **known, "left_out": list(self.left_out), **(self.more or {})}

    def save(self, folder: str | Path) -> Path:
        """Write ``families.json`` into a folder."""
        return write_report(Path(folder) / NAME, self.to_dict())


def load_families(path: str | Path) -> FamiliesFile:
    """Read ``families.json``, or that of a folder. For a damaged file, the error names the field."""
    place = Path(path) / NAME if Path(path).is_dir() else Path(path)
    text = file_text(place, "a file of families", f"`headtrace families RUN --out FOLDER` writes {NAME}.")
    try:
        data = parse(text)
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise InputError(f"it is not a file of families (schema {SCHEMA})")
        known = {each.name: data.pop(each.name) for each in fields(FamiliesFile) if each.name in data}
        missing = [name for name in ("grain", "labels", "representatives", "agreement") if name not in known]
        if missing:
            raise InputError(f"{missing[0]}: missing")
        return FamiliesFile(**known, more=data or None)
    except InputError as error:
        raise InputError(f"{str(place)!r}: {error}") from None


# -- where circuits come from --------------------------------------------------------------------------------


def population_of(
    source: RunLike | Population | Sequence[Circuit] | str | Path, labels: Sequence[Labels] | None = None
) -> Population:
    """The population of a run, of circuits, or of a path to either."""
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
    """The run in a folder or at a URL (which only a run can be read from); None if it is not a run."""
    if "://" not in str(place) and not os.path.isfile(os.path.join(place, RUN)):
        return None
    from headtrace.runs import open_run

    return open_run(place)


@dataclass(frozen=True)
class NamedCircuit:
    """A circuit under the name that the user gave, with the positions of its prompt that have roles."""

    name: str
    circuit: Circuit
    roles: dict[str, int] = field(default_factory=dict[str, int])


def circuits_at(source: str) -> list[NamedCircuit]:
    """The circuits of a source: ``c.json``, ``many.parquet``, ``many.parquet#3``, a folder, ``RUN``, ``RUN#id``."""
    place, _, id = source.rpartition("#")
    run = None if os.path.lexists(source) or not place else run_at(place)
    if run is not None:
        return [NamedCircuit(source, run.circuit(id), roles_in(run, id))]
    run = run_at(source)
    if run is None:
        return [NamedCircuit(name, circuit) for name, circuit in named_circuits(source)]
    ids: list[str] = run.prompts.filter(pl.col("status") == "done").sort("index").collect()["id"].to_list()
    return [NamedCircuit(f"{source}#{id}", run.circuit(id), roles_in(run, id)) for id in ids]


def roles_in(run: Any, id: str) -> dict[str, int]:
    """The positions that have a role in a prompt of a run, which is found by id, number, or the start of an id."""
    found = run.prompts.filter(pl.col("id") == run.find(id)["id"]).collect().row(0, named=True)
    return {k.removeprefix(ROLE): v for k, v in found.items() if k.startswith(ROLE) and v is not None}


@dataclass(frozen=True)
class CircuitGroup:
    """Circuits to be compared with others, under a name."""

    name: str
    circuits: list[Circuit]


def circuit_group(source: str, families: str | None = None, *, most: int, seed: int = 0) -> CircuitGroup:
    """The circuits of a source, or of a family of it: at most ``most``, drawn at random.

    What follows ``#`` is a family if a file of families (``families``, or the folder of that name in a run) has it;
    otherwise the id or number of one circuit.
    """
    place, _, name = source.rpartition("#")
    folder = families or os.path.join(place, "families")
    if place and not os.path.lexists(source) and (families or os.path.isfile(os.path.join(folder, NAME))):
        file = load_families(folder)
        if name.isdigit() and int(name) in file.labels.values():
            circuits = run_at(place) or population_of(place)
            found = [circuits.circuit(id) for id in sample(file.members(int(name)), most, seed)]
            return CircuitGroup(f"family {name} of {_short(place)}", found)
        if families is not None:
            there = ", ".join(map(str, sorted(set(file.labels.values()))))
            raise InputError(f"{source}: {folder!r} has no family {name!r}; it has: {there}.")
    return CircuitGroup(_short(source), sample([each.circuit for each in circuits_at(source)], most, seed))


def _short(source: str) -> str:
    return Path(source).name.removesuffix(".json") or source


def sample(values: list[T], most: int | None, seed: int) -> list[T]:
    """At most ``most`` of the values, drawn at random and kept in order."""
    if most is None or len(values) <= most:
        return values
    return [values[place] for place in np.sort(np.random.default_rng(seed).permutation(len(values))[:most])]
