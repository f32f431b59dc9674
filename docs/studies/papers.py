"""The figures and tables of the talk, the poster and the two papers beside what headtrace measures: one command.

    python docs/studies/papers.py --model gpt2-small --out build/papers
    python docs/studies/papers.py --model smollm2-135m --prompts 30 --edges 20 --out build/papers

``--model`` is gpt2-small, pythia-160m or gemma-2-2b where the hub can be reached; any other model shows that it runs.
Prompts are IOI's, evenly over fifteen wordings and two orders. Writes a figure for each entry, results.json, and
results.md: theirs beside ours, then what differs by nature. An entry that fails says why, and the others go on.
Training dynamics need checkpoints (``--revisions step1,step512,...`` of Pythia); words need text (``--corpus``); the
toy model needs no model and is made by ``headtrace toy all``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

import polars as pl
from structure_smollm2 import readers
from study_figures import plot_rotations, plot_signal_sizes, plot_slices_used, plot_token_strengths
from survey import Survey, rotation_test, separation, survey, token_strengths

import headtrace
from headtrace.causal.experiments import edge_pairs, edges_into_head, residual_changes, single_edges
from headtrace.circuits import Circuit
from headtrace.errors import HeadtraceError
from headtrace.families import Families, Population, find_families
from headtrace.runs.frames import Frames, frames_of
from headtrace.runs.merging import merge, skeleton, trace_network
from headtrace.runs.references import agreement, load_reference
from headtrace.tasks import Example, load_task
from headtrace.vocabulary import head_name

MOST, ITEMS = 600, 8
"""Letters of a cell of the table, and items of a list there."""
REFERENCES = {"gpt2-small": "gpt2-ioi", "pythia-160m": "pythia-160m-ioi"}
BY_NATURE = (
    "Prompts are drawn anew, with headtrace's own names and places, not the authors' lists.",
    "ACC++ is headtrace's (exact sums through norms and rotary positions, no folded weights). The trace network of the "
    "2024 paper is drawn from its circuits; --method svt or acc takes the methods of the earlier papers.",
    "An edge counts once in a prompt; thresholds are shares of prompts, 65/256 and 170/256.",
    "Families are cut by a rule with a control for chance; the talk shows a cluster map and names no rule.",
    "Words are made by rules, or by an endpoint that the user names; the talk's pipeline is not at hand.",
    "2024, figures 4 and 16 (tracing with whole residuals in place of singular vectors) have no counterpart here.",
    "2026, figures 1 to 5 and 9 to 19 and table 1 are of the toy model: `headtrace toy all`. Table 2 lists heads.",
)


@dataclass
class Study:
    """One model, its prompts, and what several entries share; computed when first asked for."""

    model: headtrace.Model
    prompts: int
    edges: int
    out: Path
    corpus: str | None = None
    revisions: tuple[str, ...] = ()
    method: str = "acc++"

    @cached_property
    def examples(self) -> list[Example]:
        per_cell = max(1, -(-self.prompts // 30))
        return list(load_task("ioi", self.model.tokenizer, n_per_cell=per_cell))[: self.prompts]

    @cached_property
    def circuits(self) -> list[Circuit]:
        return headtrace.Tracer(self.model, method=self.method).trace_batch(self.examples)

    @cached_property
    def few(self) -> list[Circuit]:
        """Circuits whose edges are ablated: some that are answered rightly and have edges."""
        return [c for c in self.circuits if c.edges and (c.root.value or 0) > 0][: max(2, self.prompts // 10)]

    @cached_property
    def survey(self) -> Survey:
        prompts = [list(example.token_ids) for example in self.examples[: max(8, self.prompts // 4)]]
        return survey(self.model, prompts, rotations=5)

    @cached_property
    def frames(self) -> Frames:
        return frames_of(self.circuits, roles=self.examples)

    @cached_property
    def mover(self) -> tuple[int, int]:
        """The head that fires most often from the end to the indirect object."""
        nodes = [
            (node.layer or 0, node.head or 0)
            for circuit, example in zip(self.circuits, self.examples, strict=True)
            for node in circuit.heads()
            if (node.dest, node.src) == (example.roles["end"], example.roles["IO"])
        ]
        return max(sorted(set(nodes)), key=nodes.count)

    @cached_property
    def families(self) -> Families:
        examples = self.examples
        labels, roles = [e.labels for e in examples], [e.roles for e in examples]
        return find_families(
            Population.of(self.circuits, labels, roles, [str(i) for i in range(len(examples))])
        )

    def figure(self, name: str) -> Path:
        return self.out / f"{name}.png"


# -- the entries -----------------------------------------------------------------------------------------------


def slices(study: Study) -> dict[str, Any]:
    plot_signal_sizes(study.survey, study.figure("2024-3-slices"))
    plot_slices_used(study.survey, [study.mover], study.figure("2024-2-which-slices"))
    heads = study.survey.heads.filter(pl.col("firings") > 0)
    return {
        "median slices when firing": median(study.survey.sizes(fires=True)),
        "when not": median(study.survey.sizes(fires=False)),
        "of": study.model.d_head,
        "heads that fire": heads.height,
    }


def one_score(study: Study) -> dict[str, Any]:
    layer, head = study.mover
    circuit, node = next(
        (circuit, node)
        for circuit, example in zip(study.circuits, study.examples, strict=True)
        for node in circuit.heads()
        if (node.layer, node.head, node.src) == (layer, head, example.roles["IO"])
    )
    recording = study.model.record([list(circuit.prompt.token_ids)])
    place = f"{head_name(layer, head)}:{node.dest}:{node.src}"
    why = study.model.decompose(recording, place)
    why.plot(str(study.figure("2024-1-one-score")))
    return {"firing": str(why.firing), "attention": why.attention}


def names_in_the_subspace(study: Study) -> dict[str, Any]:
    examples = study.examples[: study.survey.n_prompts]
    groups = [{each.roles[role]: "name" for role in ("IO", "S1", "S2")} for each in examples]
    channels = study.survey.consensus(*study.mover)
    table = token_strengths(
        study.model, [list(e.token_ids) for e in examples], *study.mover, channels, groups
    )
    title = f"{head_name(*study.mover)}: strength in its {len(channels)} usual channels"
    plot_token_strengths(table, "name", title, study.figure("2024-9-names"))
    return {
        "head": head_name(*study.mover),
        "area under ROC, names against others": separation(table, "name")[0],
    }


def networks(study: Study) -> dict[str, Any]:
    made = {"5-trace": trace_network(study.frames), "15-skeleton": skeleton(study.frames)}
    for name, network in made.items():
        network.plot(study.figure(f"2024-{name}"))
    said: dict[str, Any] = {name: f"{len(n.nodes)} nodes, {len(n.edges)} edges" for name, n in made.items()}
    said["readers"] = readers(merge(study.frames)).group_by("class", maintain_order=True).first().to_dicts()
    return said


def published_heads(study: Study) -> dict[str, Any]:
    name = REFERENCES.get(study.model.name)
    if name is None:
        return {"not compared": f"no published IOI circuit of {study.model.name} is at hand"}
    found = agreement(merge(study.frames), load_reference(name)).best()
    keys = ("threshold", "heads_precision", "heads_recall", "heads_f1")
    return {"reference": name, **{key: found[key] for key in keys}}


def interventions(study: Study) -> dict[str, Any]:
    found = single_edges(study.few, study.model, edges=f"random:{study.edges}", controls=4)
    found.plot(study.figure("2024-6-single-edges"))
    return {
        f"{row['reach']} {row['action']}, {row['measure']}": {
            key: row[key] for key in row if key not in ("reach", "action", "measure")
        }
        for row in found.comparisons().to_dicts()
    }


def together(study: Study) -> dict[str, Any]:
    found = edge_pairs(study.few, study.model, pairs=5)
    found.plot(study.figure("2024-7-several-edges"))
    return {"summary": found.summary().to_dicts()}


def into_head(study: Study) -> dict[str, Any]:
    heads = [head_name(n.layer or 0, n.head or 0) for c in study.few for n in c.heads() if n.expanded]
    found = edges_into_head(study.few, study.model, max(sorted(set(heads)), key=heads.count))
    found.plot(study.figure("2024-17-edges-into-a-head"))
    return {"head": found.head, "weight against effect (Spearman)": found.correlations().to_dicts()}


def residuals(study: Study) -> dict[str, Any]:
    found = residual_changes(study.few, study.model)
    found.plot(study.figure("2024-10-residuals"))
    return {"quantiles": found.quantiles().to_dicts()}


def rank_of_signals(study: Study) -> dict[str, Any]:
    sizes = [len(e.channels or ()) for c in study.circuits for e in c.edges if e.channels]
    return {
        "signals": len(sizes),
        "median channels": median(sizes),
        "one channel": fmean(s == 1 for s in sizes),
    }


def rotated(study: Study) -> dict[str, Any]:
    plot_rotations(study.survey, study.figure("2026-7-rotations"))
    firing = study.survey.frame.filter(pl.col("fires"))
    tests = [vars(rotation_test(study.survey, control)) for control in ("basis", "spectrum")]
    return {"median N_recon": firing["n_recon"].median(), "against rotations": tests}


def training(study: Study) -> dict[str, Any]:
    if not study.revisions:
        return {"not measured": "--revisions names no checkpoints"}
    from headtrace.channels.emergence import emergence, strongest_cases
    from headtrace.figures.channels import plot_emergence

    cases = strongest_cases(study.model, [list(e.token_ids) for e in study.examples[:8]], n=16)
    name = study.model.name
    found = emergence(((r, headtrace.load(name, revision=r)) for r in study.revisions), cases)
    plot_emergence(found, study.figure("2026-6-training"))
    return {"summary": found.summary().to_dicts()}


def families(study: Study) -> dict[str, Any]:
    found = study.families
    found.plot(study.figure("talk-families"))
    agreed = {name: found.agreement(name) for name in ("order", "form")}
    return {"rule": str(found.choice), "ARI": {name: (each.ari, each.p) for name, each in agreed.items()}}


def own_cluster(study: Study) -> dict[str, Any]:
    if study.families.n < 2:
        return {"not measured": "one family by the rule: there is no other cluster"}
    return {"contrasts": study.families.ablate_exclusive(study.model, prompts=5).to_dict()["contrasts"]}


def signals_between_orders(study: Study) -> dict[str, Any]:
    sides = [
        [
            c
            for c, e in zip(study.circuits, study.examples, strict=True)
            if e.labels["order"] == order and c.edges
        ][:6]
        for order in ("ABBA", "BABA")
    ]
    found = headtrace.compare_signals(sides[0], sides[1], study.model, names=("ABBA", "BABA"))
    found.plot(study.figure("talk-signals"))
    return found.to_dict()


def sinks(study: Study) -> dict[str, Any]:
    found = headtrace.find_sinks(study.model, [list(e.token_ids) for e in study.examples[:8]])
    found.plot("signals", study.figure("talk-sinks"))
    return {"summary": found.summary()}


def words(study: Study) -> dict[str, Any]:
    if study.corpus is None:
        return {"not measured": "--corpus names no text"}
    from headtrace.interpret import interpret

    found = interpret(study.few, study.model, study.corpus, limit=50, out=study.out / "words")
    return {"summary": found.summary()}


ENTRIES: tuple[tuple[str, str, Callable[[Study], dict[str, Any]]], ...] = (
    ("2024, figure 1", "few of 64 slices make a score", one_score),
    ("2024, figures 2, 3, 8", "|S| is much smaller than 64 when a head fires", slices),
    ("2024, figure 9", "names are strong in a name mover's subspace", names_in_the_subspace),
    ("2024, figures 5, 14, 15", "edges found 65 (170) times on 256 prompts; 21 heads in the skeleton", networks),
    ("2024, section 5.3; poster, finding 2", "published heads: precision 0.52, recall 0.69", published_heads),
    ("2024, figures 6, 21 to 24; poster; talk", "signals move the metric, random ones do not", interventions),
    ("2024, figures 7, 25 to 28", "edges on parallel paths together do more than alone", together),
    ("2024, figures 17 to 20", "the heavier the edge, the larger its effect", into_head),
    ("2024, figures 10 to 13; poster, finding 3", "cosines and norm ratios peak at 1", residuals),
    ("poster, finding 1; talk", "median dimension of a signal: 1, in all models", rank_of_signals),
    ("2026, figures 7, 8; talk, appendix", "N_recon 1 to 4; no sparsity with rotated singular vectors", rotated),
    ("2026, figures 6, 8(b), 20", "sparsity emerges in training", training),
    ("talk", "families: GPT-2 by order, Pythia by wording", families),
    ("talk, appendix", "representatives are more causal to their own cluster", own_cluster),
    ("talk", "(2, 8), (5, 9), (7, 0) near 1 between ABBA and BABA; (9, 9) negative", signals_between_orders),
    ("talk; poster, finding 4", "a few shared signals hold sinks up", sinks),
    ("talk", "words hold for 63 % (GPT-2), 50 % (Pythia), 31 % (Gemma) of signals", words),
)  # fmt: skip
"""Where it is shown, what it shows, and ours."""


def brief(value: Any) -> str:
    """A result in a table's cell: numbers with three digits, without brackets and quotation marks."""
    match value:
        case float():
            return f"{value:.3g}"
        case dict():
            found: dict[str, Any] = value
            return "; ".join(f"{name}: {brief(each)}" for name, each in found.items())
        case list() | tuple():
            items: list[Any] = list(value)
            more = [f"{len(items) - ITEMS} more"] if len(items) > ITEMS else []
            between = " / " if any(isinstance(each, dict) for each in items) else ", "
            return between.join([*map(brief, items[:ITEMS]), *more])
        case _:
            return str(value)


def markdown(model: str, results: list[dict[str, Any]]) -> str:
    """Theirs beside ours, and what differs by nature."""
    lines = [
        f"# {model} beside the papers",
        "",
        "| where | theirs | ours | seconds of processor time |",
        "| --- | --- | --- | --- |",
    ]
    for row in results:
        ours = brief(row["ours"]).replace("|", "\\|").replace("\n", "; ")
        short = ours if len(ours) < MOST else ours[:MOST].rpartition(" ")[0] + " ... (results.json)"
        theirs = row["theirs"].replace("|", "\\|")
        lines.append(f"| {row['where']} | {theirs} | {short} | {row['seconds']:.0f} |")
    return "\n".join([*lines, "", "What differs by nature:", "", *(f"- {each}" for each in BY_NATURE)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--edges", type=int, default=50, help="edges of each circuit that are ablated")
    parser.add_argument("--method", default="acc++", help="acc++, acc or svt")
    parser.add_argument("--revisions", default="", help="checkpoints on the hub, by commas")
    parser.add_argument("--corpus", help="what headtrace interpret --corpus takes")
    parser.add_argument("--out", type=Path, default=Path("build/papers"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    revisions = tuple(each for each in given.revisions.split(",") if each)
    study = Study(
        headtrace.load(given.model),
        given.prompts,
        given.edges,
        given.out,
        given.corpus,
        revisions,
        given.method,
    )
    results: list[dict[str, Any]] = []
    for where, theirs, ours in ENTRIES:
        start = time.process_time()
        try:
            found = ours(study)
        except HeadtraceError as error:  # what a model does not have is said, and the others go on
            found = {"not measured": str(error)}
        row = {"where": where, "theirs": theirs, "ours": found, "seconds": time.process_time() - start}
        print(json.dumps(row, default=str)[:300], flush=True)
        results.append(row)
        (given.out / "results.json").write_text(json.dumps(results, indent=1, default=str) + "\n")
        (given.out / "results.md").write_text(markdown(given.model, results))


if __name__ == "__main__":
    main()
