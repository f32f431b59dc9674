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

Above 1 is no error: what opposes the answer was left out.

>>> sizes(27)
[1, 2, 5, 10, 20, 27]
>>> shares_of(25_000)[:4]
[25, 50, 125, 250]
>>> areas([0.0, 0.5, 1.0], [0.0, 1.0, 1.0])                    # below the curve, and between the curve and 1
(0.75, 0.25)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from headtrace.causal.changes import FixedValues, OtherRun
from headtrace.causal.execute import Copy
from headtrace.causal.metric import require_metric
from headtrace.causal.opening import open_circuit, text_as_ids
from headtrace.causal.patching import (
    BASELINES,
    NEAREST,
    RANDOM,
    ComponentRanking,
    PatchingCase,
    Ranked,
    as_given,
    at_random,
    chosen_baselines,
    drawn_like,
    measure,
    ranked_firings,
)
from headtrace.errors import IdentityError, InputError
from headtrace.progress import Progress
from headtrace.tables import chart, frame, paragraph
from headtrace.writing import write_text

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

    from headtrace.circuits import Circuit
    from headtrace.models import Model, Recording
    from headtrace.roots import Root
    from headtrace.vocabulary import Firing, Prompt

Ablation = Literal["counterfactual", "mean", "zero"]
SCHEMA = "headtrace.sufficiency/1"
HARDLY = 0.1
"""A summary warns where clean and counterfactual metrics differ by less than this share of the larger."""
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Of all components: where MIB measures a curve."""
SHOWN = (5, 10, 20, 40)
"""The sizes that tables compare."""


# -- results ---------------------------------------------------------------------------------------------------


def sizes(own: int) -> list[int]:
    """1, 2, 5, 10, 20, 40, ... up to a circuit's own size, which is measured too."""
    marks = [1, 2, *(5 * 2**i for i in range(max(own, 1).bit_length()))]
    return [*(size for size in marks if size < own), *([own] if own else [])]


def shares_of(total: int) -> list[int]:
    """How many components each of ``SHARES`` is: at least one."""
    return [max(1, round(share * total)) for share in SHARES]


def areas(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """By trapezoid, the area below a curve (CPR) and that of its distance from one (CMD)."""
    at, curve = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
    return float(torch.trapezoid(curve, at)), float(torch.trapezoid((1 - curve).abs(), at))


@dataclass(frozen=True)
class Curve:
    """Sufficiency over the number of components kept."""

    points: tuple[tuple[int, float], ...]
    """(components, sufficiency): nothing first, then up to all that the method itself ranks."""
    own: int
    """How many it ranks."""
    continued: tuple[tuple[int, float], ...]
    """The same at MIB's shares of all components, the ranking continued by attention."""

    @property
    def cpr(self) -> float:
        """The area below the curve, from 0.1 % to all of the components: higher is better."""
        return areas(SHARES, [value for _, value in self.continued])[0]

    @property
    def cmd(self) -> float:
        """The area between the curve and 1: lower is better."""
        return areas(SHARES, [value for _, value in self.continued])[1]

    def at(self, n: int) -> float | None:
        """Sufficiency with the first n components (all, where there are fewer); None where that was not measured."""
        return dict(self.points).get(min(n, self.own))

    def to_dict(self) -> dict[str, Any]:
        """The curve as plain values."""
        return {
            "components": self.own,
            "curve": [{"components": n, "sufficiency": value} for n, value in self.points],
            "continued": [
                {"share": share, "components": n, "sufficiency": value}
                for share, (n, value) in zip(SHARES, self.continued, strict=True)
            ],
            "cpr": self.cpr,
            "cmd": self.cmd,
        }


@dataclass(frozen=True)
class Necessity:
    """The metric without the circuit: its components from the counterfactual, all others live.

    A loss is a share of m(clean) - m(counterfactual): 1 where the metric falls to that of the counterfactual.
    """

    components: int
    clean: float
    counterfactual: float
    without: float
    """The metric without the circuit's components."""
    without_random: tuple[float, ...]
    """The metric without as many others of the same layers, one number for each draw."""
    without_attended: tuple[float, ...]
    """The same with others that attend about as much."""

    def _loss(self, values: Sequence[float]) -> float:
        return (self.clean - fmean(values)) / (self.clean - self.counterfactual)

    @property
    def loss(self) -> float:
        """The share of the whole effect that is lost without the circuit."""
        return self._loss([self.without])

    @property
    def random_loss(self) -> float:
        """Mean over the draws."""
        return self._loss(self.without_random)

    @property
    def attended_loss(self) -> float:
        """Mean over the draws."""
        return self._loss(self.without_attended)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, with the losses."""
        return {
            "components": self.components,
            "without": self.without,
            "without_random": list(self.without_random),
            "without_attended": list(self.without_attended),
            "loss": self.loss,
            "random_loss": self.random_loss,
            "attended_loss": self.attended_loss,
        }


@dataclass(frozen=True)
class Sufficiency:
    """Is a circuit enough, and is it needed? Made by ``headtrace.sufficiency``."""

    circuit: Circuit
    case: PatchingCase = field(repr=False)
    ranking: ComponentRanking = field(repr=False)
    metric: str
    clean: float
    """The metric of the model on the circuit's prompt."""
    counterfactual: float
    """The metric on the counterfactual prompt (mean and zero ablation: with nothing kept)."""
    ablation: str
    kept: Curve
    compared: Mapping[str, Curve]
    """The curves of the baselines, and of what else it was compared with, by name."""
    necessity: Necessity

    @property
    def size(self) -> int:
        """How many head components the circuit has."""
        return self.kept.own

    @property
    def curve(self) -> dict[int, float]:
        """Components kept, by falling influence, and the sufficiency of so many."""
        return dict(self.kept.points)

    @property
    def sufficiency(self) -> float:
        """Sufficiency of the whole circuit."""
        return self.at(self.size)

    @property
    def nothing(self) -> float:
        """What embeddings and MLPs give without any component of the prompt's own: sufficiency of the empty set."""
        return self.curve[0]

    @property
    def cpr(self) -> float:
        """The area below the curve at MIB's shares of all components: higher is better."""
        return self.kept.cpr

    @property
    def cmd(self) -> float:
        """The area between that curve and 1: lower is better."""
        return self.kept.cmd

    def at(self, n: int) -> float:
        """Sufficiency of the n most influential components (of the whole circuit, where it has fewer).

        A size that was not measured yet is measured now.
        """
        if n < 0:
            raise InputError(f"at({n}): a circuit keeps 0 components or more.")
        known = self.kept.at(n)
        return self.keeping(self.ranking.first(n)) if known is None else known

    def keeping(self, places: torch.Tensor) -> float:
        """Sufficiency of any set of components, given as places of the case (``found.case.places_of(firings)``)."""
        value = measure([self.case.keeping(places)])[0]
        return (value - self.counterfactual) / (self.clean - self.counterfactual)

    @property
    def baselines(self) -> pl.DataFrame:
        """A row for the circuit and each baseline: sufficiency at some sizes and at the circuit's own, CPR, CMD."""
        import polars as pl

        rows = [
            {
                "ranking": name,
                **{f"at {n}": curve.at(n) for n in SHOWN},
                "at own size": curve.at(self.size),
                "cpr": curve.cpr,
                "cmd": curve.cmd,
            }
            for name, curve in {"circuit": self.kept, **self.compared}.items()
        ]
        rows[0] |= {f"at {n}": self.at(n) for n in SHOWN}
        return pl.DataFrame(rows)

    def frame(self) -> pl.DataFrame:
        """The curves: a row per ranking (the circuit, each baseline) and number of components kept: sufficiency."""
        import polars as pl

        rows = [
            (name, n, value)
            for name, curve in {"circuit": self.kept, **self.compared}.items()
            for n, value in curve.points
        ]
        kinds: Any = {"ranking": pl.String, "components": pl.Int64, "sufficiency": pl.Float64}
        return pl.DataFrame(rows, schema=kinds, orient="row")

    def specificity(self, *others: Sufficiency) -> pl.DataFrame:
        """What taking each circuit's heads away does to each prompt: a row per circuit and prompt, this one first.

        Positions differ from prompt to prompt, so whole heads are taken away, at every position: the same heads
        everywhere. ``loss`` is a share of what the prompt's own counterfactual takes away.
        """
        import polars as pl

        every = (self, *others)
        if any(one.case.model is not self.case.model for one in others):
            raise InputError(
                "Circuits are compared on one model: measure all of them with the same loaded model."
            )
        copies: list[Copy] = []
        rows: list[dict[str, Any]] = []
        for i, theirs in enumerate(every):
            layers, heads, *_ = torch.unravel_index(theirs.ranking.first(theirs.size), theirs.case.shape)
            taken = torch.zeros(theirs.case.shape[:2], dtype=torch.bool, device=layers.device)
            taken[layers, heads] = True
            for j, one in enumerate(every):
                layers, heads, *_ = torch.unravel_index(one.case.places, one.case.shape)
                copies.append(one.case.without(one.case.places[taken[layers, heads]]))
                rows.append({"circuit": i, "prompt": j, "heads": int(taken.sum())})
        for row, value in zip(rows, measure(copies), strict=True):
            one = every[row["prompt"]]
            row |= {"metric": value, "loss": (one.clean - value) / (one.clean - one.counterfactual)}
        return pl.DataFrame(rows)

    def summary(self) -> str:
        """A few lines for people."""
        other = (
            "on the counterfactual prompt"
            if self.ablation == "counterfactual"
            else f"with nothing kept ({self.ablation} ablation)"
        )
        shown = ", ".join(f"{n}: {value:.2f}" for n, value in self.kept.points)
        need = self.necessity
        warning = (
            "  (these hardly differ, so shares of their difference can be anything: another counterfactual says more)\n"
            if abs(self.clean - self.counterfactual) < HARDLY * max(abs(self.clean), abs(self.counterfactual))
            else ""
        )
        return (
            f"{self.metric}: {self.clean:.3f} on the prompt, {self.counterfactual:.3f} {other}\n{warning}"
            f"Sufficiency of the circuit's {self.size} head components (of {len(self.case.places):,}): "
            f"{self.sufficiency:.3f}\n"
            f"  by number kept: {shown}\n"
            f"  area below the curve (CPR) {self.cpr:.3f}, between it and 1 (CMD) {self.cmd:.3f}\n"
            f"Necessity: without them {need.loss:.3f} of the difference is lost (as many random ones "
            f"{need.random_loss:.3f}, equally attended ones {need.attended_loss:.3f})"
        )

    def __repr__(self) -> str:
        return (
            f"Sufficiency({self.sufficiency:.3f} with {self.size} components, cpr {self.cpr:.3f}, cmd {self.cmd:.3f}, "
            f"loss without them {self.necessity.loss:.3f}, {self.ablation})"
        )

    def _repr_html_(self) -> str:
        lines = self.summary().splitlines()
        return "".join(map(paragraph, lines)) + frame(self.baselines) + chart(self.plot())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        circuit = self.circuit
        return {
            "schema": SCHEMA,
            "model": {"name": circuit.model.name, "weights_sha256": circuit.model.weights_sha256},
            "prompt": circuit.prompt.text,
            "metric": self.metric,
            "clean": self.clean,
            "counterfactual": self.counterfactual,
            "ablation": self.ablation,
            "total": len(self.case.places),
            "sufficiency": self.sufficiency,
            **self.kept.to_dict(),
            "necessity": self.necessity.to_dict(),
            "baselines": {name: curve.to_dict() for name, curve in self.compared.items()},
        }

    def save(self, folder: str | Path) -> Path:
        """Write ``sufficiency.json`` and ``sufficiency.png`` into a folder."""
        path = Path(folder)
        write_text(path / "sufficiency.json", json.dumps(self.to_dict(), indent=1) + "\n")
        self.plot(path / "sufficiency.png")
        return path

    def plot(self, path: str | Path | None = None) -> Figure:
        """The curve beside those of the baselines."""
        from headtrace.figures.causal import sufficiency_curves

        return sufficiency_curves(self, path)


# -- measuring -------------------------------------------------------------------------------------------------


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
    """Measure how much of the root's metric a circuit keeps alone, at every size, and how much is lost without it.

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
    compared: dict[str, list[ComponentRanking]] = {
        name: [at_random(case, seed + draw) for draw in range(draws)]
        if name == RANDOM
        else [BASELINES[name](case, circuit)]
        for name in names
    }
    compared |= {name: [as_given(case, given)] for name, given in (compare or {}).items()}

    # The sizes at which each is measured: those that tables show, its own size, and MIB's shares of all components.
    total, shown = len(case.places), {0, *sizes(own.own), *sizes(SHOWN[-1])}
    wanted = [([own], [0, *sizes(own.own)])] + [
        (orders, shown | set(sizes(orders[0].own) if orders[0].own < total else ()))
        for orders in compared.values()
    ]

    # Without the circuit's components; without as many at random, and as many that attend about as much.
    generator = torch.Generator().manual_seed(seed)
    sites = [firing.site for firing in case.firings(own.first(own.own))]
    controls = [
        drawn_like(case.recording, sites, generator, nearest)
        for nearest in (None, NEAREST)
        for _ in range(draws)
    ]
    removed = [case.without(case.places_of(site.firing for site in each)) for each in (sites, *controls)]

    curves, lost = measured_curves(case, other, wanted, removed, progress)
    return Sufficiency(
        circuit=circuit,
        case=case,
        ranking=own,
        metric=case.metric.name,
        clean=case.clean,
        counterfactual=other,
        ablation=ablation,
        kept=curves[0],
        compared=dict(zip(compared, curves[1:], strict=True)),
        necessity=Necessity(
            own.own, case.clean, other, lost[0], tuple(lost[1 : 1 + draws]), tuple(lost[1 + draws :])
        ),
    )


def measured_curves(
    case: PatchingCase,
    other: float,
    wanted: Sequence[tuple[Sequence[ComponentRanking], Iterable[int]]],
    removed: Sequence[Copy] = (),
    progress: Progress | None = None,
) -> tuple[list[Curve], list[float]]:
    """Curves of rankings at some sizes (and at MIB's shares), all in one batch of passes; ``other`` is
    m(counterfactual).

    Each of ``wanted`` is a ranking and its sizes; of several (draws at random), the mean. ``removed`` are copies of the
    prompt that run along: their metric is the second result.
    """
    total = len(case.places)
    shares = shares_of(total)

    def key(order: ComponentRanking, size: int) -> tuple[int, int]:
        """Sets are measured once: nothing and everything are the same in every order."""
        return (id(order) if 0 < size < total else 0), size

    at = [sorted({min(size, orders[0].own) for size in some}) for orders, some in wanted]
    kept = {(0, total): case.keeping(case.places)}
    kept |= {
        key(order, size): case.keeping(order.first(size))
        for (orders, _), some in zip(wanted, at, strict=True)
        for order in orders
        for size in (*some, *shares)
    }
    values = measure([*removed, *kept.values()], progress)
    found = dict(zip(kept, values[len(removed) :], strict=True))
    bound = 100 * case.rounding()
    if abs(found[0, total] - case.clean) > bound:
        raise IdentityError(
            f"With every component kept the {case.metric.name} is {found[0, total]:.6g}, and the model's own is "
            f"{case.clean:.6g}: further apart than rounding allows ({bound:.1e})."
        )

    def curve(orders: Sequence[ComponentRanking], some: Sequence[int]) -> Curve:
        def point(size: int) -> tuple[int, float]:
            mean = fmean(found[key(order, size)] for order in orders)
            return size, (mean - other) / (case.clean - other)

        return Curve(tuple(map(point, some)), orders[0].own, tuple(map(point, shares)))

    curves = [curve(orders, some) for (orders, _), some in zip(wanted, at, strict=True)]
    return curves, values[: len(removed)]


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
    if not (ranked_firings(circuit) if ranking is None else ranking):
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
    ids = None if counterfactual is None else counterfactual_ids(circuit, model, counterfactual)
    return patching_case(recording, circuit.root, ids, ablation)


def patching_case(
    recording: Recording, root: Root, counterfactual: list[int] | None, ablation: Ablation = "counterfactual"
) -> tuple[PatchingCase, float]:
    """A recorded prompt and what a root reads on it ready to be patched, and m(counterfactual)."""
    metric = require_metric(root, recording, "what is kept of it")
    if counterfactual is None:
        case = PatchingCase(recording, metric, FixedValues.of(recording, ablation))
        other = measure([case.keeping(case.places[:0])])[0]
    else:
        theirs = recording.model.record([counterfactual], keep=("patterns", "values", "residuals"))
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
