"""What a head says when it reads a token: the tokens that it raises and lowers, through the unembedding.

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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import InputError
from headtrace.models.devices import exact, values_of
from headtrace.models.weights import norm_eps, norm_scale
from headtrace.vocabulary import Site, head_name

if TYPE_CHECKING:
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
