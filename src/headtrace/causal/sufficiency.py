"""Is a circuit enough, and is it needed?

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> prompt = "When Mary and John went to the store, John gave a drink to"
>>> circuit = headtrace.Tracer(model).trace(prompt, answer=" Mary", wrong=" John")
>>> found = sufficiency(circuit, model, counterfactual="When Anna and Tom went to the store, Emma gave a drink to")
>>> found.at(10) > 0.5 > found.nothing
True
>>> found.necessity.loss > found.necessity.random_loss
True

The circuit's components are kept as the run computes them; all other head components take what they had in a run on a
counterfactual prompt of the same length, so the residual stream stays in its usual range. With m the metric,

    sufficiency(K) = (m(K) - m(counterfactual)) / (m(clean) - m(counterfactual))

Above 1 is no error: what opposes the answer was left out. `patching.py` does the patching, `rankings.py` the orders,
`sufficiency_result.py` the sizes and areas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Literal, get_args

import torch

from headtrace.causal.changes import FixedValues, OtherRun
from headtrace.causal.execute import Copy
from headtrace.causal.metric import require_metric
from headtrace.causal.opening import open_circuit
from headtrace.causal.patching import (
    BASELINES,
    NEAREST,
    RANDOM,
    PatchingCase,
    Ranked,
    Ranking,
    as_given,
    at_random,
    chosen_baselines,
    drawn_like,
    measure,
    ranked_firings,
)
from headtrace.causal.sufficiency_result import SHOWN, Curve, Necessity, Sufficiency, shares_of, sizes
from headtrace.errors import IdentityError, InputError
from headtrace.progress import Progress

if TYPE_CHECKING:
    from headtrace.circuits import Circuit
    from headtrace.models import Model
    from headtrace.vocabulary import Firing, Prompt

Ablation = Literal["counterfactual", "mean", "zero"]


def sufficiency(
    circuit: Circuit,
    model: Model,
    counterfactual: Prompt | None = None,
    *,
    ranking: Sequence[Firing | str] | None = None,
    baselines: bool | Sequence[str] = False,
    compare: Mapping[str, Ranked] | None = None,
    ablation: Ablation = "counterfactual",
    draws: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
) -> Sufficiency:
    """Keep only a circuit, at every size, and take only it away: what is left of the metric of its root?

    ``counterfactual`` is text or token ids, as many as the circuit's prompt has. ``ranking`` puts head components of
    your own in the place of the circuit's (its prompt and root stay). ``baselines`` adds rankings to compare with, all
    or some by name (`headtrace.causal.patching.BASELINES`, and ``random``, the mean of ``draws`` draws); ``compare``
    adds circuits or ranked components of your own, by name. ``mean`` and ``zero`` ablation need no counterfactual: a
    component gives the head's mean value vector, or nothing, and m(nothing kept) stands for m(counterfactual).
    """
    names = chosen_baselines(baselines)
    _check(circuit, ranking, ablation, counterfactual, draws)
    case, other = open_case(circuit, model, counterfactual, ablation)
    own = as_given(case, circuit if ranking is None else ranking)
    asked: dict[str, list[Ranking]] = {
        name: [at_random(case, seed + draw) for draw in range(draws)]
        if name == RANDOM
        else [BASELINES[name](case, circuit)]
        for name in names
    }
    asked |= {name: [as_given(case, given)] for name, given in (compare or {}).items()}
    return _measured(circuit, case, other, own, asked, ablation, draws, seed, progress)


def _check(
    circuit: Circuit,
    ranking: Sequence[Firing | str] | None,
    ablation: str,
    counterfactual: object,
    draws: int,
) -> None:
    if ablation not in get_args(Ablation):
        known = ", ".join(map(repr, get_args(Ablation)))
        raise InputError(f"ablation={ablation!r}: expected one of {known}.")
    if draws < 1:
        raise InputError(f"draws={draws}: random components are drawn at least once.")
    if (counterfactual is None) == (ablation == "counterfactual"):
        raise InputError(
            "Give a counterfactual prompt of the same length, such as the circuit's with other names in it; or choose "
            "ablation='mean' or 'zero'."
            if counterfactual is None
            else f"ablation={ablation!r} makes no use of a counterfactual prompt: leave one of them out."
        )
    if not ranked_firings(circuit if ranking is None else ranking):
        reason = f" ({circuit.reason})" if circuit.reason and ranking is None else ""
        raise InputError(
            f"The circuit has no heads{reason}, so there is nothing to keep. Trace another prompt or root, or give "
            "head components as ranking=['L9H6:14:3', ...]."
        )


def open_case(
    circuit: Circuit, model: Model, counterfactual: Prompt | None, ablation: Ablation = "counterfactual"
) -> tuple[PatchingCase, float]:
    """A circuit's prompt and metric ready to be patched, and m(counterfactual)."""
    recording = open_circuit(circuit, model)
    metric = require_metric(circuit.root, recording, "what it keeps of it")
    if counterfactual is None:
        case = PatchingCase(recording, metric, FixedValues.of(recording, ablation))
        other = measure([case.keeping(case.places[:0])])[0]
    else:
        ids = counterfactual_ids(circuit, model, counterfactual)
        theirs = model.record([ids], keep=("patterns", "values", "residuals"))
        case, other = PatchingCase(recording, metric, OtherRun.of(theirs)), metric.of(theirs)
    _check_gap(case, other, "with nothing kept" if counterfactual is None else "on the counterfactual prompt")
    return case, other


def counterfactual_ids(circuit: Circuit, model: Model, counterfactual: Prompt) -> list[int]:
    """Token ids of a counterfactual prompt, read as the circuit's own was; of the same length, and another one."""
    own = list(circuit.prompt.token_ids)
    ids = model.to_ids(counterfactual, bos=_began(circuit, model, counterfactual))
    root = circuit.root
    if root.answer_prefix and len(ids) == len(own) - len(root.answer_prefix):
        ids = [*ids, *own[len(ids) :]]  # the tokens of a continuation belong to the circuit's prompt
    if len(ids) != len(own):
        raise InputError(
            f"The counterfactual prompt has {len(ids)} tokens ({' | '.join(model.token_labels(ids))}) and the "
            f"circuit's prompt {len(own)}: components are exchanged position by position, so both need the same "
            "number. Choose words with as many tokens as those they replace."
        )
    if ids == own:
        raise InputError(
            "The counterfactual prompt is the circuit's own prompt, token by token: nothing would change. Exchange "
            "what decides the answer (in IOI, the names)."
        )
    return ids


def _began(circuit: Circuit, model: Model, counterfactual: Prompt) -> bool | None:
    """Whether the circuit's text was read with a beginning-of-sequence token, where that was not the default."""
    text = circuit.prompt.text
    if text is None or not isinstance(counterfactual, str):
        return None
    own = list(circuit.prompt.token_ids)
    read = {}
    for bos in (None, True, False):
        try:
            read[bos] = model.to_ids(text, bos=bos)
        except InputError:  # a tokenizer without such a token
            continue
        if read[bos] == own[: len(read[bos])]:
            return bos
    return None


def _check_gap(case: PatchingCase, other: float, where: str) -> None:
    if abs(case.clean - other) <= case.rounding():
        raise InputError(
            f"The {case.metric.name} is {case.clean:.6g} on the circuit's prompt and {other:.6g} {where}: within "
            "rounding, nothing is lost, so no share of it can be kept. Choose a counterfactual that changes the answer."
        )


class _Sets:
    """The sets of components that are kept, each measured once: nothing and everything are the same in every order."""

    def __init__(self, case: PatchingCase, other: float) -> None:
        self.case, self.other = case, other
        self.shares = shares_of(len(case.places))
        self.values: dict[tuple[int, int], float] = {}
        self.waiting: dict[tuple[int, int], Copy] = {}

    def _key(self, ranking: Ranking, size: int) -> tuple[int, int]:
        return (id(ranking) if 0 < size < len(self.case.places) else 0), size

    def want(self, ranking: Ranking, wanted: Sequence[int]) -> None:
        for size in (*(min(size, ranking.own) for size in wanted), *self.shares):
            self.waiting[self._key(ranking, size)] = self.case.keeping(ranking.first(size))

    def sufficiency(self, rankings: Sequence[Ranking], size: int) -> float:
        """Of the first components of a ranking; of several draws, the mean."""
        mean = fmean(self.values[self._key(ranking, size)] for ranking in rankings)
        return (mean - self.other) / (self.case.clean - self.other)

    def curve(self, rankings: Sequence[Ranking], wanted: Sequence[int]) -> Curve:
        own = rankings[0].own
        points = [
            (size, self.sufficiency(rankings, size)) for size in sorted({min(size, own) for size in wanted})
        ]
        continued = [(size, self.sufficiency(rankings, size)) for size in self.shares]
        return Curve(tuple(points), own, tuple(continued))


def _measured(
    circuit: Circuit,
    case: PatchingCase,
    other: float,
    own: Ranking,
    asked: Mapping[str, list[Ranking]],
    ablation: Ablation,
    draws: int,
    seed: int,
    progress: Progress | None,
) -> Sufficiency:
    """Everything that is measured, as copies of one prompt: all curves, and the circuit taken away."""
    total = len(case.places)
    mine = [0, *sizes(own.own)]
    shown = {*mine, *sizes(SHOWN[-1])}
    # A circuit is measured at its own size, too.
    compared = {
        name: sorted(shown | set(sizes(rankings[0].own) if rankings[0].own < total else ()))
        for name, rankings in asked.items()
    }
    sets = _Sets(case, other)
    sets.want(own, mine)
    for name, rankings in asked.items():
        for ranking in rankings:
            sets.want(ranking, compared[name])
    removed = [case.without(places) for places in _taken_away(case, own, draws, seed)]
    values = measure([*removed, *sets.waiting.values()], progress)
    lost = values[: len(removed)]
    sets.values = dict(zip(sets.waiting, values[len(removed) :], strict=True))
    _check_everything(case, sets.values[0, total])
    return Sufficiency(
        circuit=circuit,
        case=case,
        ranking=own,
        metric=case.metric.name,
        clean=case.clean,
        counterfactual=other,
        ablation=ablation,
        kept=sets.curve([own], mine),
        compared={name: sets.curve(rankings, compared[name]) for name, rankings in asked.items()},
        necessity=Necessity(
            own.own, case.clean, other, lost[0], tuple(lost[1 : 1 + draws]), tuple(lost[1 + draws :])
        ),
    )


def _taken_away(case: PatchingCase, own: Ranking, draws: int, seed: int) -> list[torch.Tensor]:
    """The circuit's components, as many at random, and as many that attend about as much, ``draws`` times each."""
    generator = torch.Generator().manual_seed(seed)
    mine = own.first(own.own)
    sites = [firing.site for firing in case.firings(mine)]
    draw = [
        drawn_like(case.recording, sites, generator, nearest)
        for nearest in (None, NEAREST)
        for _ in range(draws)
    ]
    return [mine, *(case.places_of(site.firing for site in sites) for sites in draw)]


def _check_everything(case: PatchingCase, value: float) -> None:
    """Everything kept is the model itself."""
    bound = 100 * case.rounding()
    if abs(value - case.clean) > bound:
        raise IdentityError(
            f"With every component kept the {case.metric.name} is {value:.6g}, and the model's own is "
            f"{case.clean:.6g}: further apart than rounding allows ({bound:.1e})."
        )
