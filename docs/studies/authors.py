"""Do the authors' own IOI circuits fall into families, and by what: the order of names, or the wording?

    python docs/studies/authors.py acc-circuits-2025.parquet --out build/authors

Takes a table of ACC's edges (``model``, ``task``, ``prompt``, ``source``, ``target``, ``type``, ``weight``); needs no
model. Circuits are compared as sets of five kinds of items, from the authors' node names to heads alone: node names
hold roles of tokens, and which token can attend to which depends on the order of names, so that names alone build
families in. For each: how many families the rule of `headtrace.families` finds, cuts into two and four, and (without
any clustering) which share of the squared distances order and wording explain, each permuted within the other, and
with two groups each (all pairs of wordings). Then, for all tasks of the table: how many families the rule finds, and
how many heads of a published circuit are among those that at least half of the circuits have, beside heads drawn at
random. ``--tasks`` leaves the families of IOI out.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from jaxtyping import Float
from scipy.stats import hypergeom

from headtrace.families.clustering import average_linkage, by_size, choose, condensed, cuts, square
from headtrace.families.population import Sets
from headtrace.families.result import agreement
from headtrace.runs.references import load_reference

PERMUTATIONS = 999
WORDINGS = (
    "went",
    "had fun",
    "were working",
    "were thinking",
    "had an argument",
    "after ... went",
    "when ... got",
)
"""The seven templates of the authors' data set, by what the first clause says."""
NAMES, NOUNS = 89, (8, 8)
"""How many names, places and objects its generator draws from."""


REFERENCES = {
    ("gpt2-small", "ioi"): "gpt2-ioi",
    ("gpt2-small", "gt"): "gpt2-greater-than",
    ("gpt2-small", "gp"): "gpt2-pronoun",
    ("pythia-160m", "ioi"): "pythia-160m-ioi",
}
"""Published circuits by model and task: indirect objects, greater-than, gendered pronouns."""


# -- prompts ---------------------------------------------------------------------------------------------------


def drawn_prompts(n: int, seed: int = 0) -> list[tuple[str, str]]:
    """Order and wording of each prompt: the draws of the authors' generator (``ioi_dataset.py``) made again.

    Seven templates in both orders are shuffled; for each prompt it draws a template, three names until they differ, a
    place and an object. Only the numbers drawn from matter. ``orders_seen`` checks the result.
    """
    rng = random.Random(seed)
    templates = [(order, wording) for order in ("BABA", "ABBA") for wording in WORDINGS]
    rng.shuffle(templates)
    found: list[tuple[str, str]] = []
    for _ in range(n):
        found.append(rng.choice(templates))
        names = [0]
        while len(set(names)) < 3:
            names = [rng.choice(range(NAMES)) for _ in range(3)]
        for size in NOUNS:
            rng.choice(range(size))
    return found


def orders_seen(nodes: pl.DataFrame) -> dict[int, str]:
    """The order of names that attention shows: whichever of IO and S1 attends to the other comes later."""
    pairs = nodes.filter(pl.col("head").is_not_null())
    seen: dict[int, set[str]] = {}
    for dest, src, order in (("S1", "IO", "ABBA"), ("IO", "S1", "BABA")):
        for prompt in pairs.filter(dest=dest, src=src)["prompt"].unique():
            seen.setdefault(prompt, set()).add(order)
    return {prompt: orders.pop() for prompt, orders in seen.items() if len(orders) == 1}


# -- circuits as sets --------------------------------------------------------------------------------------------


def parsed(names: Sequence[str]) -> pl.DataFrame:
    """ACC's node names: layer, component (without positions), head (None for others), destination and source role."""
    rows: list[dict[str, Any]] = []
    for name in names:
        found = ast.literal_eval(name)
        if len(found) == 2:
            rows.append({"name": name, "component": "root", "head": None, "dest": found[1], "src": found[1]})
            continue
        layer, what, dest, src = found
        head = f"L{layer}H{what}" if isinstance(what, int) else None
        component = head or (f"MLP {layer}" if what == "MLP" else None)
        rows.append({"name": name, "component": component, "head": head, "dest": dest, "src": src})
    text: list[tuple[str, Any]] = [(name, pl.String) for name in ("name", "component", "head", "dest", "src")]
    return pl.DataFrame(rows, schema=text)


def item_tables(edges: pl.DataFrame, prompts: Mapping[int, tuple[str, str]]) -> dict[str, pl.DataFrame]:
    """Circuits as sets of items, in five ways: ``prompt`` and ``item``."""
    names = parsed(pl.concat([edges["source"], edges["target"]]).unique().to_list())
    ends = edges
    for end in ("source", "target"):
        ends = ends.join(
            names.rename({c: f"{end}_{c}" for c in names.columns}), left_on=end, right_on=f"{end}_name"
        )
    labels = pl.DataFrame(
        [(prompt, *each) for prompt, each in prompts.items()],
        schema={"prompt": pl.Int64, "order": pl.String, "wording": pl.String},
        orient="row",
    )
    # Pairs of roles that heads attend between in every order and wording: no prompt lacks them by how it is built.
    attending = nodes_of(ends).filter(pl.col("head").is_not_null()).join(labels, on="prompt")
    cells = attending.group_by("dest", "src").agg(pl.struct("order", "wording").n_unique().alias("cells"))
    everywhere = cells.filter(cells=labels.select("order", "wording").n_unique()).select("dest", "src")
    shared = nodes_of(ends).join(everywhere, on=["dest", "src"], how="semi")
    heads = ends.filter(pl.col("source_head").is_not_null() & (pl.col("target_component") != "root"))
    return {
        "edges between node names (with roles)": ends.select(
            "prompt", pl.format("{} {} {}", "source", "target", "type").alias("item")
        ),
        "heads at roles": nodes_of(ends)
        .filter(pl.col("head").is_not_null())
        .select("prompt", pl.format("{} {} {}", "head", "dest", "src").alias("item")),
        "heads at pairs of roles of every order and wording": shared.filter(
            pl.col("head").is_not_null()
        ).select("prompt", pl.format("{} {} {}", "head", "dest", "src").alias("item")),
        "edges between heads alone": heads.select(
            "prompt", pl.format("{} {}", "source_head", "target_head").alias("item")
        ),
        "heads alone": nodes_of(ends)
        .filter(pl.col("head").is_not_null())
        .select("prompt", pl.col("head").alias("item")),
    }


def nodes_of(ends: pl.DataFrame) -> pl.DataFrame:
    """The nodes of every circuit, each once."""
    columns = ("component", "head", "dest", "src")
    sides = [
        ends.select("prompt", *(pl.col(f"{end}_{name}").alias(name) for name in columns))
        for end in ("source", "target")
    ]
    return pl.concat(sides).unique()


# -- what is said about them -------------------------------------------------------------------------------------


def explained(squared: Float[np.ndarray, "n n"], labels: Sequence[str] | np.ndarray) -> float:
    """Which share of the squared distances groups explain: 1 - within / total."""
    values, own = np.unique(np.asarray(labels), return_inverse=True)
    inside = np.eye(len(values))[own]
    sums = np.einsum("ig,ij,jg->g", inside, squared, inside, optimize=True) / inside.sum(0)
    return float(1 - sums.sum() / (squared.sum() / len(squared)))


def against_chance(
    squared: Float[np.ndarray, "n n"], labels: Sequence[str], within: Sequence[str]
) -> dict[str, float]:
    """What labels explain, beside labels permuted among prompts that agree in ``within``: the other label's share
    stays as it is."""
    own, found = np.asarray(labels), explained(squared, labels)
    rng = np.random.default_rng(0)
    strata = [np.flatnonzero(np.asarray(within) == value) for value in np.unique(np.asarray(within))]
    chance: list[float] = []
    for _ in range(PERMUTATIONS):
        mixed = own.copy()
        for rows in strata:
            mixed[rows] = own[rng.permutation(rows)]
        chance.append(explained(squared, mixed))
    p = (1 + sum(each >= found for each in chance)) / (1 + PERMUTATIONS)
    return {"share": found, "by chance": float(np.mean(chance)), "p": p}


def two_by_two(
    squared: Float[np.ndarray, "n n"], orders: Sequence[str], wordings: Sequence[str]
) -> dict[str, float]:
    """Order against wording with two groups each: over all pairs of wordings, what each explains of their prompts."""
    found: list[tuple[float, float]] = []
    for pair in combinations(sorted(set(wordings)), 2):
        rows = np.flatnonzero(np.isin(np.asarray(wordings), pair))
        part = squared[np.ix_(rows, rows)]
        found.append((explained(part, np.asarray(orders)[rows]), explained(part, np.asarray(wordings)[rows])))
    by_order, by_wording = np.asarray(found).T
    return {
        "pairs": len(found),
        "order": float(by_order.mean()),
        "wording": float(by_wording.mean()),
        "wording more": int((by_wording > by_order).sum()),
    }


def families_of(table: pl.DataFrame, prompts: Mapping[int, tuple[str, str]]) -> dict[str, Any]:
    """Families by the rule, cuts into two and four, and what order and wording explain."""
    ids = sorted(prompts)
    rows = pl.DataFrame({"prompt": ids, "row": range(len(ids))})
    sets = Sets.of(table.join(rows, on="prompt").select("row", "item").unique(), len(ids), "edges")
    orders, wordings = ([prompts[id][place] for id in ids] for place in (0, 1))
    labels = {"order": orders, "wording": wordings}
    squared = square(sets.matrix).astype(np.float64) ** 2
    tree = average_linkage(condensed(sets.matrix))
    choice = choose(sets.matrix)

    def cut(n: int) -> dict[str, Any]:
        family = by_size(cuts(tree, n)[-1])
        said = {name: agreement(family.tolist(), values) for name, values in labels.items()}
        return {
            "n": n,
            "sizes": np.bincount(family)[1:].tolist(),
            "agreement": {name: {"ari": a.ari, "nmi": a.nmi, "p": a.p} for name, a in said.items()},
            "crossed": [
                {
                    name: dict(
                        zip(*np.unique(np.asarray(values)[family == f], return_counts=True), strict=True)
                    )
                    for name, values in labels.items()
                }
                for f in range(1, n + 1)
            ],
        }

    return {
        "items": len(sets.items),
        "median size": float(np.median(np.diff(sets.matrix.indptr))),
        "rule": str(choice),
        "control": choice.control,
        "p": choice.p,
        "cuts tried": choice.table.to_dicts(),
        "families": [cut(n) for n in dict.fromkeys((choice.n, 2, 4)) if n > 1],
        "chosen": choice.n,
        "explained": {
            "order": against_chance(squared, orders, wordings),
            "wording": against_chance(squared, wordings, orders),
            "two groups each": two_by_two(squared, orders, wordings),
        },
    }


def study(table: pl.DataFrame, model: str) -> dict[str, Any]:
    edges = table.filter(model=model, task="ioi")
    numbers = edges["prompt"].unique().sort().to_list()
    drawn = drawn_prompts(max(numbers) + 1)
    prompts = {number: drawn[number] for number in numbers}
    names = parsed(pl.concat([edges["source"], edges["target"]]).unique().to_list())
    both = [edges.select("prompt", name=end).join(names, on="name") for end in ("source", "target")]
    seen = orders_seen(pl.concat(both).unique())
    agree = sum(prompts[number][0] == order for number, order in seen.items())
    print(
        f"{model}: {len(numbers)} circuits; order drawn again as attention shows it: {agree} of {len(seen)}",
        flush=True,
    )
    if agree < len(seen):
        raise SystemExit("The prompts drawn again are not those of the circuits: no label can be trusted.")
    found: dict[str, Any] = {"circuits": len(numbers), "orders checked": len(seen), "items": {}}
    for kind, items in item_tables(edges, prompts).items():
        found["items"][kind] = families_of(items, prompts)
        print(f"  {kind}: {found['items'][kind]['rule']}", flush=True)
        for each in found["items"][kind]["families"]:
            said = ", ".join(f"{k} {v['ari']:.2f} (p {v['p']:.3f})" for k, v in each["agreement"].items())
            print(f"    cut into {each['n']}: {each['sizes']}; ARI {said}", flush=True)
        print(f"    explained: {found['items'][kind]['explained']}", flush=True)
    return found


# -- all tasks ---------------------------------------------------------------------------------------------------


def task(table: pl.DataFrame, model: str, name: str) -> dict[str, Any]:
    """Families of one task by the rule, without labels; and its heads beside those of a published circuit."""
    edges = table.filter(model=model, task=name)
    names = parsed(pl.concat([edges["source"], edges["target"]]).unique().to_list())
    sides = [
        edges.select("prompt", name=end).join(names, on="name").select("prompt", "head", "dest", "src")
        for end in ("source", "target")
    ]
    heads = pl.concat(sides).filter(pl.col("head").is_not_null())
    kinds = {
        "edges between node names (with roles)": edges.select(
            "prompt", pl.format("{} {} {}", "source", "target", "type").alias("item")
        ),
        "heads alone": heads.select("prompt", pl.col("head").alias("item")),
    }
    ids = edges["prompt"].unique().sort()
    rows = pl.DataFrame({"prompt": ids, "row": range(len(ids))})
    found: dict[str, Any] = {"circuits": len(ids), "items": {}}
    for kind, items in kinds.items():
        sets = Sets.of(items.join(rows, on="prompt").select("row", "item").unique(), len(ids), "edges")
        choice = choose(sets.matrix)
        family = by_size(cuts(average_linkage(condensed(sets.matrix)), choice.n)[-1])
        sizes = np.bincount(family)[1:].tolist()
        found["items"][kind] = {"rule": str(choice), "control": choice.control, "p": choice.p, "sizes": sizes}
    if (model, name) in REFERENCES:
        often = kinds["heads alone"].unique().group_by("item").len().filter(pl.col("len") >= 0.5 * len(ids))
        found["published"] = published(set(often["item"]), REFERENCES[model, name])
    return found


def published(heads: set[str], name: str) -> dict[str, Any]:
    """How many of these heads a published circuit has; p: as many or more, were the heads drawn at random."""
    reference = load_reference(name)
    theirs = {f"L{each.layer}H{each.head}" for each in reference.heads}
    total, right = reference.model.n_layers * reference.model.n_heads, len(heads & theirs)
    return {
        "reference": name,
        "heads": len(heads),
        "of": len(theirs),
        "in both": right,
        "by chance": len(heads) * len(theirs) / total,
        "p": float(hypergeom.sf(right - 1, total, len(theirs), len(heads))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path, help="the Parquet table of ACC's edges")
    parser.add_argument("--models", default="gpt2-small,pythia-160m,gemma-2-2b")
    parser.add_argument("--tasks", action="store_true", help="only what is said of all tasks")
    parser.add_argument("--out", type=Path, default=Path("build/authors"))
    asked = parser.parse_args()
    table = pl.read_parquet(asked.table)
    asked.out.mkdir(parents=True, exist_ok=True)
    tasks: dict[str, Any] = {}
    for model in asked.models.split(","):
        for name in table.filter(model=model)["task"].unique().sort().to_list():
            tasks[f"{model} {name}"] = task(table, model, name)
            print(f"{model} {name}: {tasks[f'{model} {name}']}", flush=True)
    (asked.out / "tasks.json").write_text(json.dumps(tasks, indent=1, default=int) + "\n")
    if asked.tasks:
        return
    results = {model: study(table, model) for model in asked.models.split(",")}
    (asked.out / "results.json").write_text(json.dumps(results, indent=1, default=int) + "\n")


if __name__ == "__main__":
    main()
