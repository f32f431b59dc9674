"""Pairs of models whose heads attend by known features, scored by the heads' channels in the tests themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from random import Random

import headtrace
from headtrace.interpret import Pair, ScoredSignal, SignalExamples
from headtrace.vocabulary import head_name
from tests.truth.blueprint import Blueprint, Features, Head, as_gpt2
from tests.truth.known import KNOWN, blueprint, either, previous_token

KEPT = 40
MATCH = 0.7
"""A score of this share of the highest is a match: the gains of a head's features differ by less."""
CLASS = range(4, 9)
"""The tokens that a head of the model below looks for."""


def scored(
    model: headtrace.Model,
    layer: int,
    head: int,
    texts: Iterable[Sequence[int]],
    channels: Sequence[int] | None = None,
    first: int = 0,
    kept: int = KEPT,
) -> SignalExamples:
    """What a scan keeps of some channels of a head (all of them, if not given) over some texts.

    Sources before ``first`` are left out: a scan leaves the first token out, where it is a sink.
    """
    chosen = list(range(model.d_head)) if channels is None else list(channels)
    to_query, to_key = (
        side[layer, head][:, chosen] for side in (model.channels.to_query, model.channels.to_key)
    )
    pairs: list[Pair] = []
    for number, ids in enumerate(texts):
        recording = model.record(list(ids))
        query = recording.queries[layer, 0, head] @ to_query
        key = recording.keys[layer, 0, head // model.weights.group] @ to_key
        scores, tokens = query @ key.T, tuple(f" t{token}" for token in ids)
        pairs += [
            Pair(f"text {number}", dest, src, float(scores[dest, src]), tuple(ids), tokens)
            for dest in range(len(ids))
            for src in range(first, dest + 1)
        ]
    name = f"{head_name(layer, head)}:{'+'.join(map(str, chosen))}"
    # All matches of a head count alike, as after its softmax: else only the feature of the largest gain is seen.
    enough = max(pair.score for pair in pairs) * (1.0 if channels is not None else MATCH)
    Random(name).shuffle(pairs)
    # Equal scores stay in their drawn order, whatever a CPU makes of their last bits.
    pairs.sort(key=lambda pair: -round(min(pair.score, enough) / enough, 6))
    others = Random(f"{name} random").sample(pairs, kept)
    signal = ScoredSignal(name, layer, head, "channel", tuple(chosen))
    return SignalExamples(signal, tuple(pairs[:kept]), tuple(others), n_pairs=len(pairs))


def of_known(name: str, head: str, channels: Sequence[int] | None = None, seed: int = 0) -> SignalExamples:
    """A head of a model of the truth suite, over its own prompts."""
    known = KNOWN[name]
    layer, number = (int(part) for part in head[1:].split("H"))
    return scored(known.model, layer, number, [case.ids for case in known.cases(80, seed)], channels, first=1)


@cache
def three_heads() -> headtrace.Model:
    """Heads that attend by the same token (0), to the token before (1), and to a class of tokens (2)."""
    f = Features(token=12, position=12, previous=12, answer=12)
    word = f["token"][CLASS.start : CLASS.stop]
    heads = {
        (0, 0): Head(f["token"], f["token"], f["token"], f["answer"]),
        (0, 1): previous_token(f),
        (0, 2): Head(f.constant, either(word), either(word), f["answer"][[0]]),
    }
    plan: Blueprint = blueprint(f, 1, heads)
    return headtrace.load(as_gpt2(plan))


def any_texts(count: int = 80, length: int = 12, seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(12) for _ in range(length)] for _ in range(count)]
