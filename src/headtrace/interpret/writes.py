"""What a head says when it reads a token, through the unembedding, and what its channels read, through the embedding.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> recording = model.record("When Mary and John went to the store, John gave a drink to")
>>> said = head_says(recording, 2, 0, src=10, most=3)                        # L2H0 reads the second "John"
>>> len(said.raises), len(said.lowers), said.raises[0][1] > 0 > said.lowers[0][1]
(3, 3, True)

``head_says`` is about one source of one prompt: the value that the head reads there, through its output matrix, the
gain of the final norm and the unembedding. ``output_channels`` is about the head itself: the singular vectors of
W_V W_O, the other half of the head, with the tokens at both ends of what each reads (through the embedding) and of what
it says. Neither knows of the layers in between, which may undo or amplify what is written. So ``check_head_says``
compares it with what the model then says: the head's write from that source is taken away, the model runs on from
there, and the logits of the raised tokens must fall, and those of the lowered tokens rise, against random tokens.

>>> tested = check_head_says(recording, 2, 0, dest=14, src=10)
>>> tested.holds, tested.auroc > 0.9
(True, True)

``channel_reads`` has the tokens whose own embeddings lie furthest along a channel's directions.

>>> reads = channel_reads(model, 0, [(1, 3)], most=4)[0]              # L0H1, channel 3
>>> len(reads.query), len(reads.opposite_key)
(4, 4)

The coefficient of a token is its embedding, normalised as the head's layer would, times the head's query (or key)
projection, in the basis of its channels. A pair scores high where the coefficients of both sides have the same sign: so
the tokens at the positive end of the query go with those at the positive end of the key, and the negative ends
(``opposite``) with each other. Positions do not enter: for rotary models this is the score at distance zero; biases,
learned positions and the scales of QK-norm are left out.

The explainer ``vocabulary`` describes a signal by these tokens. It sees only the embedding, not what layers in between
have written, which from the middle of a model on is most of what a head reads: expect its descriptions to fail there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.channels.terms import exact_channels
from headtrace.errors import InputError
from headtrace.interpret.explainers import Description, Explainer, RunContext, register_explainer
from headtrace.interpret.rules import PairCondition, Rule, Rules
from headtrace.interpret.scored_signals import SignalExamples
from headtrace.models.devices import exact, rounded, values_of
from headtrace.models.weights import norm_eps, norm_scale
from headtrace.vocabulary import Site, head_name

if TYPE_CHECKING:
    from typing_extensions import Self

    from headtrace.models import Model, Recording


TokenEffects = tuple[tuple[str, float], ...]
"""Tokens with what is added to their logits, or with their coefficients; strongest first."""
TESTED = 50
"""Tokens that are raised most, and lowered most, whose logits an intervention is compared with."""


@dataclass(frozen=True)
class HeadSays:
    """What a head adds to the output logits, per unit of attention, if nothing came in between."""

    head: str
    token: str
    """The token that it reads."""
    raises: TokenEffects
    lowers: TokenEffects

    def __str__(self) -> str:
        raised, lowered = (", ".join(repr(token) for token, _ in side) for side in (self.raises, self.lowers))
        return f"{self.head} reads {self.token!r}: raises {raised}; lowers {lowered}"


@dataclass(frozen=True)
class OutputChannel:
    """A channel of what a head moves: a singular vector of W_V W_O, from what it reads to what it says."""

    head: str
    channel: int
    singular_value: float
    reads: TokenEffects
    """Tokens whose embeddings lie most along what it reads."""
    raises: TokenEffects
    lowers: TokenEffects
    """Tokens whose logits it raises and lowers where it reads those. The other way round for ``opposite``."""
    opposite: TokenEffects
    """Tokens at the other end of what it reads."""


@dataclass(frozen=True)
class SaysTest:
    """What a head says through the unembedding, against what the model says without it."""

    says: HeadSays
    auroc: float
    """How well the tokens predicted to rise are told from those predicted to fall by how much they did."""
    interval: tuple[float, float]
    """Its 95 % interval (DeLong's variance)."""
    correlation: float
    """Over all tokens of the vocabulary: predicted and measured change of the logit, less their means."""
    control: float | None
    """The same AUROC with the prediction for another source of the prompt that the head could have read; None if there
    is no other token."""

    @property
    def holds(self) -> bool:
        """Whether the lower end of the interval is above one half."""
        return self.interval[0] > 0.5


def _readout(model: Model) -> Float[Tensor, "vocab d_model"]:
    """From what is written to logits, without the final norm's scale, which changes no order."""
    return exact(model.architecture.centred(model.weights.W_U * model.weights.final_gain))


def _require_source(recording: Recording, layer: int, head: int, src: int, prompt: int) -> None:
    model, length = recording.model, recording.lengths[prompt]
    if not (0 <= layer < model.n_layers and 0 <= head < model.n_heads and 0 <= src < length):
        raise InputError(
            f"{head_name(layer, head)} reading position {src}: {model.name!r} has layers 0 to {model.n_layers - 1} and "
            f"heads 0 to {model.n_heads - 1}, and the prompt positions 0 to {length - 1}."
        )


@torch.inference_mode()
def _logits_added(
    recording: Recording, layer: int, head: int, src: int, prompt: int
) -> Float[Tensor, " vocab"]:
    """What the head adds to every logit per unit of attention to a source, up to the final norm's scale."""
    _require_source(recording, layer, head, src, prompt)
    value = exact(recording.bare_values[layer, head, prompt, src])
    return _readout(recording.model) @ (value @ exact(recording.model.weights.W_O[layer, head]))


def head_says(
    recording: Recording, layer: int, head: int, src: int, *, prompt: int = 0, most: int = 10
) -> HeadSays:
    """The tokens that a head raises and lowers most where it reads the token at a position of a prompt."""
    added = _logits_added(recording, layer, head, src, prompt)
    added = added - added.mean()
    (token,) = recording.model.token_labels([int(recording.token_ids[prompt, src])])
    ends = (_strongest(recording.model.output_labels, side, most) for side in (added, -added))
    raises, fallen = tuple(ends)
    return HeadSays(head_name(layer, head), token, raises, tuple((name, -value) for name, value in fallen))


def _strongest(
    labels: Callable[[list[int]], Sequence[str]], values: Float[Tensor, " vocab"], most: int
) -> TokenEffects:
    top, ids = values.topk(min(most, len(values)))
    return tuple(zip(labels(ids.tolist()), top.tolist(), strict=True))


@torch.inference_mode()
def output_channels(
    model: Model, layer: int, head: int, *, channels: int = 8, most: int = 8
) -> list[OutputChannel]:
    """The strongest singular vectors of a head's W_V W_O, in words: what each reads, and what it then says."""
    weights, facts = model.weights, model.architecture
    if not (0 <= layer < model.n_layers and 0 <= head < model.n_heads):
        raise InputError(f"{model.name!r} has no head {head_name(layer, head)}.")
    # The SVD of a product of two thin matrices, from the QR of each.
    q_in, r_in = torch.linalg.qr(exact(weights.W_V[layer, head // weights.group]))
    q_out, r_out = torch.linalg.qr(exact(weights.W_O[layer, head]).T)
    u, sizes, vh = torch.linalg.svd(r_in @ r_out.T)
    reads, writes = q_in @ u, q_out @ vh.T
    embedding: Any = model.hf.get_input_embeddings()
    x = exact(values_of(embedding, "weight", embedding.weight).detach().to(model.device))
    if facts.attention_norm is not None:
        norm = model.layers[layer].get_submodule(facts.attention_norm)
        x = facts.centred(x)
        x = x / norm_scale(x, norm_eps(norm), facts.norm)[:, None]
    found: list[OutputChannel] = []
    for channel in range(min(channels, len(sizes))):
        read, said = x @ reads[:, channel], _readout(model) @ writes[:, channel]
        said = said - said.mean()
        ends = [_strongest(model.token_labels, side, most) for side in (read, -read)]
        raised, lowered = (_strongest(model.output_labels, side, most) for side in (said, -said))
        # The sign of a singular vector is arbitrary: the end that reads more strongly comes first.
        if ends[1][0][1] > ends[0][0][1]:
            ends.reverse()
            raised, lowered = lowered, raised
        lowers = tuple((token, -value) for token, value in lowered)
        size = float(sizes[channel])
        found.append(OutputChannel(head_name(layer, head), channel, size, ends[0], raised, lowers, ends[1]))
    return found


def check_head_says(
    recording: Recording, layer: int, head: int, dest: int, src: int, *, prompt: int = 0
) -> SaysTest:
    """Take away what a head moved from a source to a destination, and compare what the model says there.

    The recording must hold the logits at the destination: ``model.record`` keeps all of them unless told otherwise.
    """
    from headtrace.causal.changes import ComponentChange
    from headtrace.causal.execute import rerun

    _require_source(recording, layer, head, src, prompt)
    if recording.lengths[prompt] <= dest or dest < src:
        raise InputError(
            f"No head moves anything from position {src} to {dest} of {recording.lengths[prompt]}."
        )
    one = recording[prompt]
    changed = rerun(one, [ComponentChange(Site("head", layer, head, dest=dest, src=src))])
    fell = exact(one.logits_at(0, dest) - changed.logits_at(0, dest))
    predicted = _logits_added(one, layer, head, src, 0)
    rivals = [place for place in range(1, dest + 1) if one.token_ids[0, place] != one.token_ids[0, src]]
    control = None
    if rivals:
        control = _auroc(_logits_added(one, layer, head, rivals[len(rivals) // 2], 0), fell)[0]
    auroc, interval = _auroc(predicted, fell)
    correlation = float(torch.corrcoef(torch.stack((predicted, fell)))[0, 1])
    return SaysTest(head_says(one, layer, head, src), auroc, interval, correlation, control)


def _auroc(
    predicted: Float[Tensor, " vocab"], measured: Float[Tensor, " vocab"]
) -> tuple[float, tuple[float, float]]:
    """How well the tokens at both ends of a prediction are told apart by what was measured; DeLong's interval."""
    most = min(TESTED, len(predicted) // 2)
    up, down = (measured[side.topk(most).indices] for side in (predicted, -predicted))
    wins = (up[:, None] > down).double() + 0.5 * (up[:, None] == down).double()
    mean = float(wins.mean())
    variance = (wins.mean(1).var() + wins.mean(0).var()) / most
    half = 1.96 * float(variance.sqrt())
    return mean, (max(0.0, mean - half), min(1.0, mean + half))


TokenCoefficients = tuple[tuple[int, float], ...]
"""Token ids with their coefficients, strongest first."""


@dataclass(frozen=True)
class ChannelReads:
    """The tokens at both ends of both sides of a channel."""

    query: TokenCoefficients
    key: TokenCoefficients
    opposite_query: TokenCoefficients
    opposite_key: TokenCoefficients


@torch.inference_mode()
def channel_reads(
    model: Model, layer: int, channels: Sequence[tuple[int, int]], most: int = 8
) -> list[ChannelReads]:
    """For some channels (head, channel) of a layer, the ``most`` tokens at each of their ends."""
    embedding: Any = model.hf.get_input_embeddings()
    x = values_of(embedding, "weight", embedding.weight).detach().to(model.device, model.dtype)
    facts = model.architecture
    if facts.attention_norm is not None:
        x = facts.centred(x)
        norm = model.layers[layer].get_submodule(facts.attention_norm)
        x = x / norm_scale(x, norm_eps(norm), facts.norm)[:, None]
    query, key = (x @ side for side in channel_directions(model, layer, channels))
    ends: list[list[TokenCoefficients]] = []
    for coefficients in (query, key, -query, -key):
        values, ids = coefficients.topk(min(most, len(coefficients)), dim=0)
        columns = zip(ids.T.tolist(), values.T.tolist(), strict=True)
        ends.append([tuple(zip(tokens, numbers, strict=True)) for tokens, numbers in columns])
    return [ChannelReads(*each) for each in zip(*ends, strict=True)]


def channel_directions(
    model: Model, layer: int, channels: Sequence[tuple[int, int]]
) -> tuple[Float[Tensor, "d_model channel"], Float[Tensor, "d_model channel"]]:
    """What some channels (head, channel) of a layer read in the residual stream: at the destination, at the source."""
    weights, basis = model.weights, exact_channels(model).layer(layer)
    heads, numbers = (list(each) for each in zip(*channels, strict=True))
    to_query = rounded(basis.to_query[heads, :, numbers], like=weights.W_Q)
    to_key = rounded(basis.to_key[heads, :, numbers], like=weights.W_Q)
    groups = [head // weights.group for head in heads]
    query = torch.einsum("ndr,nr->dn", weights.W_Q[layer, heads], to_query)
    return query, torch.einsum("ndr,nr->dn", weights.W_K[layer, groups], to_key)


@dataclass(frozen=True)
class Vocabulary(Explainer):
    """Names the tokens that a signal's strongest channel reads most, on both sides and with both signs."""

    name: ClassVar[str] = "vocabulary"

    tokens: int = 10
    """How many tokens to name on each side."""
    model: Model | None = None
    """The model whose weights are read; a run provides it."""

    def prepare(self, context: RunContext) -> Self:
        return self if context.model is None else replace(self, model=context.model)

    @torch.inference_mode()
    def explain(self, shown: SignalExamples) -> Description | None:
        model, signal = self.model, shown.signal
        if model is None:
            raise InputError("The explainer 'vocabulary' reads weights: give it a model.")
        channel = (signal.head, min(signal.channels, default=0))  # channels are numbered by singular value

        def tokens_are(feature: str, tokens: TokenCoefficients) -> PairCondition:
            ids = tuple(token for token, _ in tokens)
            return PairCondition(feature, ids, tuple(model.token_labels(ids)))

        (reads,) = channel_reads(model, signal.layer, [channel], self.tokens)
        ends = ((reads.query, reads.key), (reads.opposite_query, reads.opposite_key))
        rules = Rules(
            tuple(
                Rule((tokens_are("destination_token", query), tokens_are("source_token", key)))
                for query, key in ends
            )
        )
        # What the channel's source side would add to the output, if it were unembedded at once.
        _, key = channel_directions(model, signal.layer, [channel])
        logits = model.weights.W_U @ (model.weights.final_gain * key[:, 0])
        promoted = model.output_labels(logits.topk(min(5, len(logits))).indices.tolist())
        written = ", ".join(f'"{token}"' for token in promoted)
        return Description(
            f"{rules} Through the unembedding its source side says {written}.", rules.to_dict()
        )


register_explainer(Vocabulary.name, Vocabulary)
