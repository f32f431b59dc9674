"""Signals (channels of heads, or edges of circuits), their scores at every token pair, and the pairs kept of them.

>>> pair = Pair("text 0", dest=2, src=0, score=1.5, token_ids=(5, 7, 5), tokens=(" a", " b", " a"))
>>> pair.marked()
'[[ a]] b<< a>>'

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> [signal.id for signal in find_signals(model, ["L1H2:3", "L1H2:0+5"])]
['L1H2:3', 'L1H2:0+5']
>>> prompt = "When Mary and John went to the store, John gave a drink to"
>>> recording = model.record(prompt)
>>> every = "+".join(map(str, range(32)))
>>> (block,) = score_blocks(model, find_signals(model, f"L1H2:{every}"), length=15)
>>> scores = block.scores(recording, 0)                      # all channels together: the attention logit
>>> torch.allclose(scores[0], recording.raw_logits(1)[0, 2], atol=1e-3)
True

The score of a channel is the product of its query and its key coefficient. Queries and keys are taken as attention uses
them, after biases, QK-norm and rotary positions, so the scores of all channels sum to the attention logit before any
softcap (for a rank-deficient head: to the part of it that its channels carry).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.channels.terms import exact_channels
from headtrace.circuits import Circuit, read_circuits
from headtrace.circuits.parts import mark
from headtrace.errors import InputError, shown
from headtrace.interpret.head_roles import RECORDED, HeadSums
from headtrace.models.devices import exact, rounded
from headtrace.vocabulary import head_name

if TYPE_CHECKING:
    from headtrace.interpret.corpus import Corpus
    from headtrace.models import Model, Recording

FIRST_LEFT_OUT = "pairs whose source is the first token are left out"
"""A note of most scans: such pairs would fill every list."""


@dataclass(frozen=True)
class ScoredSignal:
    """Some channels of a head, whose scores are summed at every pair of destination and source."""

    id: str
    """Unique within a scan: ``L9H6:3`` for a channel, ``L9H6:3+7 <content id>:<edge>`` for an edge of a circuit."""
    layer: int
    head: int
    kind: Literal["channel", "circuit"]
    channels: tuple[int, ...]
    side: Literal["query", "key"] | None = None
    """For an edge of a circuit: the side of the head that it was written to."""

    @property
    def name(self) -> str:
        """The head and its channels: ``L9H6 3+7``."""
        return f"{head_name(self.layer, self.head)} {'+'.join(map(str, self.channels))}"

    @property
    def reads(self) -> tuple[int, int, tuple[int, ...]]:
        """Layer, head and sorted channels: signals that agree in them have the same scores."""
        return self.layer, self.head, tuple(sorted(self.channels))

    @property
    def edge(self) -> tuple[str, int] | None:
        """The content id of the circuit that the signal was taken from, and the number of the edge in it.

        >>> ScoredSignal("L9H6:3 ab12:40", 9, 6, "circuit", (3,), "query").edge
        ('ab12', 40)
        """
        circuit, _, edge = self.id.partition(" ")[2].rpartition(":")
        return (circuit, int(edge)) if circuit and edge.isdigit() else None


@dataclass(frozen=True)
class Pair:
    """A destination and a source in their context, with the signal's score there."""

    text: str
    """The id of the chunk of the corpus."""
    dest: int
    """Position of the attending token within ``token_ids``."""
    src: int
    """Position of the token attended to; never after ``dest``."""
    score: float
    token_ids: tuple[int, ...]
    """The context, up to the destination or a little further."""
    tokens: tuple[str, ...]

    @property
    def place(self) -> tuple[str, int, int]:
        """Chunk, destination and source: equal for the same pair of tokens, whatever signal scored it."""
        return self.text, self.dest, self.src

    def marked(self) -> str:
        """The context with the source in ``[[...]]`` and the destination in ``<<...>>``."""
        return mark(self.tokens, self.dest, self.src)

    def excerpt(self, around: int = 8) -> str:
        """The marked tokens with a few around each; omitted tokens are shown as ``...``.

        >>> tokens = tuple(f" {i}" for i in range(9))
        >>> Pair("", dest=7, src=1, score=1.0, token_ids=tuple(range(9)), tokens=tokens).excerpt(around=1)
        ' 0[[ 1]] 2 ... 6<< 7>> 8'
        """
        kept = {
            position
            for centre in (self.src, self.dest)
            for position in range(max(0, centre - around), min(len(self.tokens), centre + around + 1))
        }
        words: list[str] = []
        for position in sorted(kept):
            if position and position - 1 not in kept:
                words.append(" ...")
            word = f"[[{self.tokens[position]}]]" if position == self.src else self.tokens[position]
            words.append(f"<<{word}>>" if position == self.dest else word)
        return "".join(words) + ("" if max(kept) == len(self.tokens) - 1 else " ...")


@dataclass(frozen=True)
class SignalExamples:
    """The pairs that a scan keeps of one signal."""

    signal: ScoredSignal
    top: tuple[Pair, ...]
    """The pairs with the highest scores, highest first."""
    random: tuple[Pair, ...]
    """A uniform sample of all causal pairs."""
    middle: tuple[Pair, ...] = ()
    """Pairs that score near the median of the positive scores: hard to tell from the top."""
    quantiles: tuple[tuple[float, float], ...] = ()
    """(q, score), over all causal pairs."""
    n_pairs: int = 0
    """How many pairs were scored."""
    notes: tuple[str, ...] = ()
    """Caveats, such as that no score was above zero."""


# -- Which signals a scan scores ---------------------------------------------------------------------------------

Signals = str | Path | Circuit | ScoredSignal | Iterable[str | Circuit | ScoredSignal]
"""``top:8`` (of every head), ``L9H6:3``, ``L9H6:3+7``, circuits, files of circuits, signals, or a list of such."""

FIRST_CHUNKS = 8
"""Chunks from which the channels of ``top:N`` are chosen."""
SCORES_AT_ONCE = 1 << 21
"""Scores computed together: few enough to stay in a processor's cache."""
_TOP = re.compile(r"\s*top:(\d+)\s*")
_CHANNELS = re.compile(r"\s*L(\d+)H(\d+)\s*:\s*(\d+(?:\+\d+)*)\s*", re.IGNORECASE)


def find_signals(model: Model, signals: Signals, corpus: Corpus | None = None) -> tuple[ScoredSignal, ...]:
    """The signals that a specification names, each once, in its order. ``top:N`` is measured on ``corpus``."""
    specified = [signals] if isinstance(signals, (str, Path, Circuit, ScoredSignal)) else signals
    found: dict[str, ScoredSignal] = {}
    for each in specified:
        for signal in _parse(model, each, corpus):
            found.setdefault(signal.id, signal)
    if not found:
        raise InputError(
            "There are no signals to score: give channels (top:8, or L9H6:3), or a circuit with query or key edges."
        )
    for signal in found.values():
        name = head_name(signal.layer, signal.head)
        if signal.layer >= model.n_layers or signal.head >= model.n_heads:
            raise InputError(
                f"There is no head {name} in {model.name!r}: it has layers 0 to {model.n_layers - 1} and heads 0 to "
                f"{model.n_heads - 1}."
            )
        rank = int(exact_channels(model).at(signal.layer, signal.head).rank)
        wrong = [channel for channel in signal.channels if not 0 <= channel < rank]
        if wrong or not signal.channels:
            what = f"no channel {wrong[0]}" if wrong else "a signal without channels"
            raise InputError(f"{signal.id}: {what}; {name} has channels 0 to {rank - 1}.")
    return tuple(found.values())


def _parse(
    model: Model, given: str | Path | Circuit | ScoredSignal, corpus: Corpus | None
) -> Sequence[ScoredSignal]:
    if isinstance(given, ScoredSignal):
        return [given]
    if isinstance(given, Circuit):
        return circuit_signals(given)
    text = str(given)
    if top := _TOP.fullmatch(text):
        if corpus is None:
            raise InputError(f"{text!r} is measured on a corpus, and none was given.")
        return top_channels(model, corpus, int(top[1]))
    if named := _CHANNELS.fullmatch(text):
        channels = tuple(sorted({int(each) for each in named[3].split("+")}))
        return [_channel_signal(int(named[1]), int(named[2]), channels)]
    if not Path(text.partition("#")[0]).exists():
        raise InputError(
            f"{shown(text)} is neither channels nor a file. Write top:8 for the strongest channels of every head, "
            "L9H6:3 for one, L9H6:3+7 for several together; or give the file of a circuit."
        )
    return [signal for circuit in read_circuits(text) for signal in circuit_signals(circuit)]


def _channel_signal(layer: int, head: int, channels: tuple[int, ...]) -> ScoredSignal:
    name = f"{head_name(layer, head)}:{'+'.join(map(str, channels))}"
    return ScoredSignal(name, layer, head, "channel", channels)


def circuit_signals(circuit: Circuit) -> list[ScoredSignal]:
    """The query and key edges of a circuit: the channels that each was written into, at the head that read them."""
    found: list[ScoredSignal] = []
    for number, edge in enumerate(circuit.edges):
        layer, head = circuit.node(edge.target).layer, circuit.node(edge.target).head
        if edge.side not in ("query", "key") or not edge.channels or layer is None or head is None:
            continue
        channels = tuple(edge.channels)
        name = f"{_channel_signal(layer, head, channels).id} {circuit.content_id}:{number}"
        found.append(ScoredSignal(name, layer, head, "circuit", channels, edge.side))
    return found


def top_channels(model: Model, corpus: Corpus, count: int) -> list[ScoredSignal]:
    """The ``count`` channels of every head with the largest shares over the first chunks of a corpus.

    Among equal shares the lower channel number comes first.
    """
    if not count:
        raise InputError("top:0 asks for no channels: write top:8 for eight of every head.")
    sums = HeadSums.empty(model)
    for chunk in islice(corpus.chunks(), FIRST_CHUNKS):
        sums.add(model.record([list(chunk.token_ids)], last_logits=True, keep=RECORDED, patterns="keep"))
    order = sums.shares().argsort(dim=-1, descending=True, stable=True)
    ranks = exact_channels(model).rank.tolist()
    return [
        _channel_signal(layer, head, (channel,))
        for layer in range(model.n_layers)
        for head in range(model.n_heads)
        for channel in order[layer, head, : min(count, ranks[layer][head])].tolist()
    ]


# -- Their scores ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SignalBlock:
    """Some signals of one layer, scored together."""

    layer: int
    rows: Int[Tensor, " signal"]
    """Their indices among all signals, on the CPU."""
    head: Int[Tensor, " signal"]
    to_query: Float[Tensor, "signal d_head channel"]
    to_key: Float[Tensor, "signal d_head channel"]
    """Directions of each signal's channels; zero where it has fewer than the widest."""

    @torch.inference_mode()
    def scores(self, recording: Recording, prompt: int) -> Float[Tensor, "signal dest src"]:
        """Scores at every pair of a prompt, whether or not the head may attend there.

        Coefficients are computed in float64, where the inverse of an ill-conditioned W_K is exact; their products in
        the model's dtype.
        """
        length, group = recording.lengths[prompt], recording.model.weights.group
        queries = exact(recording.queries[self.layer, prompt, :, :length])[self.head]
        keys = exact(recording.keys[self.layer, prompt, :, :length])[self.head // group]
        a = (queries @ self.to_query) * recording.scales[self.layer]
        b = keys @ self.to_key
        return rounded(a, like=recording.queries) @ rounded(b, like=recording.queries).mT


def score_blocks(model: Model, signals: Sequence[ScoredSignal], length: int) -> list[SignalBlock]:
    """All signals, in blocks of bounded size for prompts of ``length`` tokens.

    A block is of one layer; signals with similarly many channels share one.
    """
    at_once = max(1, SCORES_AT_ONCE // length**2)
    by_size = sorted(range(len(signals)), key=lambda i: (signals[i].layer, len(signals[i].channels), i))
    groups: list[list[int]] = []
    for row in by_size:
        if not groups or signals[groups[-1][0]].layer != signals[row].layer or len(groups[-1]) >= at_once:
            groups.append([])
        groups[-1].append(row)
    blocks: list[SignalBlock] = []
    for rows in groups:
        layer, width = signals[rows[0]].layer, max(len(signals[row].channels) for row in rows)
        basis = exact_channels(model).layer(layer)
        to_query, to_key = (basis.to_query.new_zeros(len(rows), model.d_head, width) for _ in range(2))
        for place, row in enumerate(rows):
            head, channels = signals[row].head, list(signals[row].channels)
            to_query[place, :, : len(channels)] = basis.to_query[head][:, channels]
            to_key[place, :, : len(channels)] = basis.to_key[head][:, channels]
        heads = torch.tensor([signals[row].head for row in rows], device=to_query.device)
        blocks.append(SignalBlock(layer, torch.tensor(rows), heads, to_query, to_key))
    return blocks
