"""From a backbone to steps: name the components, gather those that do the same, order them, and close the ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headtrace.circuits import Circuit
from headtrace.mechanism.backbone import Backbone
from headtrace.mechanism.parts import Arrow, LedgerLine, Step, StepHead
from headtrace.mechanism.rules import (
    LOOKING,
    MLPS,
    RULES,
    Facts,
    answer_words,
    favoured_words,
    is_continued,
    role,
    token_phrase,
)
from headtrace.mechanism.sentence import looking_text
from headtrace.vocabulary import Side, Site

MOST_STEPS = 7
"""A person can hold seven."""
LEAST_MLPS = 0.05
"""MLPs at the answer's position are a step of their own from this share of the whole on."""
LEAST_ARROW = 0.02
MOST_ARROWS = 10
ARROWS_CARRY = 0.9
"""Arrows between steps are drawn, strongest first, until they carry this share of all that flows between steps."""
LEAST_LINE = 0.005
"""A line of the ledger has more than this share of the whole; less is part of what is not shown."""
NOT_SHOWN = "not shown"


@dataclass(frozen=True)
class Reading:
    """What is known about head components besides their flows, from the model or from a circuit file."""

    attention: Mapping[Site, float]
    other_attention: Mapping[Site, float]
    raises: Mapping[Site, tuple[str, ...]]
    lowers: Mapping[Site, tuple[str, ...]]
    causes: Mapping[Site, tuple[str, ...]]
    looks: Mapping[Site, tuple[tuple[int, float, float], ...]]
    """Where each looks from its destination: positions, attention here and in the other runs."""

    @classmethod
    def of_circuit(cls, circuit: Circuit) -> Reading:
        """From what a circuit file says."""
        heads = circuit.heads()
        return cls(
            {node.site: node.attention for node in heads if node.attention is not None},
            {node.site: node.other_attention for node in heads if node.other_attention is not None},
            {},
            {},
            {},
            {},
        )


def make_steps(
    circuit: Circuit, backbone: Backbone, reading: Reading
) -> tuple[tuple[Step, ...], tuple[Arrow, ...]]:
    """Steps by stage, and the arrows between them and from tokens, the strongest first."""
    facts = {site: _facts(circuit, backbone, reading, site) for site in backbone.flows}
    groups: dict[tuple[str, int, int | str | None], list[Site]] = defaultdict(list)
    for site, known in facts.items():
        name = role(known)
        by = RULES[name].by
        source = known.src if by == "place" else known.tokens[known.src].strip() if by == "word" else None
        groups[name, known.dest, source].append(site)
    steps = [
        _step(backbone, reading, name, [facts[site] for site in s], s) for (name, _, _), s in groups.items()
    ]
    if abs(backbone.mlps_into_root) >= LEAST_MLPS * abs(backbone.whole):
        steps.append(_mlps(circuit, backbone))
    steps.sort(key=lambda step: (-max(abs(step.root), abs(step.flow)), step.dest or 0, step.text))
    steps = _joined(steps, backbone, circuit.prompt.tokens)[:MOST_STEPS]
    numbered = [replace(step, id=number) for number, step in enumerate(steps)]
    steps, arrows = _staged(numbered, _arrows(backbone, numbered), abs(backbone.whole))
    return steps, arrows


def _facts(circuit: Circuit, backbone: Backbone, reading: Reading, site: Site) -> Facts:
    tokens, (answer, wrong) = circuit.prompt.tokens, answer_words(circuit.root)
    return Facts(
        tokens,
        site.dest or 0,
        site.src or 0,
        backbone.flows[site],
        backbone.whole,
        backbone.direct.get(site, 0.0),
        backbone.logits.get(site),
        reading.raises.get(site, ()),
        answer,
        wrong,
        is_continued(circuit.root),
        attention=reading.attention.get(site),
        other_attention=reading.other_attention.get(site),
    )


def _joined(steps: list[Step], backbone: Backbone, tokens: Sequence[str]) -> list[Step]:
    """Where there are too many steps, those that look from one token at several become one, the weakest first."""
    steps = list(steps)
    while len(steps) > MOST_STEPS:
        pair = next(
            (
                (strong, weak)
                for weak in reversed(steps)
                for strong in steps[:MOST_STEPS]
                if strong is not weak and strong.dest == weak.dest and {strong.role, weak.role} <= LOOKING
            ),
            None,
        )
        if pair is None:
            break
        strong, weak = sorted(pair, key=steps.index)
        mine, others = ({head.site for head in step.heads} for step in (strong, weak))
        between = sum(
            folded.flow
            for (source, target, _), folded in backbone.edges.items()
            if (source in mine and target in others) or (source in others and target in mine)
        )
        steps[steps.index(strong)] = join_steps(strong, weak, between, tokens)
        steps.remove(weak)
    return steps


def join_steps(strong: Step, weak: Step, between: float, tokens: Sequence[str]) -> Step:
    """Two steps as one: what flows between them, in either direction, no longer enters from outside."""
    both = [each for each in (strong.logits, weak.logits) if each is not None]
    heads = tuple(sorted((*strong.heads, *weak.heads), key=lambda head: -abs(head.flow)))
    looking = strong.dest == weak.dest and {strong.role, weak.role} <= LOOKING
    return replace(
        strong,
        text=looking_text(tokens, heads) if looking else f"{strong.title}, and {weak.title}",
        heads=heads,
        flow=strong.flow + weak.flow - between,
        root=strong.root + weak.root,
        logits=(sum(a for a, _ in both), sum(b for _, b in both)) if both else None,
    )


def _step(backbone: Backbone, reading: Reading, name: str, facts: Sequence[Facts], sites: list[Site]) -> Step:
    """One step of components that share a name and a place."""
    order = sorted(range(len(sites)), key=lambda i: (-abs(facts[i].flow), sites[i]))
    inner = sum(
        folded.flow
        for (source, target, _), folded in backbone.edges.items()
        if source in sites and target in sites
    )
    moved = [each.logits for each in facts if each.logits is not None]
    logits = (sum(a for a, _ in moved), sum(b for _, b in moved)) if moved else None
    alone = len({each.src for each in facts}) == 1
    strongest = replace(facts[order[0]], logits=logits, alone=alone)
    heads = tuple(
        StepHead(
            f"L{site.layer}H{site.head}",
            site.layer or 0,
            site.head or 0,
            site.dest or 0,
            site.src or 0,
            known.flow,
            known.root,
            reading.attention.get(site),
            reading.other_attention.get(site),
            reading.raises.get(site, ()),
            reading.lowers.get(site, ()),
            reading.looks.get(site, ()),
            reading.causes.get(site, ()),
        )
        for site, known in ((sites[i], facts[i]) for i in order)
    )
    return Step(
        0,
        name,
        RULES[name].words(strongest),
        sum(each.flow for each in facts) - inner,
        sum(each.root for each in facts),
        strongest.dest,
        strongest.src,
        heads,
        logits=logits,
    )


def _mlps(circuit: Circuit, backbone: Backbone) -> Step:
    """The MLPs next to the root: one step."""
    root = circuit.root_node
    nodes = [] if root is None else [circuit.node(edge.source) for edge in circuit.edges_into(root)]
    mlps = [node for node in nodes if node.kind == "mlp"]
    layers = [node.layer or 0 for node in mlps]
    position = max((node.dest or 0 for node in mlps), default=len(circuit.prompt.tokens) - 1)
    where = token_phrase(circuit.prompt.tokens, position)
    verb = "favour" if backbone.mlps_into_root * backbone.whole > 0 else "work against"
    favoured = favoured_words(*answer_words(circuit.root), backbone.whole, is_continued(circuit.root))
    return Step(
        0,
        MLPS,
        f"the MLPs at {where} {verb} {favoured}",
        backbone.mlps_into_root,
        backbone.mlps_into_root,
        position,
        layers=(min(layers), max(layers)) if layers else None,
    )


# -- arrows and stages ---------------------------------------------------------------------------------------


def _arrows(backbone: Backbone, steps: Sequence[Step]) -> list[Arrow]:
    """All that flows between steps and from tokens into steps, summed over their components."""
    of = {head.site: step.id for step in steps for head in step.heads}
    sums: dict[tuple[int | None, int | None, int, Side], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(source: Site, target: int, side: Side, flow: float, through: float) -> None:
        if source.kind == "embedding":
            key = (None, source.dest, target, side)
        elif source in of and of[source] != target:
            key = (of[source], None, target, side)
        else:
            return
        sums[key][0] += flow
        sums[key][1] += through

    for (source, target, side), folded in backbone.edges.items():
        if target in of:
            add(source, of[target], side, folded.flow, folded.flow - folded.direct)
    mlps = next((step.id for step in steps if step.role == MLPS), None)
    if mlps is not None:
        for source, flow in backbone.into_mlps.items():
            add(source, mlps, "input", flow, flow)
    return [
        Arrow(target, side, flow, step, token, through)
        for (step, token, target, side), (flow, through) in sums.items()
    ]


def _staged(
    steps: Sequence[Step], arrows: Sequence[Arrow], whole: float
) -> tuple[tuple[Step, ...], tuple[Arrow, ...]]:
    """Steps in rows above what feeds them, numbered from the bottom up; which arrows are worth drawing."""
    height = {step.id: _height(step) for step in steps}
    strong = [arrow for arrow in arrows if abs(arrow.flow) >= LEAST_ARROW * whole]
    between = sorted(
        (arrow for arrow in strong if arrow.step is not None and height[arrow.step] < height[arrow.target]),
        key=lambda arrow: (-abs(arrow.flow), arrow.target, arrow.side),
    )
    total, carried, kept = sum(abs(arrow.flow) for arrow in between), 0.0, list[Arrow]()
    for arrow in between[:MOST_ARROWS]:
        if carried >= ARROWS_CARRY * total:
            break
        kept.append(arrow)
        carried += abs(arrow.flow)
    hidden = [replace(arrow, shown=False) for arrow in arrows if arrow.step is not None and arrow not in kept]
    tokens: list[Arrow] = []
    for step in steps:
        mine = [arrow for arrow in strong if arrow.target == step.id and arrow.token is not None]
        tokens += sorted(mine, key=lambda arrow: (-abs(arrow.flow), arrow.token or 0, arrow.side))[:2]

    stage = _stages(steps, kept, height)
    order = sorted(
        steps,
        key=lambda step: (stage[step.id], step.root != 0.0, height[step.id], -abs(step.flow), step.text),
    )
    number = {step.id: place + 1 for place, step in enumerate(order)}
    arrows = [
        replace(arrow, target=number[arrow.target], step=None if arrow.step is None else number[arrow.step])
        for arrow in [*kept, *tokens, *hidden]
    ]
    renumbered = [replace(step, id=number[step.id], stage=stage[step.id]) for step in order]
    return tuple(renumbered), tuple(
        sorted(arrows, key=lambda a: (not a.shown, a.step is None, -abs(a.flow), a.target, a.side))
    )


def _stages(steps: Sequence[Step], arrows: Sequence[Arrow], height: Mapping[int, float]) -> dict[int, int]:
    """The row of each step: those that look at something by what feeds them (two rows at most), above them those that
    speak to the answer, and on top what passes on what others said."""
    stage: dict[int, int] = {}
    looking = [step for step in steps if step.role in LOOKING]
    for step in sorted(looking, key=lambda step: (height[step.id], step.id)):
        below = [stage[arrow.step] for arrow in arrows if arrow.target == step.id and arrow.step in stage]
        stage[step.id] = min(1, 1 + max(below)) if below else 0
    row = 1 + max(stage.values(), default=-1)
    late = [step for step in steps if step.role in ("passes on", MLPS)]
    speaking = [step for step in steps if step.id not in stage and step not in late]
    stage |= {step.id: row for step in speaking}
    stage |= {step.id: row + bool(speaking) for step in late}
    return stage


def _height(step: Step) -> float:
    """The mean layer of a step, each component counted by its flow; MLPs next to the root are above all heads."""
    if step.role == MLPS:
        return float("inf")
    total = sum(abs(head.flow) for head in step.heads) or 1.0
    return sum(abs(head.flow) * head.layer for head in step.heads) / total


# -- ledger -------------------------------------------------------------------------------------------------


def make_ledger(backbone: Backbone, steps: Sequence[Step]) -> tuple[LedgerLine, ...]:
    """What comes straight into the root: the steps that are shown, MLPs, and the rest; together the whole."""
    least = LEAST_LINE * abs(backbone.whole)
    lines = [LedgerLine(step.text, step.root, step.id) for step in steps if abs(step.root) > least]
    if not any(step.role == MLPS for step in steps) and backbone.mlps_into_root:
        lines.append(LedgerLine("MLPs", backbone.mlps_into_root))
    lines.append(LedgerLine(NOT_SHOWN, backbone.whole - sum(line.amount for line in lines)))
    return tuple(lines)
