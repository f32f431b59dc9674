"""Difference circuits: their numbers computed again, and their components put to the test.

A flow says what happened between two runs. A patch is an experiment: components take what they had in the other run,
everything else runs live, and the metric is read. The two agree to first order only, for what is missing is made up for
by others; so a verification compares flows with flows computed again, which must agree to rounding, and shows what was
measured beside them, with the correlation and the residual as figures.

>>> import headtrace
>>> from headtrace.vocabulary import Site
>>> model = headtrace.load("builtin")
>>> clean, other = (model.record(f"When Mary and John went to the store, {name} gave a drink to")
...                 for name in ("John", "Mary"))
>>> root = headtrace.roots.LogitDifference((model.token_id(" Mary"),), (model.token_id(" John"),))
>>> step = [Site("head", 2, head, 14, 10) for head in range(3)]
>>> (found,) = patch_sets(clean, other, root, [step])
>>> bool(found.effect > 5 > abs(found.random_effect))
True
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import torch

from headtrace.causal.changes import Intervention, OtherRun, Patch
from headtrace.causal.checks import Checking
from headtrace.causal.execute import Copy
from headtrace.causal.metric import require_metric
from headtrace.causal.patching import measure
from headtrace.causal.signals import edge_name
from headtrace.circuits.graph import node_influence
from headtrace.errors import InputError
from headtrace.roots import Heads
from headtrace.tables import frame, paragraph
from headtrace.tracing.difference_circuit import PairFlow, PromptPair, edge_logits, trace_pairs
from headtrace.tracing.edge_flows import mean_edges
from headtrace.vocabulary import Kind, Site

if TYPE_CHECKING:
    import polars as pl

    from headtrace.circuits import Circuit, DifferenceInfo, Edge, Node
    from headtrace.models import Recording
    from headtrace.progress import Progress
    from headtrace.roots import Root

WRITTEN = 1e-6
"""Numbers that follow from others in the file alone agree to this."""
ALL_HEADS = "all heads"
"""The group of every head that is patched."""


# -- patches -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PatchedSet:
    """The metric when some components are set to their values in the other run, and when all others are."""

    components: int
    clean: float
    """The metric of the prompt."""
    other: float
    """The metric of the other prompt."""
    patched: float
    """The metric where these components have what they had in the other run, and everything else runs live."""
    kept: float
    """The metric where these run live, and every other head component has what it had in the other run."""
    random_patched: tuple[float, ...]
    """The first with as many random components of the same layers and kinds, one number for each draw."""
    random_kept: tuple[float, ...]
    """The second with as many random components."""

    @property
    def effect(self) -> float:
        """What is lost without them: positive where they speak for the answer."""
        return self.clean - self.patched

    @property
    def random_effect(self) -> float:
        """The same of random components, the mean over the draws."""
        return self.clean - fmean(self.random_patched or (self.clean,))

    @property
    def sufficiency(self) -> float:
        """The share of clean - other that these components alone keep."""
        return (self.kept - self.other) / (self.clean - self.other)


def patch_sets(
    recording: Recording,
    other: Recording,
    root: Root,
    sets: Sequence[Sequence[Site]],
    *,
    draws: int = 1,
    seed: int = 0,
    mlps: Literal["live", "patched"] = "live",
    progress: Progress | None = None,
) -> list[PatchedSet]:
    """Patch sets of head components and MLPs to another run, and keep only them: all sets in one batch of passes.

    Both recordings are of one prompt each, of the same length, with everything kept. ``draws`` random sets of as many
    components, of the same layers and kinds and at tokens that can differ, are the control of each set. Where only a
    set is kept, all other heads are patched; MLPs run live, or with ``mlps="patched"`` all others are patched too.
    """
    _require_one_each(recording, other)
    metric = require_metric(root, recording, "what patches do to it")
    clean, theirs = metric.of(recording), metric.of(other)
    source, generator = OtherRun.of(other), torch.Generator().manual_seed(seed)
    others: tuple[Kind, ...] = ("head",) if mlps == "live" else ("head", "mlp")
    every: list[tuple[Site, ...]] = []
    for sites in sets:
        _require_components(recording, sites)
        every += [tuple(dict.fromkeys(sites))]
        every += [_random_like(recording, other, every[-1], generator) for _ in range(draws)]
    copies = [
        Copy(recording, Intervention((patch,)), metric)
        for sites in every
        for patch in (
            Patch(source, sites),
            Patch(source, tuple(site for site in sites if site.kind in others), all_but=others),
        )
    ]
    values = measure(copies, progress) if copies else []
    found: list[PatchedSet] = []
    step = 2 * (1 + draws)
    for place, sites in enumerate(every[:: 1 + draws]):
        patched, kept = (
            values[place * step : (place + 1) * step : 2],
            values[place * step + 1 : (place + 1) * step : 2],
        )
        random = tuple(patched[1:]), tuple(kept[1:])
        found.append(PatchedSet(len(sites), clean, theirs, patched[0], kept[0], *random))
    return found


def _require_one_each(recording: Recording, other: Recording) -> None:
    if len(recording) != 1 or len(other) != 1:
        raise InputError(
            f"The recordings have {len(recording)} and {len(other)} prompts: choose one of each, like recording[0]."
        )
    if recording.lengths != other.lengths:
        raise InputError(
            f"Components are exchanged position by position: the prompts have {recording.lengths[0]} and "
            f"{other.lengths[0]} tokens, and need the same number."
        )


def _require_components(recording: Recording, sites: Sequence[Site]) -> None:
    for site in sites:
        if site.kind == "head" and None not in (site.layer, site.head, site.dest, site.src):
            recording.check_firing(site.firing)
        elif site.kind != "mlp" or site.layer is None or site.dest is None:
            raise InputError(
                f"{site} cannot be patched: give head components (layer, head, dest, src) and MLPs."
            )


def _random_like(
    recording: Recording, other: Recording, sites: Sequence[Site], generator: torch.Generator
) -> tuple[Site, ...]:
    """As many components of the same layers and kinds, none of them in the set, where the runs can differ."""
    model, found = recording.model, list[Site]()
    differ = (recording.token_ids[0] != other.token_ids[0]).nonzero()[:, 0].tolist()
    first, n = min(differ, default=0), recording.lengths[0]
    for (kind, layer), count in Counter((site.kind, site.layer or 0) for site in sites).items():
        own = [site for site in sites if (site.kind, site.layer or 0) == (kind, layer)]
        if kind == "mlp":
            free = torch.ones(n, dtype=torch.bool)
            free[[site.dest or 0 for site in own]] = False
        else:
            free = recording.visible[layer][0].cpu().expand(model.n_heads, n, n).clone()
            for site in own:
                free[site.head or 0, site.dest or 0, site.src or 0] = False
        free.movedim(0 if kind == "mlp" else 1, 0)[:first] = False
        places = free.flatten().nonzero()[:, 0]
        drawn = places[torch.randperm(len(places), generator=generator)[:count]]
        for place in torch.stack(torch.unravel_index(drawn, free.shape), dim=1).tolist():
            found.append(Site("mlp", layer, dest=place[0]) if kind == "mlp" else Site("head", layer, *place))
    return tuple(found)


# -- what a verification measures ------------------------------------------------------------------------------


@dataclass(frozen=True)
class PatchedNode:
    """A node, or a group of nodes, of a difference circuit: its flow, and what was measured by patching it."""

    name: str
    components: int
    flow: float | None
    """In the unit of the root; of a group, what enters it from outside: its nodes' flows less what flows among them.
    None where flow that left the group comes back into it through others, which would be counted twice."""
    measured: float
    """What the metric loses where they take what they had in the other run: the mean over the prompts compared."""
    random: float | None
    """The same of as many random components; None for single nodes."""


@dataclass(frozen=True, repr=False)
class PatchTest:
    """What patching the components of a difference circuit showed, beside their flows."""

    change: float
    """J - J'."""
    nodes: tuple[PatchedNode, ...]
    groups: tuple[PatchedNode, ...]
    """Heads that read the same token at the same token; all heads together."""

    @property
    def correlation(self) -> float | None:
        """Between flow and measured effect over the nodes (Pearson); None for fewer than three."""
        if len(self.nodes) < 3:
            return None
        pairs = torch.tensor([(node.flow or 0.0, node.measured) for node in self.nodes], dtype=torch.float64)
        found = float(torch.corrcoef(pairs.T)[0, 1])
        return found if found == found else None

    @property
    def residual(self) -> float | None:
        """The median of |measured - flow| over the nodes, as a share of the whole difference."""
        if not self.nodes:
            return None
        return median(abs(node.measured - (node.flow or 0.0)) for node in self.nodes) / abs(self.change)

    def __repr__(self) -> str:
        how = "" if self.correlation is None else f", correlation with flow {self.correlation:.2f}"
        return f"PatchTest({len(self.nodes)} nodes and {len(self.groups)} groups patched{how})"

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + frame(self.frame())

    def frame(self) -> pl.DataFrame:
        """A row per node and group."""
        import polars as pl

        rows = [
            {"what": what, **vars(each)}
            for what, some in (("node", self.nodes), ("group", self.groups))
            for each in some
        ]
        return pl.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "change": self.change,
            "correlation": self.correlation,
            "residual": self.residual,
            "nodes": [dict(vars(node)) for node in self.nodes],
            "groups": [dict(vars(group)) for group in self.groups],
        }

    def lines(self, most: int = 6) -> list[str]:
        """For a summary."""
        if not self.nodes:
            return []
        how = "" if self.correlation is None else f"correlation {self.correlation:.2f}, "
        lines = [
            f"Patched to the other run: {len(self.nodes)} nodes and {len(self.groups)} groups; flow against measured: "
            f"{how}median residual {self.residual or 0.0:.1%} of the difference (a flow and a patch agree to first "
            "order only)"
        ]
        for each in sorted(self.groups, key=lambda group: -abs(group.measured))[:most]:
            random = "" if each.random is None else f", as many random ones {each.random:+.3f}"
            flow = "" if each.flow is None else f"flow {each.flow:+.3f}, "
            lines.append(f"  {each.name} ({each.components}): {flow}measured {each.measured:+.3f}{random}")
        return lines


def check_difference(
    check: Checking,
    edges: str | Sequence[Edge] = "all",
    controls: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> PatchTest | None:
    """Compute every number of a difference circuit again, and patch its components to the other run.

    ``edges`` chooses which nodes are patched: all, the sources of some edges, or none; groups are patched beside
    ``controls`` draws of random components. None where the file does not say enough to run it again.
    """
    said = check.circuit.difference
    assert said is not None
    flows = _flows_again(check)
    if not flows:
        return None
    numbers = _Numbers.of(check, flows)
    numbers.ends(said)
    numbers.nodes()
    numbers.edges(said)
    return _patched(check, flows, edges, controls, seed, progress)


def _flows_again(check: Checking) -> list[PairFlow]:
    """The sweep over the prompt and each that it was compared with; nothing where the file does not say enough."""
    circuit, model = check.circuit, check.recording.model
    said = circuit.difference
    root = circuit.root if isinstance(circuit.root, Heads) else circuit.root.verifiable()
    assert said is not None
    if root is None:
        check.ledger.skip("flows: the file does not hold the vector of the root's direction")
        return []
    ids = list(circuit.prompt.token_ids)
    for i, other in enumerate(said.prompts):
        for token in other.token_ids:
            if not 0 <= token < model.d_vocab:
                raise InputError(
                    f"difference.prompts[{i}].token_ids: expected 0 to {model.d_vocab - 1} (token ids of "
                    f"{model.name!r}), got {token}"
                )
    return trace_pairs(model, [PromptPair(ids, list(other.token_ids), root, other) for other in said.prompts])


@dataclass(frozen=True)
class _Numbers:
    """Everything in the file that follows from the two runs, and what follows from other numbers of the file."""

    check: Checking
    flows: Sequence[PairFlow]
    allowed: float

    @classmethod
    def of(cls, check: Checking, flows: Sequence[PairFlow]) -> _Numbers:
        """Flows are allowed what rounding does to the largest numbers that they are added up from."""
        sizes = [each.flow.roots[each.prompt].size for each in flows]
        sizes += [float(each.flow.embedding()[each.prompt].abs().sum()) for each in flows]
        sizes += [abs(node.flow or 0.0) for node in check.circuit.nodes]
        return cls(check, flows, check.tolerance.number(max(sizes)))

    def compare(
        self, field: str, where: str, in_file: float | None, measured: float, allowed: float | None = None
    ) -> None:
        limit = self.allowed if allowed is None else allowed
        self.check.ledger.compare(field, where, in_file=in_file, measured=measured, allowed=limit)

    def ends(self, said: DifferenceInfo) -> None:
        """The root in both runs, and the embeddings, which are a cut."""
        value, other = self.flows[0].value, fmean(each.other_value for each in self.flows)
        self.compare("root.value", "", self.check.circuit.root.value, value)
        self.compare("difference.value", "", said.value, value)
        self.compare("difference.other_value", "", said.other_value, other)
        for i, (compared, each) in enumerate(zip(said.prompts, self.flows, strict=True)):
            self.compare("value", f"difference.prompts[{i}]", compared.value, each.other_value)
        found = torch.stack([each.flow.embedding()[each.prompt] for each in self.flows]).mean(0).tolist()
        for token, in_file in enumerate(said.tokens):
            self.compare("difference.tokens", f"token {token}", in_file, found[token])

    def nodes(self) -> None:
        """Flows, what heads move and where they attend, the spread over several prompts."""
        influence, written = node_influence(self.check.circuit), WRITTEN * (1 + len(self.check.circuit.edges))
        for node in self.check.circuit.nodes:
            self.compare("influence", node.name, node.influence, influence[node.id], written)
            own = [each.of([node.site])[0] for each in self.flows]
            self.compare("flow", node.name, node.flow, fmean(own))
            ends = zip(("least", "most"), node.spread or (), (min(own), max(own)), strict=False)
            for name, in_file, measured in ends:
                self.compare("spread", f"{name} of {node.name}", in_file, measured)
            if node.kind == "head":
                parts = [each.flow.head_flow(each.prompt, node.site) for each in self.flows]
                self.compare("moves", node.name, node.moves, fmean(moved for moved, _ in parts))
                self.compare("attends", node.name, node.attends, fmean(attends for _, attends in parts))
                limit = self.check.attention_tolerance(node.site.firing)
                for field, in_file, measured in _attention(node, self.flows):
                    self.compare(field, node.name, in_file, measured, limit)

    def edges(self, said: DifferenceInfo) -> None:
        """Flows between nodes, by channel and by logit, and the share of the difference that is shown."""
        circuit = self.check.circuit
        found = mean_edges(self.flows, [node.site for node in circuit.nodes if node.kind != "root"])
        between = found.every()
        by_channel = found.by_channel(between)
        into_root = [circuit.node(edge.source).site for edge in circuit.edges if edge.side == "root"]
        logits = edge_logits(self.flows, into_root)
        for edge in circuit.edges:
            source, target = circuit.node(edge.source).site, circuit.node(edge.target).site
            where = edge_name(circuit, edge)
            key = source, target, edge.side
            channels = by_channel.get(key)
            self.compare("weight", where, edge.weight, between.get(key, 0.0))
            for channel, in_file in zip(edge.channels or (), edge.flows or (), strict=False):
                measured = 0.0 if channels is None else float(channels[channel])
                self.compare("flows", f"channel {channel} of {where}", in_file, measured)
            both = zip(("answer", "wrong"), edge.logits or (), logits.get(source, ()), strict=False)
            for name, in_file, measured in both:
                self.compare("logits", f"{name} of {where}", in_file, measured)
        shown = sum(edge.weight for edge in circuit.edges if edge.side == "root")
        if circuit.edges:
            allowed = WRITTEN * max(1.0, abs(said.shown))
            self.compare("difference.shown", "", said.shown, shown / said.change, allowed)


def _attention(node: Node, flows: Sequence[PairFlow]) -> Iterator[tuple[str, float | None, float]]:
    """A head's attention in the prompt, and the mean of it in those that it is compared with."""
    f = node.site.firing
    for field, in_file, run in (
        ("attention", node.attention, "recording"),
        ("other_attention", node.other_attention, "other"),
    ):
        runs = [(getattr(each.flow, run), each.prompt) for each in flows]
        yield (
            field,
            in_file,
            fmean(float(r.attention.at(f.layer, at, f.head, f.dest, f.src)) for r, at in runs),
        )


def _patched(
    check: Checking,
    flows: Sequence[PairFlow],
    edges: str | Sequence[Edge],
    controls: int,
    seed: int,
    progress: Progress | None,
) -> PatchTest:
    """Nodes one by one, heads that read one token at one token together, and all heads: measured beside the flow."""
    circuit, model, said = check.circuit, check.recording.model, check.circuit.difference
    assert said is not None
    nodes = _chosen(circuit, edges, seed)
    steps: dict[str, list[Site]] = {}
    for node in nodes:
        if node.kind == "head":
            name = f'heads from "{circuit.token(node.dest)}" {node.dest} to "{circuit.token(node.src)}" {node.src}'
            steps.setdefault(name, []).append(node.site)
    groups = {name: sites for name, sites in steps.items() if len(sites) > 1}
    heads = [node.site for node in nodes if node.kind == "head"]
    if len(heads) > 1 and [heads] != list(groups.values()):
        groups[ALL_HEADS] = heads
    total, done = len(nodes) + len(groups) * (1 + controls), 0
    alone: list[list[PatchedSet]] = []
    together: list[list[PatchedSet]] = []
    for compared in said.prompts:
        other = model.record([list(compared.token_ids)])
        for found, sets, draws in (
            (alone, [[n.site] for n in nodes], 0),
            (together, list(groups.values()), controls),
        ):
            found.append(patch_sets(check.recording, other, circuit.root, sets, draws=draws, seed=seed))
            done += len(sets) * (1 + draws)
            if progress is not None:
                progress(done, total * len(said.prompts))
    among = mean_edges(flows, heads).every() if heads else {}

    def made(name: str, sites: Sequence[Site], rows: Sequence[PatchedSet], with_random: bool) -> PatchedNode:
        flow = None
        if name != ALL_HEADS:  # heads of different places pass flow on through MLPs
            inside = sum(flow for (one, two, _), flow in among.items() if one in sites and two in sites)
            flow = fmean(sum(each.of(sites)) for each in flows) - inside
        random = fmean(row.random_effect for row in rows) if with_random else None
        return PatchedNode(name, len(sites), flow, fmean(row.effect for row in rows), random)

    return PatchTest(
        said.change,
        tuple(
            made(n.name, [n.site], rows, False)
            for n, rows in zip(nodes, zip(*alone, strict=True), strict=True)
        ),
        tuple(
            made(name, sites, rows, controls > 0)
            for (name, sites), rows in zip(groups.items(), zip(*together, strict=True), strict=True)
        ),
    )


def _chosen(circuit: Circuit, edges: str | Sequence[Edge], seed: int) -> list[Node]:
    """Heads and MLPs that are patched: all, those with most flow, some at random, the sources of edges, or none."""
    nodes = [node for node in circuit.nodes if node.kind in ("head", "mlp")]
    if not isinstance(edges, str):
        sources = {edge.source for edge in edges}
        return [node for node in nodes if node.id in sources]
    how, _, number = edges.partition(":")
    if how == "top":
        return sorted(nodes, key=lambda node: -abs(node.flow or 0.0))[: int(number)]
    if how == "random":
        order = torch.randperm(len(nodes), generator=torch.Generator().manual_seed(seed)).tolist()
        return [nodes[i] for i in sorted(order[: int(number)])]
    return nodes if how == "all" else []
