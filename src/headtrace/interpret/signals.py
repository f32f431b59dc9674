"""Which signals a scan scores: channels of heads, or what circuits say was written into channels.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> [signal.id for signal in find_signals(model, ["L1H2:3", "L1H2:0+5"])]
['L1H2:3', 'L1H2:0+5']
>>> prompt = "When Mary and John went to the store, John gave a drink to"
>>> circuit = headtrace.Tracer(model).trace(prompt, " Mary", " John")
>>> signal = find_signals(model, circuit)[0]
>>> signal.kind, signal.side in ("query", "key"), signal.name in signal.id.replace(":", " ")
('circuit', True, True)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from headtrace.channels.terms import exact_channels
from headtrace.circuits import Circuit
from headtrace.errors import InputError, shown
from headtrace.interpret.examples import ScoredSignal
from headtrace.interpret.heads import KEPT, HeadSums
from headtrace.vocabulary import head_name

if TYPE_CHECKING:
    from headtrace.interpret.corpus import Corpus
    from headtrace.models import Model

Signals = str | Path | Circuit | ScoredSignal | Iterable[str | Circuit | ScoredSignal]
"""``top:8`` (of every head), ``L9H6:3``, ``L9H6:3+7``, circuits, files of circuits, signals, or a list of such."""

FIRST_CHUNKS = 8
"""Chunks from which the channels of ``top:N`` are chosen."""
_TOP = re.compile(r"\s*top:(\d+)\s*")
_CHANNELS = re.compile(r"\s*L(\d+)H(\d+)\s*:\s*(\d+(?:\+\d+)*)\s*", re.IGNORECASE)


def find_signals(model: Model, asked: Signals, corpus: Corpus | None = None) -> tuple[ScoredSignal, ...]:
    """The signals that are asked for, each once, in the order in which they are asked for."""
    several: list[str | Path | Circuit | ScoredSignal] = (
        [asked] if isinstance(asked, (str, Path, Circuit, ScoredSignal)) else list(asked)
    )
    found: dict[str, ScoredSignal] = {}
    for one in several:
        for signal in _signals_of(model, one, corpus):
            found.setdefault(signal.id, signal)
    if not found:
        raise InputError(
            "There are no signals to score: give channels (top:8, or L9H6:3), or a circuit with query or key edges."
        )
    for signal in found.values():
        _check(model, signal)
    return tuple(found.values())


def _signals_of(
    model: Model, one: str | Path | Circuit | ScoredSignal, corpus: Corpus | None
) -> Sequence[ScoredSignal]:
    if isinstance(one, ScoredSignal):
        return [one]
    if isinstance(one, Circuit):
        return circuit_signals(one)
    text = str(one)
    if top := _TOP.fullmatch(text):
        if corpus is None:
            raise InputError(f"{text!r} are found on a corpus, and there is none.")
        return top_channels(model, corpus, int(top[1]))
    if named := _CHANNELS.fullmatch(text):
        channels = tuple(sorted({int(each) for each in named[3].split("+")}))
        return [_channel(int(named[1]), int(named[2]), channels)]
    if not Path(text.partition("#")[0]).exists():
        raise InputError(
            f"{shown(text)} is neither channels nor a file. Write top:8 for the strongest channels of every head, "
            "L9H6:3 for one, L9H6:3+7 for several together; or give the file of a circuit."
        )
    from headtrace.circuits import read_circuits

    return [signal for circuit in read_circuits(text) for signal in circuit_signals(circuit)]


def _channel(layer: int, head: int, channels: tuple[int, ...]) -> ScoredSignal:
    name = f"{head_name(layer, head)}:{'+'.join(map(str, channels))}"
    return ScoredSignal(name, layer, head, "channel", channels)


def circuit_signals(circuit: Circuit) -> list[ScoredSignal]:
    """The query and key edges of a circuit: the channels that each was written into, at the head that read them."""
    found: list[ScoredSignal] = []
    for number, edge in enumerate(circuit.edges):
        target = circuit.node(edge.target)
        if edge.side not in ("query", "key") or not edge.channels:
            continue
        if target.layer is None or target.head is None:
            continue
        channels = tuple(edge.channels)
        name = f"{head_name(target.layer, target.head)}:{'+'.join(map(str, channels))}"
        found.append(
            ScoredSignal(
                f"{name} {circuit.content_id}:{number}",
                target.layer,
                target.head,
                "circuit",
                channels,
                edge.side,
            )
        )
    return found


def top_channels(model: Model, corpus: Corpus, count: int) -> list[ScoredSignal]:
    """Of every head, the channels with the largest shares over the first chunks of a corpus; lower numbers first
    where shares are equal."""
    if not count:
        raise InputError("top:0 asks for no channels: write top:8 for eight of every head.")
    sums = HeadSums.empty(model)
    for chunk in islice(corpus.chunks(), FIRST_CHUNKS):
        sums.add(model.record([list(chunk.token_ids)], last_logits=True, keep=KEPT, patterns="keep"))
    order = sums.shares().argsort(dim=-1, descending=True, stable=True)
    ranks = exact_channels(model).rank.tolist()
    return [
        _channel(layer, head, (channel,))
        for layer in range(model.n_layers)
        for head in range(model.n_heads)
        for channel in order[layer, head, : min(count, ranks[layer][head])].tolist()
    ]


def _check(model: Model, signal: ScoredSignal) -> None:
    if signal.layer >= model.n_layers or signal.head >= model.n_heads:
        raise InputError(
            f"There is no head {head_name(signal.layer, signal.head)} in {model.name!r}: it has layers 0 to "
            f"{model.n_layers - 1} and heads 0 to {model.n_heads - 1}."
        )
    rank = int(exact_channels(model).at(signal.layer, signal.head).rank)
    wrong = [channel for channel in signal.channels if not 0 <= channel < rank]
    if wrong or not signal.channels:
        what = f"no channel {wrong[0]}" if wrong else "a signal without channels"
        raise InputError(
            f"{signal.id}: {what}; {head_name(signal.layer, signal.head)} has channels 0 to {rank - 1}."
        )
