"""Where a trace begins: the components that a root rests on, one function for each type of root.

Norms are frozen, so every component has an exact share of the output logits, or of any direction. The types are data
(`headtrace.circuits.roots`); `weigh` and `seeds` dispatch on them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.errors import IdentityError, InputError
from headtrace.models.attention import softcap, softcap_slope
from headtrace.models.identities import tolerance_for
from headtrace.roots import Direction, Heads, Likelihood, LogitDifference, Root
from headtrace.tracing.along import Place, along
from headtrace.tracing.attribution import IG_STEPS, path_weights
from headtrace.tracing.causes import Cause
from headtrace.tracing.upstream import Catalogue
from headtrace.vocabulary import Component, Site, head_name, parse_head

if TYPE_CHECKING:
    from headtrace.models import Recording

DROP = 0.8
"""A likelihood keeps the components whose removal takes it this share of the way down to the bias-only value."""


@dataclass(frozen=True)
class Seeds:
    """The root of one prompt with its value and place, and the sites that it rests on."""

    root: Root
    causes: tuple[Cause, ...]
    reason: str | None = None
    """Why there are none, if there are none."""
    nothing: bool = False
    """Whether there is nothing to explain at all, and not only no head among the causes."""


def all_seeds(roots: Sequence[Root], recording: Recording, ig_steps: int = IG_STEPS) -> list[Seeds]:
    """What each prompt's root rests on, for all prompts of a recording."""
    linear = {prompt: root for prompt, root in enumerate(roots) if not isinstance(root, Heads)}
    worth = dict(zip(linear, all_shares(list(linear.items()), recording, ig_steps), strict=True))
    return [
        _from_heads(root, recording, prompt) if isinstance(root, Heads) else seeds(root, worth[prompt])
        for prompt, root in enumerate(roots)
    ]


@singledispatch
def seeds(root: Root, worth: RootShares) -> Seeds:
    """What a root rests on, given what every component gives of it."""
    raise InputError(f"There is no way to trace from a {type(root).__name__}.")


@dataclass(frozen=True)
class Shares:
    """Components of one prompt's residual at one position, before one layer's attention (or the final norm)."""

    recording: Recording
    prompt: int
    position: int
    layer: int

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue.of(self.recording.model, self.layer, self.position + 1)

    @property
    def residual(self) -> Float[Tensor, " d_model"]:
        return self.recording.residuals[self.layer, self.prompt, self.position]

    @property
    def final_scale(self) -> Float[Tensor, ""]:
        """The frozen scale of the final norm."""
        return self.recording.norm_scales[-1, self.prompt, self.position]

    @property
    def place(self) -> Place:
        return Place(self.prompt, self.position, self.layer)

    @torch.inference_mode()
    def of_logits(
        self, shares: Float[Tensor, " component"], read: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, " component"]:
        """Shares of what is read off the output logits, given those along a direction before the final norm: in half
        precision, what rounding did to the logits themselves is one, too."""
        model = self.recording.model
        if model.half and model.final_softcap is None:
            recorded = self.recording.logits_at(self.prompt, self.position)
            made = self.logits_of(self.residual[None])[0] + model.weights.output_bias
            shares[self.catalogue.n_plain - 1] = read(recorded - made)
        return shares

    def unembedded(self, vector: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
        """A direction after the final norm as a direction before it, with the norm's scale frozen."""
        model = self.recording.model
        return model.architecture.centred(vector * model.weights.final_gain / self.final_scale)

    def logits_of(self, writes: Float[Tensor, "n d_model"]) -> Float[Tensor, "n vocab"]:
        """What some writes add to the output logits, before biases and softcap."""
        model = self.recording.model
        normed = model.architecture.centred(writes) / self.final_scale * model.weights.final_gain
        return normed @ model.weights.W_U.T

    def writes(self, numbers: Int[Tensor, " n"]) -> Float[Tensor, "n d_model"]:
        """The write vectors of a few components, by number."""
        components = (self.catalogue.component(number) for number in numbers.tolist())
        return torch.stack([self.recording.write(c, self.prompt)[self.position] for c in components])

    def require(self, total: float, recorded: float, size: float) -> None:
        """The shares of the root must sum to what the model put out."""
        error, allowed = abs(total - recorded) / max(size, 1e-30), tolerance_for(self.recording.model.dtype)
        if not error <= allowed:
            raise IdentityError(
                f"The shares at layer {self.layer}, position {self.position} (prompt {self.prompt}) sum to "
                f"{total:.6g}, the model has {recorded:.6g}: relative error {error:.1e}, allowed {allowed:.0e}."
            )

    def cause(self, number: int, weight: float) -> Cause:
        return Cause(self.catalogue.component(number).at(self.position), weight)


@dataclass(frozen=True)
class Part:
    """One position that a root is read at, and what every component there contributes, in the unit of the root."""

    shares: Shares
    direction: Float[Tensor, " d_model"]
    """Of the residual, with the final norm frozen: what the root amounts to there."""
    contributions: Float[Tensor, " component"]


@dataclass(frozen=True)
class RootShares:
    """What a root is worth in one prompt (value and place are filled in), and what every component gives of it."""

    root: Root
    parts: tuple[Part, ...]
    size: float
    """The largest numbers that the value is added up from: what errors are measured against."""

    def weight(self, site: Site) -> float | None:
        """What a component contributes where it is read; None where the root does not read it."""
        if site.kind == "offset":
            return getattr(self.root, "bias", None) if site.layer is None and self.reads(site) else None
        part = self.reads(site)
        number = None if part is None else part.shares.catalogue.number(site.component)
        return None if part is None or number is None else float(part.contributions[number])

    def reads(self, site: Site) -> Part | None:
        """The part at the site's position."""
        return next((part for part in self.parts if part.shares.position == site.dest), None)


Wanted = tuple[Shares, Float[Tensor, " d_model"]]
"""A direction, and the residual that it is read from."""
Weighing = Generator[list[Wanted], list[Float[Tensor, " component"]], RootShares]
"""Asks once for what every component writes along some directions (an offset writes nothing), then says what a root is
worth."""


def root_shares(root: Root, recording: Recording, prompt: int = 0, ig_steps: int = IG_STEPS) -> RootShares:
    """The value of a root in one prompt of a recording, and every component's contribution to it."""
    return all_shares([(prompt, root)], recording, ig_steps)[0]


def all_shares(
    roots: Sequence[tuple[int, Root]], recording: Recording, ig_steps: int = IG_STEPS
) -> list[RootShares]:
    """The same for roots of several prompts: what they ask for is computed together."""
    weighings = [weigh(root, recording, prompt, ig_steps) for prompt, root in roots]
    wanted = [next(weighing) for weighing in weighings]
    found = iter(_written([each for mine in wanted for each in mine], recording))
    return [
        _end(weighing, [next(found) for _ in mine]) for weighing, mine in zip(weighings, wanted, strict=True)
    ]


def _written(wanted: list[Wanted], recording: Recording) -> list[Float[Tensor, " component"]]:
    """What every component writes along directions; those that are read in one layer, at one position, together."""
    found: dict[int, Tensor] = {}
    together: dict[tuple[int, int], list[int]] = {}
    for i, (shares, _) in enumerate(wanted):
        together.setdefault((shares.layer, shares.position), []).append(i)
    for mine in together.values():
        directions = torch.stack([wanted[i][1] for i in mine])
        written = along(recording, [wanted[i][0].place for i in mine], directions)
        found |= dict(zip(mine, written.shares, strict=True))
    return [found[i] for i in range(len(wanted))]


def _end(weighing: Weighing, written: list[Tensor]) -> RootShares:
    try:
        weighing.send(written)
    except StopIteration as end:
        return end.value
    raise AssertionError("A root asks once.")


@singledispatch
def weigh(root: Root, recording: Recording, prompt: int, ig_steps: int) -> Weighing:
    """What a root is worth in one prompt, in two steps."""
    raise InputError(
        f"A root of kind {root.kind!r} is no direction of the residual, so that components have no shares of it. Trace "
        'an answer or a direction; from heads, attention is followed (paths="attention" or "complete").'
    )


def _final(recording: Recording, prompt: int, position: int | None = None) -> Shares:
    last = recording.lengths[prompt] - 1
    return Shares(recording, prompt, last if position is None else position, recording.model.n_layers)


def _uncapped(shares: Shares) -> Float[Tensor, " vocab"]:
    """Output logits before the final softcap; undoing a saturated cap would lose digits, so from the residual."""
    recording = shares.recording
    if recording.model.final_softcap is None:
        return recording.logits_at(shares.prompt, shares.position)
    return shares.logits_of(shares.residual[None])[0] + recording.model.weights.output_bias


# -- logit difference ----------------------------------------------------------------------------------------


@weigh.register(LogitDifference)
def _(root: LogitDifference, recording: Recording, prompt: int, ig_steps: int) -> Weighing:
    """Shares of the answer's logit (mean over several) less the wrong one's, or centred over the vocabulary."""
    weights, shares = recording.model.weights, _final(recording, prompt)
    direction = shares.unembedded(_difference(weights.W_U, root))
    (written,) = yield [(shares, direction)]
    uncapped = _uncapped(shares)
    contributions = shares.of_logits(written, lambda logits: _difference(logits, root))
    bias = float(_difference(weights.output_bias, root))
    size = float(uncapped.abs().max())
    shares.require(float(contributions.sum()) + bias, float(_difference(uncapped, root)), size)
    value = float(_difference(recording.logits_at(prompt, shares.position), root))
    root = replace(root, value=value, position=shares.position, bias=bias)
    return RootShares(root, (Part(shares, direction, contributions),), size)


@seeds.register(LogitDifference)
def _(root: LogitDifference, worth: RootShares) -> Seeds:
    assert isinstance(worth.root, LogitDifference)
    root, (part,) = worth.root, worth.parts
    total, bias = float(part.contributions.sum()), root.bias or 0.0
    if total <= 0:
        above = "the vocabulary's mean" if root.wrong is None else "the wrong answer's"
        without = " without the output's own bias" if bias else ""
        reason = f"the answer's logit is not above {above}{without} (total {total:.4g}), so there is nothing to explain"
        swap = "" if root.wrong is None else "swap the two answers, "
        return _nothing(root, reason, worth.parts, f"{swap}ask for a probability root")
    found = [part.shares.cause(number, weight) for number, weight in _above_cutoff(part.contributions)]
    if bias > 0:  # a seed is what the root rests on: a bias against the answer is in the root's value only
        found.append(Cause(Component("offset").at(part.shares.position), bias))
    return _finish(root, found, worth.parts, "ask for a probability root")


def _difference(per_token: Float[Tensor, "vocab *rest"], root: LogitDifference) -> Float[Tensor, "*rest"]:
    """The answer's rows (their mean) less the wrong answer's, or than the mean of all."""
    against = per_token if root.wrong is None else per_token[list(root.wrong)]
    return per_token[list(root.answer)].mean(dim=0) - against.mean(dim=0)


def _above_cutoff(contributions: Float[Tensor, " component"]) -> list[tuple[int, float]]:
    """Components at or above the cutoff: where the running sum first exceeds the total, at most half of the total."""
    total = float(contributions.sum())
    if total <= 0:
        return []
    values, order = contributions.sort(descending=True, stable=True)
    above = (values.cumsum(0) > total).nonzero()
    cutoff = float(values[int(above[0])]) if len(above) else float(values[-1])
    keep = values >= min(cutoff, total / 2)
    return list(zip(order[keep].tolist(), values[keep].tolist(), strict=True))


# -- direction -----------------------------------------------------------------------------------------------


@weigh.register(Direction)
def _(root: Direction, recording: Recording, prompt: int, ig_steps: int) -> Weighing:
    """Shares of the residual before a layer along a vector."""
    model, length = recording.model, recording.lengths[prompt]
    position = length - 1 if root.position is None else root.position
    if root.layer > model.n_layers:
        raise InputError(
            f"Layer {root.layer} does not exist: a direction is read before layer 0 to {model.n_layers}."
        )
    if position >= length:
        raise InputError(f"Position {position} does not exist in a prompt of {length} tokens.")
    if root.vector is None:
        raise InputError("root='direction' needs direction= (a vector of d_model numbers) and layer=.")
    if len(root.vector) != model.d_model:
        raise InputError(
            f"The direction has {len(root.vector)} numbers; the model's residual has {model.d_model}."
        )
    shares = Shares(recording, prompt, position, root.layer)
    vector = recording.residuals.new_tensor(root.vector)
    (contributions,) = yield [(shares, vector)]
    value, size = float(shares.residual @ vector), float(shares.residual.norm() * vector.norm())
    shares.require(float(contributions.sum()), value, size)
    part = Part(shares, vector, contributions)
    return RootShares(replace(root, value=value, position=position), (part,), size)


@seeds.register(Direction)
def _(root: Direction, worth: RootShares) -> Seeds:
    """As for a logit difference."""
    (part,) = worth.parts
    total = float(part.contributions.sum())
    if total <= 0:
        reason = f"the residual has no positive part along the direction (total {total:.4g})"
        return _nothing(worth.root, reason, worth.parts, "turn the direction round")
    found = [part.shares.cause(number, weight) for number, weight in _above_cutoff(part.contributions)]
    return _finish(worth.root, found, worth.parts, "ask for another layer or position")


# -- heads ---------------------------------------------------------------------------------------------------


def _from_heads(root: Heads, recording: Recording, prompt: int) -> Seeds:
    """Given heads at the last token, each at the source it attends to most; weights are attention."""
    model, last = recording.model, recording.lengths[prompt] - 1
    found: list[Cause] = []
    for layer, head in dict.fromkeys(parse_head(name) for name in root.heads):
        if layer >= model.n_layers or head >= model.n_heads:
            raise InputError(
                f"There is no {head_name(layer, head)}: the model has layers 0 to {model.n_layers - 1} and heads 0 to "
                f"{model.n_heads - 1}."
            )
        row = recording.attention.row(layer, prompt, head, last)[: last + 1]
        src = int(row.argmax())
        found.append(Cause(Site("head", layer, head, last, src), float(row[src])))
    root = replace(root, value=sum(cause.weight for cause in found), position=last)
    return Seeds(root, tuple(found))


# -- likelihood ----------------------------------------------------------------------------------------------


@weigh.register(Likelihood)
def _(root: Likelihood, recording: Recording, prompt: int, ig_steps: int) -> Weighing:
    """Attributions of a log-likelihood. A continuation is read at several positions, and adds up over them."""
    length = recording.lengths[prompt]
    if root.continuation:
        first = length - len(root.answer)
        supports = [[token] for token in root.answer]
    else:
        first = length - 1
        supports = [_support(root, recording, prompt)]
        root = replace(root, support=tuple(supports[0]))
    sought = [
        _Sought.of(_final(recording, prompt, first + i), support, ig_steps)
        for i, support in enumerate(supports)
    ]
    written = yield [(each.shares, each.direction) for each in sought]
    parts = tuple(_Part.of(each, mine) for each, mine in zip(sought, written, strict=True))
    size = max(float(part.objective.clean.abs().max()) for part in parts)
    return RootShares(replace(root, value=sum(part.ends[0] for part in parts), position=first), parts, size)


@seeds.register(Likelihood)
def _(root: Likelihood, worth: RootShares) -> Seeds:
    """Components without which the log-likelihood falls most of the way to the bias-only value."""
    parts = [part for part in worth.parts if isinstance(part, _Part)]
    clean, floor = (sum(part.ends[i] for part in parts) for i in (0, 1))
    if clean <= floor:
        reason = (
            f"the answer is no likelier (log-likelihood {clean:.4g}) than from the model's biases alone ({floor:.4g}), "
            "so there is nothing to explain"
        )
        return _nothing(worth.root, reason, worth.parts, "ask for the likeliest answers (top_k)")
    found = _remove_shares(parts, clean, clean - DROP * (clean - floor))
    return _finish(worth.root, found, worth.parts, "compare with a wrong answer (a linear root)")


def _support(root: Likelihood, recording: Recording, prompt: int) -> list[int]:
    """The alternatives: those that were named, or the likeliest."""
    if root.answer:
        return list(root.answer)
    probabilities, order = recording.last_logits(prompt).softmax(-1).sort(descending=True, stable=True)
    if root.top_k is not None:
        if root.top_k > order.numel():
            raise InputError(f"top_k={root.top_k}: expected 1 to {order.numel()}.")
        return order[: root.top_k].tolist()
    count = int((probabilities.cumsum(0) < (root.top_p or 0.0)).sum()) + 1
    return order[:count].tolist()


@dataclass(frozen=True)
class _Objective:
    """``J(z) = sum over the support of q log softmax(cap(z))`` and the two ends of its path."""

    clean: Float[Tensor, " vocab"]
    """Logits before the final softcap."""
    base: Float[Tensor, " vocab"]
    q: Float[Tensor, " vocab"]
    cap: float | None

    @classmethod
    def of(cls, shares: Shares, support: list[int]) -> _Objective:
        model = shares.recording.model
        recorded = shares.recording.logits_at(shares.prompt, shares.position)
        q = torch.zeros_like(recorded)
        q[support] = recorded[support].softmax(-1)
        return cls(_uncapped(shares), model.weights.output_bias, q, model.final_softcap)

    def value(self, z: Float[Tensor, "*any vocab"]) -> Float[Tensor, "*any"]:
        scores = softcap(z, self.cap)
        return scores @ self.q - scores.logsumexp(-1)

    def path_gradient(self, steps: int) -> Float[Tensor, " vocab"]:
        """The mean gradient of J on the straight path from the bias-only logits to the clean ones."""
        alphas, weights = path_weights(steps, self.clean)
        z = self.base + alphas[:, None] * (self.clean - self.base)
        gradient = self.q - softcap(z, self.cap).softmax(-1)
        return weights @ (gradient * softcap_slope(z, self.cap))


@dataclass(frozen=True)
class _Sought:
    """One position of a likelihood: its objective, and what that amounts to as a direction."""

    shares: Shares
    objective: _Objective
    gradient: Float[Tensor, " vocab"]
    direction: Float[Tensor, " d_model"]

    @classmethod
    def of(cls, shares: Shares, support: list[int], ig_steps: int) -> _Sought:
        objective = _Objective.of(shares, support)
        gradient = objective.path_gradient(ig_steps)
        direction = shares.unembedded(gradient @ shares.recording.model.weights.W_U)
        return cls(shares, objective, gradient, direction)


@dataclass(frozen=True)
class _Part(Part):
    """One position of a likelihood: contributions are attributions, by integrated gradients of its objective."""

    objective: _Objective
    ends: tuple[float, float]
    """The log-likelihood as it is, and from biases alone."""

    @classmethod
    def of(cls, sought: _Sought, written: Float[Tensor, " component"]) -> _Part:
        shares, objective, gradient = sought.shares, sought.objective, sought.gradient
        attributions = shares.of_logits(written, lambda logits: gradient @ logits)
        shares.require(
            float(attributions.sum()),
            float(gradient @ (objective.clean - objective.base)),
            max(1.0, float(attributions.abs().sum())),
        )
        ends = float(objective.value(objective.clean)), float(objective.value(objective.base))
        return cls(shares, sought.direction, attributions, objective, ends)

    def drops(
        self, left: Float[Tensor, " vocab"], numbers: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " vocab"]]:
        """What removing components one after another takes from the log-likelihood, and the logits left."""
        remaining = left - self.shares.logits_of(self.shares.writes(numbers)).cumsum(0)
        values = self.objective.value(torch.cat((left[None], remaining)))
        return values[:-1] - values[1:], remaining[-1]


def _remove_shares(parts: list[_Part], clean: float, target: float) -> list[Cause]:
    """Remove components by attribution (positive ones only) until the log-likelihood is at or below the target."""
    values, order = torch.cat([part.contributions for part in parts]).sort(descending=True, stable=True)
    starts = torch.tensor([0] + [len(part.contributions) for part in parts], device=order.device).cumsum(0)
    of_part = torch.searchsorted(starts, order, right=True) - 1
    numbers = order - starts[of_part]
    # What rounding did to the logits themselves was written by nothing that could be removed.
    last = torch.tensor(
        [p.shares.catalogue.n_plain - 1 if p.shares.recording.model.half else -1 for p in parts]
    )
    removable = (values > 0) & (numbers != last.to(numbers.device)[of_part])
    order, values, of_part, numbers = (t[removable] for t in (order, values, of_part, numbers))
    left = [part.objective.clean for part in parts]
    kept, done, size = order.numel(), 0, 16
    while done < order.numel():
        chunk = slice(done, done + size)
        taken = values.new_zeros(len(order[chunk]))
        for i, part in enumerate(parts):
            mine = (of_part[chunk] == i).nonzero()[:, 0]
            if len(mine):
                taken[mine], left[i] = part.drops(left[i], numbers[chunk][mine])
        reached = (clean - taken.cumsum(0) <= target).nonzero()
        if len(reached):
            kept = done + int(reached[0]) + 1
            break
        clean, done, size = clean - float(taken.sum()), done + len(taken), size * 2
    chosen = zip(of_part[:kept].tolist(), numbers[:kept].tolist(), values[:kept].tolist(), strict=True)
    return [parts[i].shares.cause(number, value) for i, number, value in chosen]


# -- nothing to trace ----------------------------------------------------------------------------------------


def _finish(root: Root, found: list[Cause], parts: Sequence[Part], advice: str) -> Seeds:
    if not any(cause.site.kind == "head" for cause in found):
        reason = f"no head is among the {len(found)} component(s) that the root rests on"
        return replace(_nothing(root, reason, parts, advice), nothing=False)
    return Seeds(root, tuple(found))


def _nothing(root: Root, reason: str, parts: Sequence[Part], advice: str) -> Seeds:
    """No seeds: why, what speaks most for and against the root, and what to try instead."""
    heads = [cause for cause in _strongest(parts, only_heads=True) if cause.weight > 0]
    ends = (("for", _strongest(parts)), ("against", _strongest(parts, against=True)))
    told = "; ".join(f"strongest {word} it: {_listed(causes)}" for word, causes in ends if causes)
    names = dict.fromkeys(head_name(cause.site.layer or 0, cause.site.head or 0) for cause in heads)
    start = f", or start from heads that speak for it ({', '.join(names)})" if names else ""
    return Seeds(root, (), f"{reason}; {told}. To find a circuit, {advice}{start}", nothing=True)


def _strongest(
    parts: Sequence[Part], *, only_heads: bool = False, against: bool = False, k: int = 3
) -> list[Cause]:
    """The components that contribute most, of one sign."""
    found: list[Cause] = []
    for part in parts:
        shares, contributions = part.shares, part.contributions
        first = shares.catalogue.n_plain if only_heads else 0
        signed = -contributions[first:] if against else contributions[first:]
        values, numbers = signed.topk(min(k, len(signed)))
        pairs = zip(numbers.tolist(), values.tolist(), strict=True)
        found += [shares.cause(first + n, -v if against else v) for n, v in pairs if v > 0]
    return sorted(found, key=lambda cause: (-abs(cause.weight), cause.site))[:k]


def _listed(causes: list[Cause]) -> str:
    return ", ".join(f"{cause.site} ({cause.weight:+.3g})" for cause in causes)
