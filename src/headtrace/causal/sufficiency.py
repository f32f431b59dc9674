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
from headtrace.causal.metric import require_metric
from headtrace.causal.opening import open_circuit, text_as_ids
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

    # The orders in which components are kept: the circuit's own, and those that it is compared with.
    own = as_given(case, circuit if ranking is None else ranking)
    compared: dict[str, list[Ranking]] = {
        name: [at_random(case, seed + draw) for draw in range(draws)]
        if name == RANDOM
        else [BASELINES[name](case, circuit)]
        for name in names
    }
    compared |= {name: [as_given(case, given)] for name, given in (compare or {}).items()}

    # The sizes at which each is measured: those that tables show, its own size, and MIB's shares of all components.
    total = len(case.places)
    shares = shares_of(total)
    shown = {0, *sizes(own.own), *sizes(SHOWN[-1])}

    def sizes_of(order: Ranking) -> list[int]:
        if order is own:
            return [0, *sizes(own.own)]
        return sorted({min(n, order.own) for n in shown | set(sizes(order.own) if order.own < total else ())})

    def key(order: Ranking, size: int) -> tuple[int, int]:
        """Sets are measured once: nothing and everything are the same in every order."""
        return (id(order) if 0 < size < total else 0), size

    kept = {
        key(order, size): case.keeping(order.first(size))
        for orders in ([own], *compared.values())
        for order in orders
        for size in (*sizes_of(order), *shares)
    }

    # Without the circuit's components; without as many at random, and as many that attend about as much.
    generator = torch.Generator().manual_seed(seed)
    sites = [firing.site for firing in case.firings(own.first(own.own))]
    controls = [
        drawn_like(case.recording, sites, generator, nearest)
        for nearest in (None, NEAREST)
        for _ in range(draws)
    ]
    removed = [case.without(case.places_of(site.firing for site in each)) for each in (sites, *controls)]

    values = measure([*removed, *kept.values()], progress)
    lost, found = values[: len(removed)], dict(zip(kept, values[len(removed) :], strict=True))
    bound = 100 * case.rounding()
    if abs(found[0, total] - case.clean) > bound:
        raise IdentityError(
            f"With every component kept the {case.metric.name} is {found[0, total]:.6g}, and the model's own is "
            f"{case.clean:.6g}: further apart than rounding allows ({bound:.1e})."
        )

    def curve(orders: Sequence[Ranking]) -> Curve:
        """Of an order; of several draws, the mean."""

        def at(size: int) -> tuple[int, float]:
            mean = fmean(found[key(order, size)] for order in orders)
            return size, (mean - other) / (case.clean - other)

        return Curve(tuple(map(at, sizes_of(orders[0]))), orders[0].own, tuple(map(at, shares)))

    return Sufficiency(
        circuit=circuit,
        case=case,
        ranking=own,
        metric=case.metric.name,
        clean=case.clean,
        counterfactual=other,
        ablation=ablation,
        kept=curve([own]),
        compared={name: curve(orders) for name, orders in compared.items()},
        necessity=Necessity(
            own.own, case.clean, other, lost[0], tuple(lost[1 : 1 + draws]), tuple(lost[1 + draws :])
        ),
    )


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
    if abs(case.clean - other) <= case.rounding():
        where = "with nothing kept" if counterfactual is None else "on the counterfactual prompt"
        raise InputError(
            f"The {case.metric.name} is {case.clean:.6g} on the circuit's prompt and {other:.6g} {where}: within "
            "rounding, nothing is lost, so no share of it can be kept. Choose a counterfactual that changes the answer."
        )
    return case, other


def counterfactual_ids(circuit: Circuit, model: Model, counterfactual: Prompt) -> list[int]:
    """Token ids of a counterfactual prompt, read as the circuit's own was; of the same length, and another one."""
    own = list(circuit.prompt.token_ids)
    bos = None
    if circuit.prompt.text is not None and isinstance(counterfactual, str):
        # Text is read with a beginning-of-sequence token or without, as the circuit's own text was.
        read = text_as_ids(model, circuit.prompt.text)
        bos = next((bos for bos, found in read.items() if found == own[: len(found)]), None)
    ids = model.to_ids(counterfactual, bos=bos)
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
