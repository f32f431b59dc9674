"""The pages of an atlas: a finder of heads, and a page for each head, which open from disk and load nothing.

    headtrace.explorer.write_atlas_pages(headtrace.interpret.open_atlas("atlas"))

Made like the circuit page (`headtrace.explorer.page`); text of a corpus is only ever shown as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.explorer.page import document, inline_modules, part, scripts
from headtrace.writing import write_text

if TYPE_CHECKING:
    from headtrace.interpret.atlas import Atlas
    from headtrace.interpret.scored_signals import Pair

PAIRS = 12
"""Pairs of each channel on a page; the others are in the tables."""
AROUND = 10
"""Tokens of the context before the source and behind the destination."""
LONGEST = 36
"""Tokens between source and destination that are shown; of more, the middle is left out."""

MEASURES = {
    "sink": ("first token", "Mean attention to the first token, where heads put what they do not need"),
    "previous": ("previous", "Mean attention to the token before"),
    "self": ("itself", "Mean attention to the token itself"),
    "duplicate": (
        "duplicate",
        "Mean attention to earlier occurrences of the same token, where there are any",
    ),
    "induction": (
        "induction",
        "Mean attention to what came right after an earlier occurrence of the token, where there is any",
    ),
    "copying": (
        "copying",
        "Rank of the token read among the text's tokens by what the head adds to their logits: 1 first, -1 last",
    ),
    "entropy": ("entropy", "Mean entropy of the attention of a token, in nats"),
    "distance": ("distance", "Mean distance of what is attended to, in tokens, the first token left out"),
    "top_share": ("top channel", "Share of the strongest channel in what the head attends by"),
    "top_4_share": ("top 4 channels", "Share of the four strongest channels"),
}


def write_atlas_pages(atlas: Atlas) -> Path:
    """Write ``index.html`` and ``heads/*.html`` into the folder of an atlas; the path of the index."""
    channels = _channels(atlas)
    for name, data in _heads(atlas, channels):
        write_text(
            atlas.folder / "heads" / f"{name}.html", _document(f"{name} of {atlas.about['model']}", data)
        )
    title = f"Heads of {atlas.about['model']}"
    return write_text(atlas.folder / "index.html", _document(title, _finder(atlas, channels)))


def _about(atlas: Atlas) -> dict[str, Any]:
    return {name: atlas.about[name] for name in ("model", "corpus", "tokens", "sinks")}


def _channels(atlas: Atlas) -> dict[str, list[dict[str, Any]]]:
    """The channels of every head, strongest first, with their texts read."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in atlas.channels.sort("share", descending=True).iter_rows(named=True):
        row |= {name: json.loads(row[name]) for name in ("tokens", "relations", "notes")}
        found.setdefault(row["head"], []).append(row)
    return found


def _finder(atlas: Atlas, channels: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    heads = [
        {
            "name": row["head"],
            "layer": row["layer"],
            "number": row["number"],
            "roles": [role.name for role in atlas.head(row["layer"], row["number"]).roles],
            "words": _words(channels.get(row["head"], [])),
        }
        | {name: row[name] for name in MEASURES}
        for row in atlas.heads.iter_rows(named=True)
    ]
    return _about(atlas) | {
        "kind": "finder",
        "channels": atlas.channels.height,
        "measures": [{"name": n, "title": title, "about": text} for n, (title, text) in MEASURES.items()],
        "highest": {name: max((head[name] or 0 for head in heads), default=0) for name in MEASURES},
        "heads": heads,
    }


def _words(channels: list[dict[str, Any]]) -> list[str]:
    """What stands out in a head's channels, the strongest of each first, every word once."""
    ranked = [
        (place, each["what"])
        for row in channels
        for kind in ("relations", "tokens")
        for place, each in enumerate(row[kind][:3])
    ]
    return list(dict.fromkeys(what for _, what in sorted(ranked, key=lambda each: each[0])))[:24]


def _heads(atlas: Atlas, channels: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    from headtrace.interpret.head_roles import ROLES

    names = atlas.heads["head"].to_list()
    for place, row in enumerate(atlas.heads.iter_rows(named=True)):
        measures = [
            {"title": title, "about": text, "value": row[name]} for name, (title, text) in MEASURES.items()
        ]
        yield (
            row["head"],
            _about(atlas)
            | {
                "kind": "head",
                "name": row["head"],
                "before": names[place - 1] if place else None,
                "after": names[place + 1] if place + 1 < len(names) else None,
                "roles": [
                    {
                        "name": role.name,
                        "score": role.score,
                        "chance": role.chance,
                        "about": ROLES[role.name].about,
                    }
                    for role in atlas.head(row["layer"], row["number"]).roles
                ],
                "measures": measures,
                "shares": row["shares"],
                "channels": [_channel(atlas, each) for each in channels.get(row["head"], [])],
            },
        )


def _channel(atlas: Atlas, row: dict[str, Any]) -> dict[str, Any]:
    reads = ("query", "key", "opposite_query", "opposite_key")
    quantiles = {each["q"]: each["score"] for each in row["quantiles"]}
    kept = ("number", "share", "highest", "tokens", "relations", "notes")
    return {name: row[name] for name in kept} | {
        "median": quantiles.get(0.5),
        "pairs": [shown_pair(pair) for pair in atlas.examples(row["channel"]).top[:PAIRS]],
        "reads": {name: [each["token"] for each in row[name]] for name in reads},
    }


def shown_pair(pair: Pair) -> dict[str, Any]:
    """A pair with as much of its context as one reads: around both tokens, and what is between them if it is not long.

    >>> from headtrace.interpret.scored_signals import Pair
    >>> shown = shown_pair(Pair("text", 90, 5, 1.0, tuple(range(95)), tuple(f" {n}" for n in range(95))))
    >>> shown["src"], shown["tokens"][shown["src"]], shown["tokens"][shown["dest"]], len(shown["tokens"])
    (5, ' 5', ' 90', 47)
    """
    start, end = max(0, pair.src - AROUND), min(len(pair.tokens), pair.dest + AROUND + 1)
    places: list[int | None] = list(range(start, end))
    if pair.dest - pair.src > LONGEST:
        half = LONGEST // 2
        places = [*range(start, pair.src + half), None, *range(pair.dest - half, end)]
    return {
        "score": pair.score,
        "cut": start > 0,
        "dest": places.index(pair.dest),
        "src": places.index(pair.src),
        "tokens": [" … " if place is None else pair.tokens[place] for place in places],
    }


def _document(title: str, data: dict[str, Any]) -> str:
    style = part("theme.css") + part("style.css", "atlas")
    return document(part("template.html", "atlas"), title=title, style=style, script=_script(), data=data)


@cache
def _script() -> str:
    """The modules of the atlas, and those of the circuit page that they use."""
    shared = {name: part(name) for name in ("dom.js", "text.js", "theme.js")}
    return inline_modules(shared | scripts("atlas"), "main.js", "start")
