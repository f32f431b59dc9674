"""The panels that show circuits: one that is traced while one watches, and those of a finished run.

>>> import headtrace
>>> session = Session([headtrace.load("builtin")])
>>> text = "When Mary and John went to the store, John gave a drink to"
>>> request = TraceRequest.create(text, answer=" Mary", wrong=" John")
>>> sizes = []
>>> view, circuit = trace(session, request, partial=lambda found: sizes.append(len(found.edges)))
>>> sizes == sorted(sizes), sizes[0] < sizes[-1] == len(circuit.edges)
(True, True)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.cluster.hierarchy import leaves_list

from headtrace.errors import InputError
from headtrace.explorer.page import mechanism_data, page_data
from headtrace.explorer.panels.requests import View, python_lines
from headtrace.explorer.panels.session import Session
from headtrace.families import find_families
from headtrace.families.clustering import square
from headtrace.models.integrity import difference, warn_if_not_compared
from headtrace.request import TraceRequest
from headtrace.runs import open_run
from headtrace.runs.manifest import LABEL

if TYPE_CHECKING:
    from headtrace.circuits import Circuit
    from headtrace.families.result import Families
    from headtrace.models import Model
    from headtrace.progress import Progress


class CircuitView(View):
    """A circuit: its file's data with what the drawing adds (`headtrace.explorer.page.page_data`)."""

    circuit: dict[str, Any]
    python: str
    mechanism: dict[str, Any] | None = None
    """Of a circuit of a run: what its own file says of its steps, for the drawing; nothing is measured anew."""


def trace(
    session: Session,
    request: TraceRequest,
    model: int = 0,
    progress: Progress | None = None,
    partial: Callable[[Circuit], None] | None = None,
) -> tuple[CircuitView, Circuit]:
    """Trace a circuit. ``partial`` is called with the circuit as it grows; it and ``progress`` may raise to stop."""
    session.resolve(request, model)  # within the limits of the server
    circuit = session.tracer(request, model).trace(request, progress=progress, on_partial=partial)
    lines = ("circuit = tracer.trace({request})", "print(circuit.summary())")
    python = python_lines(request, session.models[model], *lines)
    return CircuitView(circuit=page_data(circuit), python=python), circuit


# -- a run -----------------------------------------------------------------------------------------------------

MAP = 300
"""Most circuits on the map; every family's representative is among them."""
NAMED = 3
"""How many exclusive edges describe a family."""


class RunPrompt(View):
    id: str
    text: str
    answer: str | None
    wrong: str | None
    family: int | None
    representative: bool
    labels: dict[str, Any]


class RunPage(View):
    """Prompts of the run that a search found."""

    found: int
    offset: int
    prompts: list[RunPrompt]


class FamilyView(View):
    family: int
    size: int
    representative: str
    words: str
    """Edges that its circuits have and others do not, in a line."""
    colour: str
    """As in the figures of `headtrace families`."""


class RunMap(View):
    """The cluster map: circuits in the order of the clustering tree, and their pairwise distances (0: equal, 1: nothing
    in common). Of a large run, a sample that has all representatives."""

    name: str
    size: int
    grain: str
    ids: list[str]
    family: list[int]
    distances: list[list[float]]
    families: list[FamilyView]


class RunSource:
    """One run. Families and the map are computed once, when they are first needed.

    >>> import headtrace, tempfile
    >>> names = [("Mary", "John"), ("Anna", "Mark"), ("Tom", "Kate")]
    >>> texts = [f"When {a} and {b} went to the store, {b} gave a drink to" for a, b in names]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = headtrace.run("builtin", texts, out=folder, top_k=1)
    ...     source = RunSource(folder)
    ...     found, shown = source.prompts("anna", None, 0, 10), source.map
    >>> found.found, found.prompts[0].text[:13], shown.size, shown.families[0].size
    (1, 'When Anna and', 3, 3)
    """

    def __init__(self, place: str | Path) -> None:
        self.place, self.run = str(place), open_run(str(place))

    def require_model(self, models: Sequence[Model]) -> None:
        """An error if the run was traced on none of these models: its circuits would be taken for theirs."""
        kept = self.run.manifest.model
        others = [difference(kept, model) for model in models]
        if all(others):
            raise InputError(
                f"The run {self.name!r} was traced on another model than {models[0].name!r}: {kept.name!r} has "
                f"{others[0]}. Serve the model that it was traced on, or a run of this one."
            )
        warn_if_not_compared(f"The run {self.name!r}", kept)

    @property
    def name(self) -> str:
        """The folder's name, without its path."""
        return Path(self.place.rstrip("/")).name

    def prompts(self, search: str, family: int | None, offset: int, limit: int) -> RunPage:
        """Prompts in the order of the run whose text, id or labels contain ``search`` (in any case); with ``family``,
        only those of this family (-1: of none)."""
        families = self._families_by_prompt
        rows = [row for row in self._rows if _matches(row, search.casefold())]
        if family is not None:
            rows = [row for row in rows if families.get(row["id"], (-1, False))[0] == family]
        page = rows[offset : offset + limit]
        circuits = dict(self.run.items([row["id"] for row in page])) if page else {}
        prompts: list[RunPrompt] = []
        for row in page:
            circuit, (number, first) = circuits.get(row["id"]), families.get(row["id"], (None, False))
            prompt = RunPrompt(
                id=row["id"],
                text=_text(row),
                answer=_answer(circuit, "answer_tokens"),
                wrong=_answer(circuit, "wrong_tokens"),
                family=number,
                representative=first,
                labels={n.removeprefix(LABEL): value for n, value in row.items() if n.startswith(LABEL)},
            )
            prompts.append(prompt)
        return RunPage(found=len(rows), offset=offset, prompts=prompts)

    def circuit(self, id: str) -> CircuitView:
        """The circuit of a prompt."""
        lines = ["import headtrace", "", f"run = headtrace.open_run({self.place!r})"]
        lines += [f"circuit = run.circuit({id!r})", "print(circuit.summary())"]
        circuit = self.run.circuit(id)
        found = circuit.mechanism() if circuit.edges else None
        mechanism = mechanism_data(found) if found is not None and found.steps else None
        return CircuitView(circuit=page_data(circuit), python="\n".join(lines), mechanism=mechanism)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        labels = [name for name in self.run.prompts.collect_schema().names() if name.startswith(LABEL)]
        chosen = self.run.prompts.sort("index").select("id", "text", "tokens", *labels)
        return chosen.collect().to_dicts()

    @cached_property
    def _families(self) -> Families:
        return find_families(self.run)

    @cached_property
    def _families_by_prompt(self) -> Mapping[str, tuple[int, bool]]:
        """By prompt, its family and whether it represents it; empty where there are too few circuits."""
        try:
            families = self._families
        except InputError:
            return {}
        first = set(families.representatives.values())
        return {id: (family, id in first) for id, family in families.labels.items()}

    @cached_property
    def map(self) -> RunMap:
        """The cluster map."""
        from headtrace.figures.families import colours_of

        families = self._families
        colours = colours_of(families.sizes)
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
                FamilyView(
                    family=f,
                    size=size,
                    representative=first[f],
                    words=_words(families, f),
                    colour=colours[f],
                )
                for f, size in families.sizes.items()
            ],
        )


def shown_rows(families: Families, most: int = MAP) -> list[int]:
    """Circuits for a map in the order of the tree: all, or an even sample with all representatives."""
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
    """Edges that a family's circuits have and others do not."""
    if families.n == 1:
        return "All circuits are of one family."
    found = families.exclusive(family)
    if not found.height:
        return "No edge that most of its circuits have and hardly any other."
    named: list[str] = found["item"].head(NAMED).to_list()
    more = found.height - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _matches(row: Mapping[str, Any], search: str) -> bool:
    labels = (str(value) for name, value in row.items() if name.startswith(LABEL))
    return any(search in each.casefold() for each in (row["id"], _text(row), *labels))


def _text(row: Mapping[str, Any]) -> str:
    return row["text"] if row["text"] is not None else "".join(row["tokens"] or ())


def _answer(circuit: Circuit | None, name: str) -> str | None:
    """The text of an answer, as the circuit has it."""
    words: tuple[str, ...] | None = None if circuit is None else getattr(circuit.root, name, None)
    return None if not words else " / ".join(words)
