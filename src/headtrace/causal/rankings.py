"""Orders in which components are kept: a circuit's own, and the baselines that it is compared with.

Every ranking holds all components of a prompt, so that all curves have the same ends. A method that names only some
(a circuit) is continued by the attention of the rest in the clean run, highest first; ``own`` says where that begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.causal.patching import PatchingCase, mask_gradients
from headtrace.circuits import Circuit, Node
from headtrace.errors import InputError
from headtrace.vocabulary import ATTENTION_SIDES, Firing

IG_POINTS = 8
Ranked = Circuit | Sequence[Firing | str]
"""What a user may give: a circuit (its heads by falling influence), or head components, the most important first."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """All components of a prompt, the most important first."""

    places: Int[Tensor, " component"]
    own: int
    """How many of them the method itself ranked."""

    def first(self, n: int) -> Int[Tensor, " kept"]:
        return self.places[:n]


def ranked_firings(given: Ranked) -> list[Firing]:
    """Head components in their order: those of a circuit by falling influence.

    Heads that speak against the root carry no influence; they belong to the picture, not to what is to be enough.
    """
    if isinstance(given, Circuit):
        heads = [node for node in given.heads() if node.influence is None or node.influence > 0]
        return [node.site.firing for node in sorted(heads or given.heads(), key=_importance)]
    return list(dict.fromkeys(Firing.parse(each) for each in given))


def _importance(node: Node) -> tuple[float, float, int]:
    return -(node.influence or 0.0), -(node.contribution or 0.0), node.id


def as_given(case: PatchingCase, given: Ranked) -> Ranking:
    """A circuit's own order, or that of a list, continued by attention."""
    own = case.places_of(ranked_firings(given))
    free = ~torch.isin(case.places, own)
    order = case.attention[free].argsort(descending=True, stable=True)
    return Ranking(torch.cat((own, case.places[free][order])), len(own))


def by_score(case: PatchingCase, scores: Float[Tensor, " component"]) -> Ranking:
    """Falling scores, one for each of the case's places."""
    order = scores.argsort(descending=True, stable=True)
    return Ranking(case.places[order], len(order))


def by_attention(case: PatchingCase) -> Ranking:
    """The components that attend most in the clean run."""
    return by_score(case, case.attention)


def at_random(case: PatchingCase, seed: int) -> Ranking:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(case.places), generator=generator).to(case.places.device)
    return Ranking(case.places[order], len(order))


def attribution_patching(case: PatchingCase, points: int | None = None) -> Ranking:
    """What the metric gains by keeping a component, to first order at the clean run.

    That is the metric's gradient times the component's difference from the counterfactual. With ``points`` the gradient
    is averaged over as many masks between nothing kept and everything kept: integrated gradients.
    """
    levels = [1.0] if points is None else [(point + 0.5) / points for point in range(points)]
    return by_score(case, mask_gradients(case, levels).flatten()[case.places])


def integrated_gradients(case: PatchingCase) -> Ranking:
    return attribution_patching(case, IG_POINTS)


def attention_circuit(case: PatchingCase, circuit: Circuit) -> Ranking:
    """ACC++ alone: the circuit of attention, traced with the defaults; the given one, if that is what it is."""
    sides = {"root", *ATTENTION_SIDES}
    if circuit.method.name == "acc++" and all(edge.side in sides for edge in circuit.edges):
        return as_given(case, circuit)
    from headtrace.tracing import Tracer

    root, ids = circuit.root, list(circuit.prompt.token_ids)
    ids = ids[: len(ids) - len(root.answer_prefix)]  # the tracer puts a continuation behind the prompt itself
    return as_given(case, Tracer(case.model).trace(ids, root=root))


Baseline = Callable[[PatchingCase, Circuit], Ranking]
BASELINES: Mapping[str, Baseline] = {
    "attention": lambda case, _: by_attention(case),
    "attribution patching": lambda case, _: attribution_patching(case),
    "integrated gradients": lambda case, _: integrated_gradients(case),
    "acc++": attention_circuit,
}
"""Rankings to compare with, by name; ``random`` is one more, drawn several times."""
RANDOM = "random"


def chosen_baselines(asked: bool | Sequence[str]) -> list[str]:
    """The names of the baselines that were asked for."""
    known = [RANDOM, *BASELINES]
    if isinstance(asked, bool):
        return known if asked else []
    names = [asked] if isinstance(asked, str) else list(asked)
    for name in names:
        if name not in known:
            raise InputError(f"There is no baseline {name!r}: choose from {', '.join(map(repr, known))}.")
    return names
