"""Two runs of the same prompts: how often each node, edge and step is found in the one and in the other.

    found = compare_runs("runs/base", "runs/tuned")          # or compare_models(base, tuned, prompts)
    found.appeared, found.went, found.frame(), found.plot("compared.png")

Prompts are paired by their ids, which are hashes of the requests unless the user gave others: runs of two models on one
file of prompts have the same ones. Every item is there or not in the circuit of a prompt, so a pair of runs gives a
difference of two shares of the same prompts, with an interval (`paired_difference`) and an exact test (McNemar's) whose
p is corrected for the number of items of its kind (Benjamini and Hochberg's q). An empty circuit has no items; a prompt
that failed otherwise in one of the runs is left out.

Heads are matched by their place in the model. That means the same for a model and what was fine-tuned from it, or for
checkpoints of one training run; whether a head also *reads* the same is asked where the directions of the residual
stream still mean the same, which the token embeddings tell (`shared_basis`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from headtrace.circuits import Circuit
from headtrace.circuits.parts import same_model
from headtrace.errors import InputError
from headtrace.families.compare import By, check_by
from headtrace.families.files import sample
from headtrace.families.head_signals import SHARED_BASIS, SignalComparison, compare_signals, shared_basis
from headtrace.families.population import ROOT_NAME, component_names, describe_model
from headtrace.progress import Progress, scaled
from headtrace.runs import Run, open_run, run
from headtrace.runs.frames import Frames, frames_of, place_names, with_places
from headtrace.runs.manifest import DONE, STEPS
from headtrace.statistics import interval, mcnemar, paired_difference, q_values
from headtrace.tables import frame, paragraph
from headtrace.writing import write_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.models import Model

SCHEMA = "headtrace.runcomparison/1"
LEAST_Q = 0.05
"""An item changed where fewer than this share of such findings would be by chance."""
MOST_SIGNALS = 50
"""Prompts whose signals are compared, drawn at random."""
KINDS = ("node", "edge", "step")


@dataclass(frozen=True, repr=False)
class RunComparison:
    """Nodes, edges and steps of two runs of the same prompts. Made by ``compare_runs`` and ``compare_models``."""

    table: pl.DataFrame
    """A row per item, the largest difference first: kind (node, edge, step), item, a and b (the shares of prompts that
    have it), difference (b - a) with its 95 % interval (low, high), only_a and only_b (prompts), p and q."""
    names: tuple[str, str]
    pairs: int
    """Prompts that both runs have."""
    left_out: tuple[int, int]
    """Prompts of each run that the other does not have, or that failed in one of them."""
    by: By
    """What matches: components, or these at roles or positions."""
    values: Mapping[str, float | str]
    """The root's number: measure, mean in a and in b, difference with its 95 % interval (low, high)."""
    warnings: tuple[str, ...] = ()
    signals: SignalComparison | None = None
    """Of two models: whether the heads that both have read the same; none where that cannot be asked."""

    @property
    def changed(self) -> pl.DataFrame:
        """What the second run has in a larger or smaller share of prompts (q at most 0.05)."""
        return self.table.filter(pl.col("q") <= LEAST_Q)

    @property
    def appeared(self) -> pl.DataFrame:
        """What the second run has more often."""
        return self.changed.filter(pl.col("difference") > 0)

    @property
    def went(self) -> pl.DataFrame:
        """What the second run has less often."""
        return self.changed.filter(pl.col("difference") < 0)

    def frame(self, of: str = "items") -> pl.DataFrame:
        """A row per item; with ``of="signals"``, per head and side whose signals were compared."""
        if of == "signals" and self.signals is not None:
            return self.signals.frame()
        if of != "items":
            there = "items" if self.signals is None else "items and signals"
            raise InputError(f"frame({of!r}): this comparison has {there}.")
        return self.table

    def summary(self) -> str:
        """What was compared, how the root's number changed, and how many items appeared and went."""
        value = self.values
        lines = [
            f"{self.pairs} prompts in both, matched by {self.by}: a is {self.names[0]}, b is {self.names[1]}",
            f"{value['measure']}: {value['a']:.3f} in a, {value['b']:.3f} in b, difference {value['difference']:+.3f} "
            f"({value['low']:+.3f} to {value['high']:+.3f})",
        ]
        if any(self.left_out):
            lines.append(f"Left out: {self.left_out[0]} prompts of a, {self.left_out[1]} of b.")
        for kind in KINDS:
            every = self.table.filter(kind=kind).height
            if every:
                more, less = (part.filter(kind=kind).height for part in (self.appeared, self.went))
                lines.append(f"{every} {kind}s: {more} more often in b, {less} less often (q <= {LEAST_Q})")
        if self.signals is not None:
            found = self.signals
            lines.append(
                f"{found.table.height} head sides in both: {found.same.height} read the same, {found.other.height} "
                f"something else, {found.opposite.height} the opposite, {found.undecided.height} undecided"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"RunComparison({self.names[0]} and {self.names[1]}, {self.pairs} prompts: {self.appeared.height} items "
            f"more often, {self.went.height} less often)"
        )

    def _repr_html_(self) -> str:
        return "".join(map(paragraph, self.summary().splitlines())) + frame(self.table.head(20))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "schema": SCHEMA,
            "names": list(self.names),
            "by": self.by,
            "pairs": self.pairs,
            "left_out": list(self.left_out),
            "warnings": list(self.warnings),
            "values": dict(self.values),
            "appeared": self.appeared["item"].to_list(),
            "went": self.went["item"].to_list(),
            "items": self.table.to_dicts(),
            "signals": None if self.signals is None else self.signals.to_dict(),
        }

    def write_json(self, path: str | Path) -> Path:
        """Write the comparison as JSON."""
        return write_report(path, self.to_dict())

    def plot(self, path: str | Path | None = None) -> Figure:
        """The items that differ most: their shares in both runs, and the difference with its interval."""
        from headtrace.figures.families import run_differences

        return run_differences(self, path)

    def save(self, folder: str | Path) -> Path:
        """Write comparison.json and comparison.png into a folder (and signals.png, where signals were compared)."""
        place = Path(folder)
        self.write_json(place / "comparison.json")
        self.plot(place / "comparison.png")
        if self.signals is not None:
            self.signals.plot(place / "signals.png")
        return place


# -- two runs ------------------------------------------------------------------------------------------------


def compare_runs(
    a: Run | str | Path, b: Run | str | Path, *, names: tuple[str, str] | None = None, by: By | None = None
) -> RunComparison:
    """Compare two runs, prompt by prompt; ``by`` is roles where both runs have some, else components."""
    runs = tuple(each if isinstance(each, Run) else open_run(each) for each in (a, b))
    models = tuple(each.manifest.model for each in runs)
    if models[0].architecture != models[1].architecture:
        one, other = (f"{model.name!r} ({model.architecture})" for model in models)
        raise InputError(
            f"{one} and {other} are of different architectures: their heads have nothing to do with each other. "
            "Compare a model with what was made from it."
        )
    frames = [frames_of(each) for each in runs]
    roles = all(each.roles for each in frames)
    by = check_by(by or ("roles" if roles else "components"))
    if by == "roles" and not roles:
        raise InputError("One of the runs has no roles: compare by components, or by positions.")
    prompts = [_traced(each) for each in runs]
    both = prompts[0].join(prompts[1], on="id", suffix="_b").sort("id")
    if not both.height:
        raise InputError(
            f"{runs[0].path!r} and {runs[1].path!r} have no prompt in common that was traced in both: prompts are "
            "paired by their ids. Trace the same file of prompts with the same answers, or give ids in it."
        )
    warnings = _warnings(runs, frames, both, by)
    found = [_items(each, by).join(both.select(prompt="id"), on="prompt", how="semi") for each in frames]
    if all(STEPS in r.manifest.tables or r.manifest.options.get("paths") == "difference" for r in runs):
        found = [
            pl.concat([one, _steps(each, both["id"].to_list())])
            for one, each in zip(found, runs, strict=True)
        ]
    return RunComparison(
        _compared(found[0], found[1], both.height),
        names or _names(runs),
        both.height,
        (prompts[0].height - both.height, prompts[1].height - both.height),
        by,
        _values(runs[0], both),
        tuple(warnings),
    )


def _names(runs: Sequence[Run]) -> tuple[str, str]:
    """The models where they differ, else the folders."""
    one, other = (each.manifest.model.name for each in runs)
    return (one, other) if one != other else (Path(runs[0].path).name or "a", Path(runs[1].path).name or "b")


def _traced(run: Run) -> pl.DataFrame:
    """Prompts that have a circuit, be it empty."""
    traced = (pl.col("status") == DONE) | pl.col("reason").str.starts_with("no circuit")
    return run.prompts.filter(traced).select("id", "token_ids", "root_value").collect()


def _warnings(runs: Sequence[Run], frames: Sequence[Frames], both: pl.DataFrame, by: By) -> list[str]:
    one, other = (each.manifest for each in runs)
    found: list[str] = []
    models = [each.model for each in frames]
    if models[0] is not None and models[1] is not None and not same_model(models[0], models[1]):
        found.append(
            f"The weights differ ({describe_model(models[0])}, {describe_model(models[1])}): heads are matched by "
            "their place in the model, which means the same only for a model and what was trained from it."
        )
    unlike = [name for name in one.options if one.options[name] != other.options.get(name)]
    if unlike:
        found.append(
            f"The runs were traced with different options ({', '.join(unlike)}): that alone changes circuits."
        )
    tokens = both.filter(pl.col("token_ids") != pl.col("token_ids_b")).height
    if tokens and by == "positions":
        found.append(
            f"{tokens} of {both.height} prompts have other tokens in the second run: match by roles or components."
        )
    return found


def _items(frames: Frames, by: By) -> pl.DataFrame:
    """``prompt``, ``kind`` and ``item`` of nodes and edges, each once in a prompt; embeddings and biases left out."""
    places = ("dest", "src")
    nodes, edges = frames.nodes, frames.edges
    if by != "components":
        names = place_names(frames, "roles" if by == "roles" else "positions")
        kind: Any = "roles" if by == "roles" else "positions"
        nodes = with_places(nodes, names, kind, places)
        edges = with_places(
            edges, names, kind, [f"{end}_{name}" for end in ("source", "target") for name in places]
        )

    def named(prefix: str = "") -> pl.Expr:
        component = component_names(prefix)
        if by == "components":
            return component
        at, read = (pl.col(prefix + name) for name in places)
        of_head = pl.format("{} {}->{}", component, at, read)
        of_mlp = pl.format("{} @{}", component, at)
        is_kind = pl.col(f"{prefix}kind")
        return (
            pl.when(is_kind == "head").then(of_head).when(is_kind == "mlp").then(of_mlp).otherwise(component)
        )

    target = (
        pl.when(pl.col("side") == "root")
        .then(pl.lit(ROOT_NAME))
        .otherwise(pl.format("{} of {}", "side", named("target_")))
    )
    found = [
        nodes.select("prompt", pl.lit("node").alias("kind"), named().alias("item")).filter(
            pl.col("item") != ROOT_NAME
        ),
        edges.select(
            "prompt",
            pl.lit("edge").alias("kind"),
            pl.format("{} => {}", named("source_"), target).alias("item"),
        ),
    ]
    return pl.concat(found).drop_nulls().unique().collect()


def _steps(run: Run, ids: Sequence[str]) -> pl.DataFrame:
    """The heads of each mechanism with what the rules call their steps: ``L23H3: lowers``. Where the run keeps no
    mechanisms, they are read from its difference circuits."""
    if STEPS in run.manifest.tables:
        head = pl.col("heads").str.split(" ").list.first()
        kept = run.steps.filter(pl.col("prompt").is_in(list(ids))).explode("heads").drop_nulls("heads")
        item = pl.format("{}: {}", head, "rule").alias("item")
        return kept.select("prompt", pl.lit("step").alias("kind"), item).unique().collect()
    rows = {
        (id, "step", f"{head.name}: {step.role}")
        for id, circuit in run.items(list(ids))
        if circuit.edges
        for step in circuit.mechanism().steps
        for head in step.heads
    }
    kinds: Any = dict.fromkeys(("prompt", "kind", "item"), pl.String)
    return pl.DataFrame(sorted(rows), schema=kinds, orient="row")


def _compared(a: pl.DataFrame, b: pl.DataFrame, pairs: int) -> pl.DataFrame:
    """Counts of prompts by item, shares, and their differences with intervals and tests."""
    sides = [each.with_columns(pl.lit(True).alias(name)) for each, name in ((a, "in_a"), (b, "in_b"))]
    joined = sides[0].join(sides[1], on=("prompt", "kind", "item"), how="full", coalesce=True)
    in_a, in_b = (pl.col(name).fill_null(value=False) for name in ("in_a", "in_b"))
    counts = joined.group_by("kind", "item").agg(
        in_a.sum().cast(pl.Int64).alias("count_a"),
        in_b.sum().cast(pl.Int64).alias("count_b"),
        (in_a & ~in_b).sum().cast(pl.Int64).alias("only_a"),
        (in_b & ~in_a).sum().cast(pl.Int64).alias("only_b"),
    )
    only_a, only_b = (counts[name].to_numpy() for name in ("only_a", "only_b"))
    low, high = paired_difference(only_a, only_b, pairs)
    p = pl.Series("p", mcnemar(only_a, only_b), dtype=pl.Float64)
    q = pl.col("p").map_batches(lambda some: pl.Series(q_values(some.to_list())), return_dtype=pl.Float64)
    order = pl.col("kind").replace_strict({name: i for i, name in enumerate(KINDS)}, return_dtype=pl.Int64)
    table = counts.select(
        "kind",
        "item",
        (pl.col("count_a") / pairs).alias("a"),
        (pl.col("count_b") / pairs).alias("b"),
        ((pl.col("only_b") - pl.col("only_a")) / pairs).alias("difference"),
        pl.Series("low", low, dtype=pl.Float64),
        pl.Series("high", high, dtype=pl.Float64),
        "only_a",
        "only_b",
        p,
    )
    table = table.with_columns(q.over("kind").alias("q"))
    return table.sort(order, -pl.col("difference").abs(), "item")


def _values(run: Run, both: pl.DataFrame) -> dict[str, float | str]:
    """How the root's number changed: means over the prompts that both have."""
    known = both.drop_nulls(["root_value", "root_value_b"])
    changes = (known["root_value_b"] - known["root_value"]).to_numpy()
    low, high = interval(changes, known["id"].to_numpy())
    first = next(iter(run.circuits(known["id"].head(1).to_list())))
    means = {"a": float(known["root_value"].mean()), "b": float(known["root_value_b"].mean())}  # type: ignore[arg-type]
    return {
        "measure": first.root.measure,
        **means,
        "difference": float(changes.mean()),
        "low": low,
        "high": high,
    }


# -- two models ----------------------------------------------------------------------------------------------


def compare_models(
    a: Model,
    b: Model,
    prompts: Any,
    *,
    names: tuple[str, str] | None = None,
    by: By | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> RunComparison:
    """What changed between a model and another that was made from it: both are traced on the same prompts.

    ``prompts`` and ``options`` are those of `headtrace.run`. The runs are kept in ``out`` (in the folders ``a`` and
    ``b``), or thrown away. Where the residual stream of both has the same basis, the signals that heads read in at most
    fifty prompts are compared as well; where not, a warning says so.
    """
    if a.n_heads != b.n_heads or a.n_layers != b.n_layers:
        raise InputError(
            f"{a.name!r} has {a.n_layers} layers of {a.n_heads} heads, {b.name!r} {b.n_layers} of {b.n_heads}: heads "
            "are matched by their place in the model. Compare a model with what was made from it."
        )
    if names is None:
        names = (a.name, b.name) if a.name != b.name else (f"{a.name} (a)", f"{b.name} (b)")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if out is None else out)
        runs = [
            run(model, prompts, out=folder / name, progress=scaled(progress, 40 * i, 40, 100), **options)
            for i, (model, name) in enumerate(((a, "a"), (b, "b")))
        ]
        found = compare_runs(runs[0], runs[1], names=names, by=by)
        basis = shared_basis(a, b)
        if basis < SHARED_BASIS:
            said = (
                f"Signals are not compared: token embeddings of the two have a mean cosine of {basis:.2f} (at least "
                f"{SHARED_BASIS} is asked for), so that directions of the residual stream need not mean the same."
            )
            return replace(found, warnings=(*found.warnings, said))
        circuits = _same_prompts(runs, seed)
        if not circuits[0]:
            return found
        last = scaled(progress, 80, 20, 100)
        signals = compare_signals(circuits[0], circuits[1], a, other=b, names=names, seed=seed, progress=last)
    return replace(found, signals=signals)


def _same_prompts(runs: Sequence[Run], seed: int) -> list[list[Circuit]]:
    """Circuits of prompts that are done in both runs, in the same order; at most fifty."""
    done = [set(each.prompts.filter(pl.col("status") == DONE).collect()["id"]) for each in runs]
    chosen = sample(sorted(done[0] & done[1]), MOST_SIGNALS, seed)
    return [[circuit for _, circuit in sorted(each.items(chosen), key=lambda pair: pair[0])] for each in runs]
