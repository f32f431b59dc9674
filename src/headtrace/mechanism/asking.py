"""From a prompt to its mechanism: find the answer, its rival and counterfactuals, trace, name, measure.

1. Choose the answer (the model's own), its rival, and natural changes of the prompt that flip it.
2. Trace the difference between the runs, and fold MLPs into the flows between heads.
3. Name what each head component does, and gather those that do the same into steps.
4. Ask why the heads that are shown attend where they do (ACC++).
5. Remove each step in the running model, beside as many random heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from headtrace.mechanism.backbone import Backbone
from headtrace.mechanism.evidence import measure_steps
from headtrace.mechanism.folding import fold_flows
from headtrace.mechanism.mechanism import Mechanism
from headtrace.mechanism.parts import LedgerLine
from headtrace.mechanism.rules import TOP_RAISED, answer_words
from headtrace.mechanism.steps import NOT_SHOWN, Reading, make_ledger, make_steps
from headtrace.progress import Progress, scaled
from headtrace.roots import Heads
from headtrace.tracing import Tracer
from headtrace.tracing.measured_replacements import BUDGET
from headtrace.tracing.prompt_words import ask, content_words, kind_of, plain
from headtrace.tracing.tracer import PromptComparison
from headtrace.vocabulary import Firing, Prompt, Site

if TYPE_CHECKING:
    from headtrace.models import Model, Recording
    from headtrace.request import ResolvedRequest
    from headtrace.roots.base import Answer

MOST_LOOKS = 5
"""Positions that a head looks at, here or in the other runs, the most first."""
MOST_CAUSES = 3
"""Causes of a query and of a key that are named, the strongest first."""
EXPLAINED_HEADS = 8
"""Heads whose attention is explained, those with most flow."""


def why(
    model: Model,
    prompt: Prompt,
    answer: Answer | None = None,
    wrong: Answer | None = None,
    counterfactual: Any = "auto",
    *,
    budget: int = BUDGET,
    seed: int = 0,
    bos: bool | None = None,
    measure: bool = True,
    progress: Progress | None = None,
) -> Mechanism:
    """Explain why the model answers as it does: a sentence, its steps, and the answer without each step.

    Without an ``answer``, the model's own; without a ``wrong`` one, its strongest rival. ``counterfactual`` is a prompt
    of as many tokens to compare with, several, or ``"auto"``: natural changes of one word that flip the answer, found
    by running at most ``budget`` changed prompts. ``measure=False`` leaves out the interventions. ``progress`` is
    called with what is done and what there is to do.
    """
    tracer = Tracer(model)
    asked = ask(
        model,
        prompt,
        answer,
        wrong,
        paths="difference",
        counterfactual=None if counterfactual == "auto" else counterfactual,
        bos=bos,
    )
    chosen = _chosen(model, asked, answer, wrong)
    compared = tracer.compare(asked, scaled(progress, 0, 70, 100), budget=budget, seed=seed)
    return tell(
        tracer, compared, chosen=chosen, seed=seed, measure=measure, progress=scaled(progress, 70, 30, 100)
    )


def tell(
    tracer: Tracer,
    compared: PromptComparison,
    *,
    chosen: tuple[str, ...] = (),
    seed: int = 0,
    measure: bool = True,
    progress: Progress | None = None,
) -> Mechanism:
    """The mechanism of a prompt beside those that it was compared with."""
    circuit, flows = compared.circuit, compared.flows
    if circuit.reason is not None or len(circuit.prompt.tokens) == 1:  # nothing differs, or nothing is moved
        whole = circuit.difference.change if circuit.difference is not None else 0.0
        return Mechanism(circuit, (), (), (LedgerLine(NOT_SHOWN, whole),), whole, chosen=chosen)
    with tracer.model.assume_weights_unchanged():
        backbone = fold_flows(flows, circuit)
        reading = _read(tracer, compared, backbone)
        steps, arrows = make_steps(circuit, backbone, reading)
        ledger, test = make_ledger(backbone, steps), None
        if measure and steps:
            steps, test = measure_steps(flows, steps, seed, progress)
    if progress is not None:
        progress(1, 1)
    return Mechanism(circuit, steps, arrows, ledger, backbone.whole, test, chosen)


def _chosen(model: Model, asked: ResolvedRequest, answer: object, wrong: object) -> tuple[str, ...]:
    """What headtrace chose itself, in words, and how."""
    root, said = asked.root, list[str]()
    answers, rivals = answer_words(root)
    if answer is None:
        said.append(f"The answer is the model's own: {', '.join(map(repr, answers))}.")
    if wrong is None and rivals:
        of_prompt = plain(rivals[0]) in content_words(model, asked.ids)
        kind = kind_of(rivals[0]) if kind_of(rivals[0]) == kind_of(answers[0]) else "token"
        how = "a likely word of the prompt" if of_prompt else f"the likeliest other {kind}"
        said.append(f"Its rival is {how}: {', '.join(map(repr, rivals))}.")
    return tuple(said)


# -- what is known about heads -------------------------------------------------------------------------------


@torch.inference_mode()
def _read(tracer: Tracer, compared: PromptComparison, backbone: Backbone) -> Reading:
    """Attention in both runs, what each head's write raises and lowers, and why the strongest ones attend."""
    first = compared.flows[0]
    recording, sites = first.flow.recording[first.prompt], list(backbone.flows)
    attention: dict[Site, float] = {}
    there: dict[Site, float] = {}
    looks: dict[Site, tuple[tuple[int, float, float], ...]] = {}
    for site in sites:
        layer, head, dest, src = site.layer or 0, site.head or 0, site.dest or 0, site.src or 0
        here = recording.attention.row(layer, 0, head, dest)[: dest + 1]
        others = [each.flow.other.attention.row(layer, each.prompt, head, dest) for each in compared.flows]
        other = torch.stack([row[: dest + 1] for row in others]).mean(0)
        attention[site], there[site] = float(here[src]), float(other[src])
        most = torch.maximum(here, other).topk(min(MOST_LOOKS, dest + 1)).indices.tolist()
        looks[site] = tuple((place, float(here[place]), float(other[place])) for place in most)
    position = recording.lengths[0] - 1
    speaking = [] if isinstance(first.root, Heads) else [site for site in sites if site.dest == position]
    raises, lowers = _logits(recording, speaking)
    firings = [site.firing for site in sites if attention[site] > 0][:EXPLAINED_HEADS]
    return Reading(attention, there, raises, lowers, _causes(tracer, recording, firings), looks)


def _logits(
    recording: Recording, sites: Sequence[Site]
) -> tuple[dict[Site, tuple[str, ...]], dict[Site, tuple[str, ...]]]:
    """The tokens whose logits each component's write raises and lowers most, through the frozen final norm."""
    if not sites:
        return {}, {}
    model, weights = recording.model, recording.model.weights
    writes = model.architecture.centred(recording.writes(sites)) * weights.final_gain
    effect = writes @ weights.W_U.T
    effect = effect - effect.mean(-1, keepdim=True)
    found: list[dict[Site, tuple[str, ...]]] = []
    for largest in (True, False):
        best = effect.topk(min(TOP_RAISED, effect.shape[-1]), largest=largest).indices.tolist()
        found.append({site: tuple(model.token_labels(row)) for site, row in zip(sites, best, strict=True)})
    return found[0], found[1]


def _causes(tracer: Tracer, recording: Recording, firings: Sequence[Firing]) -> dict[Site, tuple[str, ...]]:
    """Why heads attend: by side, the strongest causes, in words."""
    tokens = recording.tokens()
    followed = [f for f in firings if int(recording.visible[f.layer][0, f.dest].sum()) > 1]
    if not followed:
        return {}
    said: dict[Site, tuple[str, ...]] = {}
    for found in tracer.trace_firings(recording, followed):
        lines: list[str] = []
        for side in ("query", "key"):
            causes = sorted(found.side(side).causes, key=lambda cause: -cause.weight)[:MOST_CAUSES]
            lines += [f"{side}: {_words(cause.site, tokens)} ({cause.weight:+.2f})" for cause in causes]
        said[found.site] = tuple(lines)
    return said


def _words(site: Site, tokens: Sequence[str]) -> str:
    """A component for people: ``L17H4, which read "went"``."""
    if site.kind == "head" and site.src is not None:
        return f"L{site.layer}H{site.head}, which read {tokens[site.src].strip()!r}"
    if site.kind == "mlp":
        return f"MLP {site.layer}"
    words = {"embedding": "the token itself", "position": "its position", "offset": "the head's own bias"}
    return words.get(site.kind, str(site))
