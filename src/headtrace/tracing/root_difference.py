"""Roots in two runs: their values, and the multipliers of the residuals and patterns that they read.

This is where the sweep of `headtrace.tracing.difference` starts: a logit, a likelihood and the final norm have secants
of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import InputError
from headtrace.models.attention import softcap
from headtrace.models.weights import norm_eps
from headtrace.roots import Direction, Heads, Likelihood, LogitDifference, Root
from headtrace.tracing.attribute_root import ReadPoint
from headtrace.tracing.secants import NormSecant, SoftmaxSecant, softcap_slope
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    from headtrace.models import Recording
    from headtrace.tracing.component_flow import DifferenceFlow


@dataclass(frozen=True)
class ResidualRead:
    """A residual that a root reads: before a layer, or before the final norm."""

    layer: int
    position: int
    multiplier: Float[Tensor, " d_model"]


@dataclass(frozen=True)
class RootDifference:
    """A root in two runs: its values and what it reads."""

    value: float
    other_value: float
    size: float
    """The largest numbers that the values are added up from."""
    residuals: tuple[ResidualRead, ...] = ()
    patterns: tuple[Firing, ...] = ()
    """Attention weights that the root adds up."""


def root_difference(root: Root, recording: Recording, other: Recording, prompt: int = 0) -> RootDifference:
    """The values of a root in both runs, and the multipliers of what it reads."""
    if isinstance(root, Heads):
        firings = root.firings(recording, prompt)
        values = [
            sum(float(run.attention.at(f.layer, prompt, f.head, f.dest, f.src)) for f in firings)
            for run in (recording, other)
        ]
        return RootDifference(*values, size=float(len(firings)), patterns=tuple(firings))
    if isinstance(root, Direction):
        (reading,) = root.readings(recording, prompt, 1)
        point, vector = reading.point, reading.direction
        ends = [run.residuals[point.layer, prompt, point.position] for run in (recording, other)]
        size = max(float(x.norm() * vector.norm()) for x in ends)
        read = ResidualRead(point.layer, point.position, vector)
        return RootDifference(*(float(x @ vector) for x in ends), size=size, residuals=(read,))
    n, tail = recording.lengths[prompt], len(root.answer_prefix)
    if not torch.equal(recording.token_ids[prompt, n - tail : n], other.token_ids[prompt, n - tail : n]):
        raise InputError("Both prompts must end with the same tokens of the answer, all but its last one.")
    if isinstance(root, LogitDifference):
        weights = recording.logits.new_zeros(recording.model.d_output)
        for ids, sign in ((root.answer, 1.0), (root.wrong, -1.0)):
            chosen = list(range(len(weights)) if ids is None else ids)
            index = torch.tensor(chosen, device=weights.device)
            weights.index_add_(0, index, weights.new_full((len(chosen),), sign / len(chosen)))
        return _of_logits(recording, other, prompt, [(recording.lengths[prompt] - 1, weights)], logs=False)
    assert isinstance(root, Likelihood)
    readings = root.readings(recording, prompt, 1)
    places = [(reading.point.position, reading.detail[0].q) for reading in readings]
    return _of_logits(recording, other, prompt, places, logs=True)


def _of_logits(
    recording: Recording,
    other: Recording,
    prompt: int,
    places: Sequence[tuple[int, Float[Tensor, " vocab"]]],
    *,
    logs: bool,
) -> RootDifference:
    """A weighted sum of output logits, or of log-probabilities, at some positions."""
    model, weights, pair = recording.model, recording.model.weights, (recording, other)
    facts = model.architecture
    final = None if facts.final_norm is None else model.hf.get_submodule(facts.final_norm)
    values, size, reads = [0.0, 0.0], 0.0, list[ResidualRead]()
    for position, of_token in places:
        points = [ReadPoint.final(run, prompt, position) for run in pair]
        if logs or model.final_softcap is not None:
            z = [p.logits_of(p.residual[None])[0] + weights.output_bias for p in points]
            g = of_token
            if logs:
                g = SoftmaxSecant.of([softcap(each, model.final_softcap) for each in z]).of_log(of_token)
            onto = (g * softcap_slope(z, model.final_softcap)) @ weights.W_U
        else:  # linear: only the tokens that are asked about
            some = of_token.nonzero()[:, 0]
            onto = of_token[some] @ weights.W_U[some]
        if final is None:
            onto = onto * weights.final_gain
        else:
            ends = [point.residual for point in points]
            onto = NormSecant.of(ends, norm_eps(final), facts.norm, weights.final_gain).back(onto)
        reads.append(ResidualRead(model.n_layers, position, onto))
        for i, run in enumerate(pair):
            logits = run.logits_at(prompt, position)
            size = max(size, float(logits.abs().max()))
            values[i] += float((logits.log_softmax(-1) if logs else logits) @ of_token)
    return RootDifference(values[0], values[1], size * len(places), tuple(reads))


def logit_multiplier(flow: DifferenceFlow, prompt: int, ids: Sequence[int]) -> Float[Tensor, " d_model"]:
    """The multiplier of the final residual at the last position for the mean logit of some tokens."""
    weights = flow.recording.logits.new_zeros(flow.recording.model.d_output)
    weights[list(ids)] = 1 / len(ids)
    places = [(flow.recording.lengths[prompt] - 1, weights)]
    return _of_logits(flow.recording, flow.other, prompt, places, logs=False).residuals[0].multiplier
