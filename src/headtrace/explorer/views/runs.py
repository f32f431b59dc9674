"""A run beside the model: its prompts, its families as a map, its circuits.

>>> import headtrace, tempfile
>>> names = [("Mary", "John"), ("Anna", "Mark"), ("Tom", "Kate")]
>>> texts = [f"When {a} and {b} went to the store, {b} gave a drink to" for a, b in names]
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = headtrace.run("builtin", texts, out=folder, top_k=1)
...     source = RunSource(folder)
...     found, shown = source.prompts("anna", None, 0, 10), source.map()
>>> found.found, found.prompts[0].text[:13], shown.size, shown.families[0].size
(1, 'When Anna and', 3, 3)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.cluster.hierarchy import leaves_list

from headtrace.errors import InputError
from headtrace.explorer.server.schemas import CircuitView, FamilyView, RunMap, RunPage, RunPrompt
from headtrace.explorer.views import snippets
from headtrace.explorer.views.tracing import circuit_view
from headtrace.families import find_families
from headtrace.families.clustering import square
from headtrace.families.population import LABEL
from headtrace.runs import open_run

if TYPE_CHECKING:
    from headtrace.circuits import Circuit
    from headtrace.families.result import Families

MAP = 300
"""So many circuits are on the map at most; every family's representative is among them."""
NAMED = 3
"""So many exclusive edges say what a family has."""


class RunSource:
    """One run. What takes long is computed once, by whichever thread asks first."""

    def __init__(self, place: str | Path) -> None:
        self.place, self.run = str(place), open_run(str(place))
        self._lock = RLock()

    @property
    def name(self) -> str:
        """The folder's own name: not where it is."""
        return Path(self.place.rstrip("/")).name

    def prompts(self, search: str, family: int | None, offset: int, limit: int) -> RunPage:
        """Prompts in the order of the run, whose text, id or labels have ``search`` in them (in any case); of one
        family if it is named (-1: of none)."""
        families = self._known()
        rows = [row for row in self._rows() if _has(row, search.casefold())]
        if family is not None:
            rows = [row for row in rows if families.get(row["id"], (-1, False))[0] == family]
        page = rows[offset : offset + limit]
        circuits = dict(self.run.items([row["id"] for row in page])) if page else {}
        return RunPage(
            found=len(rows),
            offset=offset,
            prompts=[_prompt(row, circuits.get(row["id"]), families.get(row["id"])) for row in page],
        )

    def map(self) -> RunMap:
        """The cluster map."""
        with self._lock:
            return self._map

    def circuit(self, id: str) -> CircuitView:
        """The circuit of a prompt."""
        return circuit_view(self.run.circuit(id), snippets.run_lines(self.place, id))

    # -- computed once -----------------------------------------------------------------------------------------

    def _rows(self) -> list[dict[str, Any]]:
        with self._lock:
            return self._table

    @cached_property
    def _table(self) -> list[dict[str, Any]]:
        labels = [name for name in self.run.prompts.collect_schema().names() if name.startswith(LABEL)]
        chosen = self.run.prompts.sort("index").select("id", "text", "tokens", *labels)
        return chosen.collect().to_dicts()

    def _known(self) -> Mapping[str, tuple[int, bool]]:
        """By prompt, its family and whether it stands for it; nothing where there are too few circuits."""
        with self._lock:
            try:
                families = self._families
            except InputError:
                return {}
            first = set(families.representatives.values())
            return {id: (family, id in first) for id, family in families.labels.items()}

    @cached_property
    def _families(self) -> Families:
        return find_families(self.run)

    @cached_property
    def _map(self) -> RunMap:
        families = self._families
        shown, first = shown_rows(families), families.representatives
        ids, labels = families.population.ids, families.family.tolist()
        distances = square(families.sets.matrix[shown]).astype(np.float64).round(4)
        return RunMap(
            name=self.name,
            size=len(ids),
            grain=families.grain,
            ids=[ids[row] for row in shown],
            family=[labels[row] for row in shown],
            distances=distances.tolist(),
            families=[
                FamilyView(family=f, size=size, representative=first[f], words=_words(families, f))
                for f, size in families.sizes.items()
            ],
        )


def shown_rows(families: Families, most: int = MAP) -> list[int]:
    """Circuits for a map in the order of the tree: all, or every so many of them, and all representatives."""
    order = leaves_list(families.tree).tolist()
    rows = families.population.rows
    wanted = {rows[id] for id in families.representatives.values()}
    if len(order) > most:
        others = [row for row in order if row not in wanted]
        space = max(most - len(wanted), 0)
        places = np.linspace(0, len(others) - 1, space).round().astype(int).tolist() if space else []
        wanted |= {others[place] for place in places}
        order = [row for row in order if row in wanted]
    return order


def _words(families: Families, family: int) -> str:
    """What a family's circuits have that others have not."""
    if families.n == 1:
        return "All circuits are of one family."
    found = families.exclusive(family)
    if not found.height:
        return "No edge that most of its circuits have and hardly any other."
    named: list[str] = found["item"].head(NAMED).to_list()
    more = found.height - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _has(row: Mapping[str, Any], search: str) -> bool:
    told = (row["id"], _text(row), *(str(value) for name, value in row.items() if name.startswith(LABEL)))
    return any(search in each.casefold() for each in told)


def _text(row: Mapping[str, Any]) -> str:
    return row["text"] if row["text"] is not None else "".join(row["tokens"] or ())


def _prompt(row: Mapping[str, Any], circuit: Circuit | None, family: tuple[int, bool] | None) -> RunPrompt:
    return RunPrompt(
        id=row["id"],
        text=_text(row),
        answer=_answer(circuit, "answer_tokens"),
        wrong=_answer(circuit, "wrong_tokens"),
        family=None if family is None else family[0],
        representative=family is not None and family[1],
        labels={name.removeprefix(LABEL): value for name, value in row.items() if name.startswith(LABEL)},
    )


def _answer(circuit: Circuit | None, name: str) -> str | None:
    """The words of an answer, as the circuit has them."""
    words: tuple[str, ...] | None = None if circuit is None else getattr(circuit.root, name, None)
    return None if not words else " / ".join(words)
