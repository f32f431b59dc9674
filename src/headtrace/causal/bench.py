"""Methods side by side on prompts of your own: what is enough, and what it costs.

Every prompt comes with an answer, a wrong answer and a counterfactual prompt of equal length. Each method ranks head
components; the first n are kept, and all others take what they had in the counterfactual run
(`headtrace.causal.sufficiency`). Methods: circuits of attention (``acc++``), content, both (``complete``) and of the
difference between the two runs (``difference``); ``attribution patching`` and ``integrated gradients``, which take
gradients; ``random``. The cost is the processor time of a method over that of a forward pass on the same prompt, the
median over prompts: a number of forward passes, whatever the machine.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headtrace.causal.metric import require_metric
from headtrace.causal.patching import (
    IG_POINTS,
    RANDOM,
    ComponentRanking,
    PatchingCase,
    as_given,
    at_random,
    attribution_patching,
)
from headtrace.causal.sufficiency import SHOWN, measured_curves, patching_case
from headtrace.errors import InputError
from headtrace.lines import Lines
from headtrace.progress import Progress
from headtrace.request import TraceRequest, read_requests
from headtrace.tables import frame, paragraph
from headtrace.writing import replacing, write_text

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

    from headtrace.circuits import Circuit
    from headtrace.models import Model
    from headtrace.tracing import Tracer

PATHS = {"acc++": "attention", "content": "content", "complete": "complete", "difference": "difference"}
GRADIENTS: Mapping[str, Callable[[PatchingCase], ComponentRanking]] = {
    "attribution patching": attribution_patching,
    "integrated gradients": lambda case: attribution_patching(case, IG_POINTS),
}
METHODS = (*PATHS, *GRADIENTS, RANDOM)
SCHEMA = "headtrace.bench/1"
T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Bench:
    """What ``bench`` measured: one row for each set of prompts, prompt and method."""

    model: Mapping[str, Any]
    """Name, layers, heads and width."""
    rows: tuple[Mapping[str, Any], ...]
    passed: Mapping[str, Mapping[str, int]]
    """By set: how many prompts were used, and why others were not."""
    scores: Mapping[str, Mapping[str, float]]
    """Mean flow of edges between components over all prompts, by the kind of part (nodes, edges): for MIB."""
    skipped: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict[str, Any])
    """By set: the lines of its file that could not be read, with their numbers (``line``) and ``reason``."""
    lines: int = 0
    """How many lines the files have, read or not."""

    @property
    def table(self) -> pl.DataFrame:
        """``set``, ``prompt``, ``method``, sufficiency at some sizes, ``cpr``, ``cmd``, ``cost`` in forward passes."""
        import polars as pl

        return pl.DataFrame([dict(row) for row in self.rows], infer_schema_length=None)

    @property
    def medians(self) -> pl.DataFrame:
        """A row per set and method: medians over its prompts."""
        import polars as pl

        numbers = [*(f"at {n}" for n in SHOWN), "cpr", "cmd", "cost"]
        return self.table.group_by("set", "method", maintain_order=True).agg(
            pl.len().alias("prompts"), pl.col(numbers).median()
        )

    def frame(self) -> pl.DataFrame:
        """All rows, as ``table`` has them."""
        return self.table

    def __repr__(self) -> str:
        medians = self.medians
        sets = medians["set"].n_unique()
        of = f"Bench({self.model['name']!r}: {medians['method'].n_unique()} methods on {sets} "
        return f"{of}set of prompts)" if sets == 1 else f"{of}sets of prompts)"

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + frame(self.medians)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "schema": SCHEMA,
            "model": dict(self.model),
            "prompts": {name: dict(counts) for name, counts in self.passed.items()},
            "lines": self.lines,
            "skipped": {name: [dict(each) for each in lines] for name, lines in self.skipped.items()},
            "medians": self.medians.to_dicts(),
            "rows": [dict(row) for row in self.rows],
        }

    def mib(self) -> dict[str, Any]:
        """The scores as the circuit track of the MIB benchmark reads them: ``cfg``, ``nodes``, ``edges``.

        Nodes are ``input``, ``a3.h5`` (a head), ``m3`` (an MLP) and ``logits``; an edge is ``a3.h5->a7.h2<q>`` with
        ``<q>``, ``<k>`` or ``<v>`` into a head. The score of an edge is its flow between clean and counterfactual run,
        summed over positions, the mean over prompts. Every node is listed, with 0 where no difference circuit has it:
        the benchmark keeps a node without a score in every circuit. Edges that are not listed count 0 there.
        """
        layers, heads = range(self.model["n_layers"]), range(self.model["n_heads"])
        names = ["input", *(name for i in layers for name in (*(f"a{i}.h{h}" for h in heads), f"m{i}"))]
        scored = self.scores["nodes"]
        nodes = {name: {"in_graph": name in scored, "score": scored.get(name, 0.0)} for name in names}
        return {
            "cfg": {
                name: self.model[name] for name in ("n_layers", "n_heads", "d_model", "parallel_attn_mlp")
            },
            "nodes": {**nodes, "logits": {"in_graph": True}},
            "edges": {
                name: {"in_graph": True, "score": score} for name, score in self.scores["edges"].items()
            },
        }

    def plot(self, path: str | Path | None = None) -> Figure:
        """Median sufficiency over the number of components: a panel for each set, a line for each method."""
        import polars as pl

        from headtrace.figures.causal import sufficiency_by_method

        sizes = {f"at {n}": n for n in SHOWN}
        long = self.table.rename({"set": "task"}).unpivot(
            list(sizes),
            index=["task", "prompt", "method"],
            variable_name="components",
            value_name="sufficiency",
        )
        return sufficiency_by_method(long.with_columns(pl.col("components").replace_strict(sizes)), path)

    def to_latex(self) -> str:
        """The medians as a LaTeX table."""
        from headtrace.tables import latex_table

        return latex_table(self.medians)

    def save(self, folder: str | Path) -> Path:
        """Write ``bench.json``, ``bench.parquet`` and ``bench.png`` into a folder."""
        path = Path(folder)
        write_text(path / "bench.json", json.dumps(self.to_dict(), indent=1) + "\n")
        with replacing(path / "bench.parquet") as temporary:
            self.table.write_parquet(temporary)
        self.plot(path / "bench.png")
        return path


def bench(
    model: Model,
    prompts: str | Path | Sequence[str | Path],
    *,
    methods: Sequence[str] = METHODS,
    n: int = 20,
    progress: Progress | None = None,
) -> Bench:
    """Measure methods on prompt files (``.jsonl``) or folders of them: each file is a set, n prompts of each.

    A line needs ``answer``, ``wrong`` and ``counterfactual``. Prompts are passed over whose counterfactual has another
    number of tokens, that the model answers wrongly, or whose metric hardly differs in the counterfactual; how many, is
    part of the result.
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown or not methods:
        raise InputError(f"There is no method {unknown[:1]}: choose from {', '.join(METHODS)}.")
    sets = _sets(prompts)
    from headtrace.tracing import Tracer

    tracer = Tracer(model)
    rows: list[dict[str, Any]] = []
    passed: dict[str, Counter[str]] = {}
    circuits: list[Circuit] = []
    for number, (name, requests) in enumerate(sets.items()):
        counts = passed[name] = Counter[str]()
        for place, request in enumerate(requests.values):
            if progress is not None:
                progress(number * n + counts["used"], len(sets) * n)
            if counts["used"] == n:
                break
            try:
                found, circuit = _measured(tracer, request, methods)
            except InputError as error:
                counts[str(error)[:100]] += 1
                continue
            counts["used"] += 1
            rows += [{"set": name, "prompt": place, **row} for row in found]
            circuits += [] if circuit is None else [circuit]
    if not rows:
        reasons = "; ".join(
            f"{count}: {why}" for counts in passed.values() for why, count in counts.most_common(2)
        )
        raise InputError(
            f"No prompt could be measured ({reasons}). Every line needs a counterfactual of equal length."
        )
    info = {name: getattr(model, name) for name in ("name", "n_layers", "n_heads", "d_model")}
    info["parallel_attn_mlp"] = model.architecture.parallel(model.config)
    skipped = {name: read.skipped_rows for name, read in sets.items() if read.skipped}
    lines = sum(len(read) + len(read.skipped) for read in sets.values())
    return Bench(info, tuple(rows), passed, _scores(circuits), skipped, lines)


def _sets(prompts: str | Path | Sequence[str | Path]) -> dict[str, Lines[TraceRequest]]:
    given = [prompts] if isinstance(prompts, (str, Path)) else list(prompts)
    files = [
        file
        for each in map(Path, given)
        for file in (sorted(each.glob("*.jsonl")) if each.is_dir() else [each])
    ]
    if not files:
        raise InputError(f"There are no .jsonl files in {', '.join(map(repr, map(str, given)))}.")
    return {file.stem: read_requests(file) for file in files}


def _measured(
    tracer: Tracer, request: TraceRequest, methods: Sequence[str]
) -> tuple[list[dict[str, Any]], Circuit | None]:
    """One prompt: sufficiency and cost of each method, and its difference circuit if there is one."""
    model = tracer.model
    case, other, ids = _opened(request, model)
    forward = min(_seconds(model, lambda: model.end_logits([ids]))[0] for _ in range(3))
    costs: dict[str, float] = {}
    circuit: Circuit | None = None
    orders: dict[str, list[ComponentRanking]] = {}
    for name in methods:
        if name == RANDOM:
            orders[name] = [at_random(case, seed=0)]
        elif name in GRADIENTS:
            costs[name], order = _seconds(model, lambda name=name: GRADIENTS[name](case))
            orders[name] = [order]
        else:
            costs[name], found = _seconds(model, lambda name=name: tracer.trace(_asking(request, name)))
            orders[name] = [as_given(case, found)]  # an empty circuit keeps nothing, which is a result
            circuit = found if name == "difference" else circuit
    curves, _ = measured_curves(case, other, [(each, (0, *SHOWN)) for each in orders.values()])
    rows = [
        {
            "method": name,
            **{f"at {size}": curve.at(size) for size in SHOWN},
            "cpr": curve.cpr,
            "cmd": curve.cmd,
            "own size": curve.own,
            "cost": costs.get(name, 0.0) / forward,
        }
        for name, curve in zip(orders, curves, strict=True)
    ]
    return rows, circuit


def _opened(request: TraceRequest, model: Model) -> tuple[PatchingCase, float, list[int]]:
    """The prompt ready to be patched, m(counterfactual), and its tokens; what cannot be measured is refused first."""
    if request.counterfactual is None:
        raise InputError("no counterfactual")
    plain = _asking(request, "acc++")
    try:
        asked = plain.resolve(model)
    except InputError:
        raise InputError("an answer that is not one token") from None
    other = model.to_ids(request.counterfactual)
    if len(asked.ids) != len(other):
        raise InputError("counterfactual of another length")
    recording = model.record([asked.ids])
    if require_metric(asked.root, recording, "what is kept of it").of(recording) <= 0:
        raise InputError("answered wrongly")
    return *patching_case(recording, asked.root, other), asked.ids


def _asking(request: TraceRequest, method: str) -> TraceRequest:
    """The request for one method's circuit: only a difference is between two prompts."""
    if method == "difference":
        return replace(request, paths="difference")
    return replace(request, paths=PATHS[method], counterfactual=None)


def _seconds(model: Model, work: Callable[[], T]) -> tuple[float, T]:
    """Processor time, which others on the machine do not change; on other devices time by the clock."""
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter
    start = clock()
    found = work()
    return clock() - start, found


def _scores(circuits: Sequence[Circuit]) -> dict[str, dict[str, float]]:
    """Flows by component, summed over positions, the mean over prompts."""
    nodes: dict[str, list[float]] = defaultdict(list)
    edges: dict[str, list[float]] = defaultdict(list)
    for circuit in circuits:
        flow: dict[str, float] = defaultdict(float)
        through: dict[str, float] = defaultdict(float)
        for node in circuit.nodes:
            name = _mib_name(node)
            if name is not None and node.kind != "root":
                through[name] += node.flow or 0.0
        for edge in circuit.edges:
            source, target = (_mib_name(circuit.node(end)) for end in (edge.source, edge.target))
            if source is not None and target is not None:
                side = f"<{edge.side[0]}>" if edge.side in ("query", "key", "value") else ""
                flow[f"{source}->{target}{side}"] += edge.weight
        for name, value in through.items():
            nodes[name].append(value)
        for name, value in flow.items():
            edges[name].append(value)
    count = max(len(circuits), 1)
    return {
        "nodes": {name: sum(values) / count for name, values in sorted(nodes.items())},
        "edges": {name: sum(values) / count for name, values in sorted(edges.items())},
    }


def _mib_name(node: Any) -> str | None:
    """A component as the benchmark names it; biases have no name there."""
    names = {
        "head": f"a{node.layer}.h{node.head}",
        "mlp": f"m{node.layer}",
        "embedding": "input",
        "position": "input",
        "root": "logits",
    }
    return names.get(node.kind)
