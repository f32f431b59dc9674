"""Does a model compute what its architecture's facts say? For the tests of a package that adds an architecture.

    def test_facts():
        headtrace.models.conformance(MineForCausalLM(MineConfig(...)))     # a small model with random weights

Every step of the model is compared with the same step by the facts, in float64 and in float32. Where they differ, the
other values that a fact could have are tried, one at a time: the error names the fact that is wrong, and what it should
be if one of them makes the numbers agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from headtrace.errors import HeadtraceError, IdentityError
from headtrace.models.architectures import HOW_TO_ADD, Architecture, find_architecture
from headtrace.models.architectures.facts import MLPParts
from headtrace.models.devices import dtype_name
from headtrace.models.fit import residual_norms
from headtrace.models.forward import own_logits
from headtrace.models.frozen import CONTENT_FIELDS, FrozenMLP
from headtrace.models.identities import folded_queries_keys, output_logits, tolerance_for
from headtrace.models.model import Model
from headtrace.models.observer import Observer
from headtrace.models.record import record
from headtrace.models.recording import Recording
from headtrace.models.weights import norm_bias, norm_eps, norm_gain, norm_scale

DTYPES = (torch.float64, torch.float32)
LENGTHS = (7, 4)
"""Tokens of the prompts, drawn at random, that models are run on: one is padded."""
IN_FLOAT32 = tolerance_for(torch.float32)
"""Allowed where transformers computes in float32 whatever a model's dtype is: in norms, and so in the model alone."""
ACTIVATIONS: tuple[nn.Module, ...] = (
    *(nn.ReLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.Identity()),
)


class ConformanceStep(NamedTuple):
    """One step of a model that was compared: what it was, by which facts, and the largest relative error."""

    what: str
    facts: tuple[str, ...]
    """The facts that this step is computed by."""
    error: float
    allowed: float


@dataclass(frozen=True)
class Conformance:
    """What `conformance` has found, if nothing was wrong."""

    architecture: str
    steps: dict[str, tuple[ConformanceStep, ...]]
    """By dtype, every step in the order of the forward pass."""

    @property
    def worst(self) -> dict[str, float]:
        """By dtype, the largest relative error of what is computed in that dtype throughout."""
        return {
            dtype: max(step.error for step in steps if step.allowed == min(s.allowed for s in steps))
            for dtype, steps in self.steps.items()
        }


@torch.no_grad()
def conformance(model: Model | PreTrainedModel, *, seed: int = 0) -> Conformance:
    """Check a model against its architecture's facts; an ``IdentityError`` names the fact that is wrong.

    Give a small model (a few layers, random weights, a norm's gains and all biases different from their beginning, or
    a fact about them cannot be told from another): it is copied, and run in float64 and float32 on two prompts of
    random tokens. What is compared: output logits with those of the model alone, every norm, residuals as sums of what
    is written, queries, keys, values, attention patterns, what heads write, output logits, and, where the facts say
    what MLPs are made of, what they read and write.

    >>> import headtrace
    >>> sorted(conformance(headtrace.load("builtin")).worst)
    ['float32', 'float64']
    """
    given = model.hf if isinstance(model, Model) else model
    steps: dict[str, tuple[ConformanceStep, ...]] = {}
    for dtype in DTYPES:
        if dtype == torch.float64 and find_architecture(given.config).rotary_in_float32:
            continue  # such a model is no more exact than float32 in any dtype
        copy = Model(deepcopy(given).to(dtype))  # type: ignore[arg-type]
        steps[dtype_name(dtype)] = tuple(_checked(copy, seed))
    return Conformance(Model(given).architecture.name, steps)


def _checked(model: Model, seed: int) -> Iterator[ConformanceStep]:
    """Every step, or an error at the first that differs."""
    for step in _steps(model, seed):
        if not step.error <= step.allowed:
            raise _wrong(model, step, seed)
        yield step


# -- what is wrong -------------------------------------------------------------------------------------------


def _wrong(model: Model, step: ConformanceStep, seed: int) -> IdentityError:
    """The error of a step that differs, with the fact that makes it agree if there is one."""
    facts = model.architecture
    differ = (
        f"at {step.what} the model and its facts differ by {step.error:.1e} (relative, in {model.own_dtype}; allowed "
        f"{step.allowed:.0e})"
    )
    advice = f"Correct it in the Architecture ({HOW_TO_ADD})."
    for fact, said, other, changed in _alternatives(model, step.facts):
        model.architecture = changed
        model.invalidate()
        try:
            found = next((each for each in _steps(model, seed) if each.what == step.what), None)
        except (HeadtraceError, RuntimeError):  # this one fits even less
            found = None
        finally:
            model.architecture = facts
            model.invalidate()
        if found is not None and found.error <= step.allowed:
            return IdentityError(
                f"The fact {fact} = {said} of {facts.name} is wrong: {differ}, and agree with {fact} = {other}. "
                f"{advice}"
            )
    return IdentityError(
        f"A fact of {facts.name} is wrong: {differ}. What decides it: {', '.join(step.facts)}. {advice}"
    )


def _alternatives(model: Model, wanted: tuple[str, ...]) -> Iterator[tuple[str, str, str, Architecture]]:
    """The facts with another value of one that a step depends on: the fact, its value, the other one, all of them."""
    facts = model.architecture
    choices: dict[str, tuple[Any, ...]] = {
        "norm": ("layer", "rms"),
        "gain_offset": (0.0, 1.0),
        "rotary": (True, False),
        "rotary_pairs": ("half-split", "interleaved"),
        "rotary_tables": ("half-split", "interleaved"),
        "rotary_backwards": (False, True),
        "query_key_norm_kind": ("layer", "rms"),
        "query_prescaled": (False, True),
    }
    for fact in (each for each in wanted if each in choices):
        for other in choices[fact]:
            if other != getattr(facts, fact):
                yield fact, repr(getattr(facts, fact)), repr(other), replace(facts, **{fact: other})
    if "parallel" in wanted:
        said = facts.parallel(model.config)
        yield "parallel", str(said), str(not said), replace(facts, parallel=lambda _: not said)
    read = facts.mlp_parts
    if "mlp_parts" in wanted and read is not None:
        for other in ACTIVATIONS:
            own = _name(read(model.layers[0]).activation)
            changed = replace(facts, mlp_parts=_with_activation(read, other))
            yield "mlp_parts: activation", own, _name(other), changed


def _with_activation(
    read: Callable[[nn.Module], MLPParts], other: nn.Module
) -> Callable[[nn.Module], MLPParts]:
    return lambda block: replace(read(block), activation=other)


def _name(activation: object) -> str:
    return (
        repr(activation)
        if isinstance(activation, nn.Module)
        else getattr(activation, "__name__", repr(activation))
    )


# -- the steps -----------------------------------------------------------------------------------------------


class _Written(Observer):
    """What attention added to the residual, layer by layer."""

    def __init__(self) -> None:
        self.attention = dict[int, Tensor]()

    def attention_write(self, layer: int, write: Tensor) -> None:
        self.attention[layer] = write


NORM_FACTS = ("norm", "gain_offset")
TURNED = ("rotary", "rotary_pairs", "rotary_tables", "rotary_backwards", "rotary_layers", "query_prescaled")
ADDED = ("attention", "attention_post_norm", "mlp_write", "mlp_post_norm", "write_multiplier", "layers")


def _steps(model: Model, seed: int) -> Iterator[ConformanceStep]:
    """All steps of a forward pass: the model's own numbers beside those by the facts."""
    facts, random, allowed = (
        model.architecture,
        torch.Generator().manual_seed(seed),
        tolerance_for(model.dtype),
    )
    length = min(max(LENGTHS), model.max_positions or max(LENGTHS))
    lengths = tuple(min(n, length) for n in LENGTHS)
    ids = torch.randint(model.d_vocab, (len(lengths), length), generator=random).to(model.device)
    yield from _norms(model, random)
    written = _Written()
    keep = CONTENT_FIELDS if facts.mlp_parts is not None else None
    recording = record(model, ids, lengths, keep=keep, observers=(written,))
    real = torch.arange(length, device=model.device) < torch.tensor(lengths, device=model.device)[:, None]
    own = own_logits(model, ids, lengths)
    error = _error(recording.logits, own, real)
    yield ConformanceStep("the output that headtrace records", ("own_attention",), error, IN_FLOAT32)
    for layer in range(model.n_layers):
        yield from _layer(recording, layer, written.attention[layer], real)
    final = recording.residuals[-1]
    found = output_logits(recording, final, recording.norm_scales[-1])
    decide = ("final_norm", "logit_multiplier")
    yield ConformanceStep(
        "the output logits by the final residual", decide, _error(found, recording.logits, real), allowed
    )


def _layer(
    recording: Recording, layer: int, attention: Float[Tensor, "batch token d_model"], real: Tensor
) -> Iterator[ConformanceStep]:
    model, weights, facts = recording.model, recording.model.weights, recording.model.architecture
    residual, of, allowed = recording.residuals[layer], f"of layer {layer}", tolerance_for(model.dtype)
    xhat = residual / recording.norm_scales[layer][..., None]
    values = torch.einsum("btd,hdr->bhtr", xhat, weights.W_V[layer]) + weights.b_V[layer][:, None]
    queries, keys = folded_queries_keys(recording, residual, layer)
    inside = ("query_key_norm", "query_key_norm_kind", "query_key_norm_axes") if facts.query_key_norm else ()
    compared = {
        "values": _error(values, recording.values[layer], real[:, None]),
        "queries": _error(queries, recording.queries[layer], real[:, None]),
        "keys": _error(keys, recording.keys[layer], real[:, None]),
    }
    # All three read the same norm: if only one is wrong, that is not why.
    shared = () if min(compared.values()) <= allowed else ("attention_norm",)
    for name, error in compared.items():
        letter = name[0].upper()
        own = () if name == "values" else (*TURNED, *inside)
        blame = (*shared, f"projections (W_{letter}, b_{letter})", *own)
        yield ConformanceStep(f"the {name} {of}", blame, error, allowed)
    pattern = recording.attention_logits(layer).softmax(dim=-1)
    wrong = (pattern - recording.pattern(layer)).abs().amax(dim=(1, 3))
    yield ConformanceStep(
        f"attention patterns {of}", ("own_attention", "query_prescaled"), float((wrong * real).max()), allowed
    )
    heads = recording.layer_writes(layer) - recording.mlp_writes[layer]
    blame = ("projections (W_O, b_O)", "attention_post_norm", "write_multiplier")
    yield ConformanceStep(f"what the heads {of} write", blame, _error(heads, attention, real), allowed)
    after = residual + attention + recording.mlp_writes[layer]
    error = _error(after, recording.residuals[layer + 1], real)
    decide = ADDED if layer < model.n_layers - 1 else (*ADDED, "final_norm")
    yield ConformanceStep(f"the residual behind layer {layer}", decide, error, allowed)
    if facts.mlp_parts is not None:
        yield from _mlp(recording, layer, residual, attention, real)


def _mlp(
    recording: Recording, layer: int, residual: Tensor, attention: Tensor, real: Tensor
) -> Iterator[ConformanceStep]:
    facts, mlp, of = recording.model.architecture, FrozenMLP.of(recording, layer), f"of layer {layer}"
    allowed = tolerance_for(recording.model.dtype)
    read = residual if facts.parallel(recording.model.config) else residual + attention
    normed = mlp.before.forward(read)
    normed = normed if mlp.before.bias is None else normed + mlp.before.bias
    blame = ("mlp", "mlp_norm", "parallel")
    yield ConformanceStep(f"what the MLP {of} reads", blame, _error(normed, mlp.inputs, real), allowed)
    blame = ("mlp_parts", "mlp_write", "mlp_post_norm")
    error = _error(mlp.write(mlp.inputs), recording.mlp_writes[layer], real)
    yield ConformanceStep(f"what the MLP {of} writes", blame, error, allowed)


def _norms(model: Model, random: torch.Generator) -> Iterator[ConformanceStep]:
    """Every norm alone, on random vectors that have a mean."""
    facts, norms = model.architecture, list(residual_norms(model.hf, model.architecture))
    x = torch.randn(4, model.d_model, generator=random).to(model.device, model.dtype) + 1
    names = {id(module): name for name, module in model.hf.named_modules()}
    for norm in norms:
        found = facts.centred(x) / norm_scale(x, norm_eps(norm), facts.norm)[:, None]
        found = found * norm_gain(norm, facts, like=x)
        bias = norm_bias(norm)
        found = found if bias is None else found + bias
        error = _error(found, norm(x), torch.ones(len(x), dtype=torch.bool, device=x.device))
        yield ConformanceStep(f"the norm {names[id(norm)]!r}", NORM_FACTS, error, IN_FLOAT32)


def _error(found: Tensor, own: Tensor, real: Tensor) -> float:
    """The largest difference at real positions (the last axis but one), relative to the largest number."""
    wrong = (found - own).abs().amax(dim=-1) * real
    return float(wrong.max() / own.abs().max().clamp_min(1e-30))
