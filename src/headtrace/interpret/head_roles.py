"""What heads are for, as measured scores with names: previous token, same token, induction, first token, copying, ...

>>> import headtrace
>>> roles = head_roles(headtrace.load("builtin"), "sampled:1500")
>>> print(*roles[0, 1])                                                             # L0H1
previous token 0.44 (by chance 0.05)
>>> [role.name for role in roles[1, 2]]
['copying']

A head has a role if its measure (`headtrace.interpret.head_measures`) is at least as large as the role asks for, and
several times what comes out by chance. It may have several, or none: a role is a name for a number over a corpus, not
an explanation. Atlases show the roles of their heads; ``head_roles`` measures them where there is no atlas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from headtrace.interpret.corpus import Corpus, open_corpus
from headtrace.interpret.head_measures import RECORDED, HeadSums

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.progress import Progress

TIMES_CHANCE = 3.0
"""Attention must be this many times what a head has that attends evenly."""
CHUNKS_AT_ONCE = 16


@dataclass(frozen=True)
class RoleRule:
    """When a head has a role."""

    measure: str
    least: float
    sign: int = 1
    """-1 where low values of the measure are what is asked for."""
    about: str = ""


ROLES: dict[str, RoleRule] = {
    "previous token": RoleRule("previous", 0.3, about="attends to the token before"),
    "same token": RoleRule("duplicate", 0.2, about="attends to earlier occurrences of the token"),
    "induction": RoleRule(
        "induction", 0.2, about="attends to what came after earlier occurrences of the token"
    ),
    "copying": RoleRule("copying", 0.5, about="raises the token that it reads above the others of the text"),
    "suppressing": RoleRule(
        "copying", 0.5, -1, about="lowers the token that it reads below the others of the text"
    ),
    "first token": RoleRule("sink", 0.5, about="rests on the first token"),
}
"""The roles that are told, and the least score of each."""


@dataclass(frozen=True)
class HeadRole:
    """A role of a head, with the number that it stands for."""

    name: str
    score: float
    """The measure; for ``suppressing`` with the sign turned."""
    chance: float
    """What would come out by chance."""

    def __str__(self) -> str:
        return f"{self.name} {self.score:.2f} (by chance {self.chance:.2f})"


def roles_by_measure(
    measures: Mapping[str, float | None], chances: Mapping[str, float | None]
) -> tuple[HeadRole, ...]:
    """The roles of a head with these measures, in the order of ``ROLES``.

    >>> roles_by_measure({"previous": 0.8, "copying": -0.9, "sink": None}, {"previous": 0.1, "copying": 0.0})
    (HeadRole(name='previous token', score=0.8, chance=0.1), HeadRole(name='suppressing', score=0.9, chance=-0.0))
    """
    found: list[HeadRole] = []
    for name, rule in ROLES.items():
        value, chance = measures.get(rule.measure), chances.get(rule.measure)
        if value is None or chance is None or value != value or chance != chance:  # NaN: no occasion
            continue
        score, by_chance = rule.sign * value, rule.sign * chance
        if score >= rule.least and score >= TIMES_CHANCE * by_chance:
            found.append(HeadRole(name, score, by_chance))
    return tuple(found)


def roles_of_sums(sums: HeadSums) -> dict[tuple[int, int], tuple[HeadRole, ...]]:
    """The roles of all heads, by layer and head."""
    measures = {name: table.tolist() for name, table in sums.measures().items()}
    chances = {name: table.tolist() for name, table in sums.chances().items()}
    n_layers, n_heads = sums.parts.shape[-3:-1]
    return {
        (layer, head): roles_by_measure(
            {name: table[layer][head] for name, table in measures.items()},
            {name: table[layer][head] for name, table in chances.items()},
        )
        for layer in range(n_layers)
        for head in range(n_heads)
    }


def head_roles(
    model: Model,
    corpus: str | Path | Corpus = "sampled:4096",
    *,
    tokens: int | None = None,
    length: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[tuple[int, int], tuple[HeadRole, ...]]:
    """What every head of a model does over a corpus, by layer and head; the arguments are those of ``scan``."""
    text, sums, read = (
        open_corpus(corpus, model, length=length, seed=seed, tokens=tokens),
        HeadSums.empty(model),
        0,
    )
    chunks = text.chunks()
    while batch := list(islice(chunks, CHUNKS_AT_ONCE)):
        ids = [list(chunk.token_ids) for chunk in batch]
        sums.add(model.record(ids, last_logits=True, keep=RECORDED, patterns="keep"))
        read += sum(map(len, ids))
        if progress is not None:
            progress(read, max(read, text.n_tokens or 0))
    return roles_of_sums(sums)
