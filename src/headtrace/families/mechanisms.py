"""The mechanism of many prompts: which steps they have in common, how often, how much flows through them.

    run = headtrace.run(model, examples, out="runs/ioi", mechanisms=True)
    print(shared_steps(run).summary())
    print(shared_steps(run, "order").summary())             # prompts by a label
    print(shared_steps(run, families.labels).summary())     # or by family

Two prompts have the same step if one rule names it and the tokens that it writes at and reads have the same roles
(without roles: the same positions). Where a rule gathers all sources (``against``), the source does not count. Of
several such steps in one prompt the strongest counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from headtrace.errors import InputError
from headtrace.families.result import WITHIN, difference_of_shares
from headtrace.mechanism.rules import MLPS, RULES, Facts
from headtrace.runs.frames import By, choose_places, frames_of, place_names, with_places
from headtrace.runs.manifest import DONE, LABEL
from headtrace.runs.reading import Run
from headtrace.statistics import interval, wilson
from headtrace.tables import frame, latex_table, paragraph
from headtrace.writing import write_report, write_text

SCHEMA = "headtrace.steps/1"
ALL = "all prompts"
LEAST = 0.1
"""Steps that fewer prompts of every group have are left out of the summary."""
MOST_HEADS = 4
"""Heads of a step that are named, those of most prompts first."""


def step_words(rule: str, at: str, reads: str | None) -> str:
    """A step in words, with roles instead of tokens.

    >>> step_words("finds", "S2", "S1"), step_words("mlps", "end", None)
    ('*S2* finds *S1*', 'the MLPs at *end*')
    >>> step_words("induction", "S2", "S1+1")
    '*S2* looks at *S1+1*, the token after *S1*'
    """
    if rule == MLPS or rule not in RULES:
        where = f" at *{at}*" + ("" if reads is None else f" reading *{reads}*")
        return ("the MLPs" if rule == MLPS else rule) + where
    earlier = (
        reads.removesuffix("+1") if reads is not None and reads.endswith("+1") else "its earlier occurrence"
    )
    tokens = (earlier, "" if reads in (at, None) else reads, "…", at)
    return RULES[rule].words(Facts(tokens, 3, 3 if reads == at else 1, 1.0, 1.0))


@dataclass(frozen=True, repr=False)
class SharedSteps:
    """Which steps the mechanisms of many prompts share. Made by ``shared_steps``."""

    model: str
    groups: dict[str, int]
    """How many prompts each group has."""
    table: pl.DataFrame
    """A row per group and step: ``group``, ``rule``, ``at``, ``reads``, ``text``; ``prompts`` that have it and their
    ``share`` (``share_low`` to ``share_high``); over those, the mean ``flow`` (``flow_low`` to ``flow_high``), its mean
    part of the whole difference, ``of_whole``; ``lost``, what the root's number loses without the step, and
    ``lost_random`` without random components; ``beyond`` (``beyond_low`` to ``beyond_high``), how much farther the step
    moves it, in the direction of its flow, than its own random components do in the same prompt; ``heads``, the four of
    most prompts, with the share of these prompts in which each takes part; ``usual``, all that take part in at least
    half of them."""
    differences: pl.DataFrame
    """A row per step and pair of groups ``a`` and ``b``: the shares ``in_a`` and ``in_b``, their ``difference`` with
    its 95 % interval (``low`` to ``high``), ``flow_a``, ``flow_b``, and the ``verdict``: ``shared``, ``shared, other
    heads`` (no head takes part in half of the prompts of both), ``more in a``, ``more in b``, or ``undecided``. Many
    steps are compared: one in twenty intervals misses by chance."""
    without: int = 0
    """Prompts that have no mechanism: they failed, or nothing differed."""

    def frame(self, of: str = "steps") -> pl.DataFrame:
        """The table of steps, or that of ``"differences"`` between groups."""
        if of not in ("steps", "differences"):
            raise InputError(f"of={of!r}: choose steps or differences.")
        return self.table if of == "steps" else self.differences

    def sentence(self, group: str | None = None) -> str:
        """What most prompts of a group do: the steps of at least half of them, bottom to top."""
        if group is None and len(self.groups) == 1:
            (group,) = self.groups
        rows = self.table.filter((pl.col("group") == group) & (pl.col("share") >= WITHIN))
        if group not in self.groups:
            raise InputError(f"There is no group {group!r}: choose {', '.join(map(repr, self.groups))}.")
        said = [
            f"{row['text']} ({row['share']:.0%}, {row['flow']:+.2f})"
            for row in rows.sort("stage", "share", descending=[False, True]).to_dicts()
        ]
        return "; ".join(said) + "." if said else "No step is in half of the prompts."

    def summary(self) -> str:
        """Each group's sentence, its steps with intervals, and where groups differ."""
        lines: list[str] = []
        for name, size in self.groups.items():
            lines += [f"{name} ({size} prompts): {self.sentence(name)}", *map(_line, self._shown(name)), ""]
        for row in self.differences.filter(pl.col("verdict") != "undecided").to_dicts():
            verdict = {"more in a": f"more in {row['a']}", "more in b": f"more in {row['b']}"}
            lines.append(
                f"{verdict.get(row['verdict'], row['verdict'])}: {row['text']}  {row['in_a']:.2f} in {row['a']}, "
                f"{row['in_b']:.2f} in {row['b']} ({row['difference']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}])"
            )
        if self.without:
            lines.append(f"{self.without} prompts have no mechanism and are left out.")
        return "\n".join(lines).rstrip()

    def _shown(self, group: str) -> list[dict[str, Any]]:
        rows = self.table.filter((pl.col("group") == group) & (pl.col("share") >= LEAST))
        return rows.sort("share", "text", descending=[True, False]).to_dicts()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.groups.items())
        return f"SharedSteps({self.model}: {sizes}; {self.table['text'].n_unique()} steps)"

    def _repr_html_(self) -> str:
        said = "".join(paragraph(self.sentence(name), bold=name) for name in self.groups)
        return said + frame(self.table.drop("stage")) + frame(self.differences)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "groups": self.groups,
            "without": self.without,
            "sentences": {name: self.sentence(name) for name in self.groups},
            "steps": self.table.to_dicts(),
            "differences": self.differences.to_dicts(),
        }

    def save(self, path: str | Path) -> Path:
        """Write everything as ``.json``, the summary as ``.md``, or the steps as a LaTeX table (``.tex``)."""
        ending = Path(path).suffix.lower()
        if ending == ".json":
            return write_report(Path(path), self.to_dict())
        if ending == ".md":
            return write_text(path, f"{self.summary()}\n")
        if ending == ".tex":
            shown = self.table.select("group", "text", "share", "flow", "lost", "lost_random", "usual")
            return write_text(path, latex_table(shown) + "\n")
        raise InputError(f"{path}: end its name in .json, .md or .tex.")


def _line(row: dict[str, Any]) -> str:
    lost = ""
    if row["lost"] is not None:
        control = "" if row["lost_random"] is None else f"; random {-row['lost_random']:+.2f}"
        lost = f"  without it {-row['lost']:+.2f}{control}{_doubt(row)}"
    heads = ", ".join(row["heads"])
    return (
        f"  {row['share']:.2f} [{row['share_low']:.2f}, {row['share_high']:.2f}]  {row['flow']:+.2f} "
        f"[{row['flow_low']:+.2f}, {row['flow_high']:+.2f}]  {row['text']}  [{heads}]{lost}"
    )


def _doubt(row: dict[str, Any]) -> str:
    """What is said of a step that does not move the root's number farther than its random components do."""
    low = row["beyond_low"]
    return " (no more than random ones do)" if low is not None and low <= 0 else ""


def shared_steps(
    run: Run, groups: str | Mapping[str, Any] | None = None, *, by: By | None = None, seed: int = 0
) -> SharedSteps:
    """Which steps the prompts of a run share; its mechanisms are kept by ``headtrace.run(..., mechanisms=True)``.

    ``groups`` is a label of the prompts (``"order"``), or the group of each prompt by its id, such as
    ``Families.labels``; prompts without a group are left out. ``by`` names tokens by ``"roles"`` (the default where
    there are some) or ``"positions"``. Intervals are 95 %: Wilson's for shares, by resampling prompts for flows.
    """
    prompts = run.prompts.collect()
    told = set(prompts.filter(pl.col("status") == DONE)["id"])
    chosen = _groups(run, prompts, groups)
    names = {id: chosen[id] for id in prompts["id"] if id in told and chosen.get(id) is not None}
    if not names:
        raise InputError(f"{run.path}: no prompt with a mechanism is in any group; is the run done?")
    sizes = dict(sorted(Counter(names.values()).items()))
    steps = _keyed(run, by).filter(pl.col("prompt").is_in(list(names)))
    steps = steps.with_columns(group=pl.col("prompt").replace_strict(names, return_dtype=pl.String))
    rows = [
        _row(group, size, key, some, seed)
        for group, size in sizes.items()
        for key, some in steps.filter(pl.col("group") == group).group_by(_KEY, maintain_order=True)
    ]
    table = pl.DataFrame(rows, infer_schema_length=None).sort(
        "group", "share", "text", descending=[False, True, False]
    )
    left = sum(1 for id in prompts["id"] if id not in told)
    return SharedSteps(run.manifest.model.name, sizes, table, _differences(table, sizes), left)


_KEY = ("rule", "at", "reads")


def _groups(run: Run, prompts: pl.DataFrame, groups: str | Mapping[str, Any] | None) -> dict[str, str]:
    """The group of each prompt."""
    if groups is None:
        return dict.fromkeys(prompts["id"], ALL)
    if isinstance(groups, str):
        column = f"{LABEL}{groups}"
        if column not in prompts.columns:
            there = [name.removeprefix(LABEL) for name in prompts.columns if name.startswith(LABEL)]
            raise InputError(
                f"{run.path} has no label {groups!r}: choose {', '.join(map(repr, there)) or 'none; it has no labels'}."
            )
        pairs = zip(prompts["id"], prompts[column], strict=True)
        return {id: f"{groups} {value}" for id, value in pairs if value is not None}
    return {id: f"family {value}" if isinstance(value, int) else str(value) for id, value in groups.items()}


def _keyed(run: Run, by: By | None) -> pl.DataFrame:
    """Steps with the roles of their tokens, in each prompt each once: the strongest."""
    frames = frames_of(run)
    by = choose_places(frames, by)
    whole = [name for name, rule in RULES.items() if rule.by == "dest"] + [MLPS]
    src = pl.when(pl.col("rule").is_in(whole)).then(None).otherwise(pl.col("src"))
    steps = with_places(run.steps.with_columns(src=src), place_names(frames, by), by, ("dest", "src"))
    found = steps.rename({"dest": "at", "src": "reads"}).collect()
    strongest = found.sort(pl.col("flow").abs(), "prompt", "step", descending=[True, False, False])
    return strongest.unique(("prompt", *_KEY), keep="first", maintain_order=True).sort("prompt", "step")


def _row(group: str, size: int, key: tuple[Any, ...], some: pl.DataFrame, seed: int) -> dict[str, Any]:
    """One step of one group: how often, how much, what was measured, by which heads."""
    rule, at, reads = key
    n = some.height
    low, high = wilson(n, size)
    flow = some["flow"].to_numpy()
    flow_low, flow_high = interval(flow, np.arange(n), seed)
    lost = (some["before"] - some["without"]).mean()
    random = (some["before"] - some["random"]).mean()
    both = some.filter(pl.col("without").is_not_null() & pl.col("random").is_not_null())
    beyond = np.sign(flow.mean()) * (both["random"] - both["without"]).to_numpy()
    beyond_ends = interval(beyond, np.arange(len(beyond)), seed) if len(beyond) else (None, None)
    heads = Counter(
        name for names in some["heads"] for name in {each.split(" ")[0] for each in names.to_list()}
    )
    common = sorted(heads.items(), key=lambda item: (-item[1], item[0]))[:MOST_HEADS]
    return {
        "group": group,
        "rule": rule,
        "at": at,
        "reads": reads,
        "text": step_words(rule, at, reads),
        "stage": some["stage"].median(),
        "prompts": n,
        "share": n / size,
        "share_low": float(low),
        "share_high": float(high),
        "flow": float(flow.mean()),
        "flow_low": flow_low,
        "flow_high": flow_high,
        "of_whole": some["share"].mean(),
        "lost": lost,
        "lost_random": random,
        "beyond": float(beyond.mean()) if len(beyond) else None,
        "beyond_low": beyond_ends[0],
        "beyond_high": beyond_ends[1],
        "heads": [f"{name} {count / n:.2f}" for name, count in common],
        "usual": sorted(name for name, count in heads.items() if count >= WITHIN * n),
    }


_COMPARED = {
    "a": pl.String,
    "b": pl.String,
    **dict.fromkeys((*_KEY, "text"), pl.String),
    **dict.fromkeys(("in_a", "in_b", "difference", "low", "high", "flow_a", "flow_b"), pl.Float64),
    "verdict": pl.String,
}


def _differences(table: pl.DataFrame, sizes: Mapping[str, int]) -> pl.DataFrame:
    """Every step beside itself in every two groups, the largest difference first."""
    rows: list[dict[str, Any]] = []
    known = {(row["group"], row["text"]): row for row in table.to_dicts()}
    steps = {row["text"]: row for row in table.to_dicts()}
    for a, b in combinations(sizes, 2):
        for text, step in steps.items():
            one, two = known.get((a, text)), known.get((b, text))
            if one is None and two is None:
                continue
            counts = [np.array([float(row["prompts"] if row else 0)]) for row in (one, two)]
            found = {
                name: float(value[0])
                for name, value in difference_of_shares(counts[0], sizes[a], counts[1], sizes[b]).items()
            }
            verdict = "undecided"
            if found["low"] > 0 or found["high"] < 0:
                verdict = "more in a" if found["difference"] > 0 else "more in b"
            elif min(found["inside"], found["outside"]) >= WITHIN:
                common = set(one["usual"] if one else ()) & set(two["usual"] if two else ())
                verdict = "shared" if common or step["rule"] == MLPS else "shared, other heads"
            rows.append(
                {
                    "a": a,
                    "b": b,
                    **{name: step[name] for name in (*_KEY, "text")},
                    "in_a": found["inside"],
                    "in_b": found["outside"],
                    **{name: found[name] for name in ("difference", "low", "high")},
                    "flow_a": one["flow"] if one else None,
                    "flow_b": two["flow"] if two else None,
                    "verdict": verdict,
                }
            )
    frame = pl.DataFrame(rows, schema=_COMPARED)
    return frame.sort("a", "b", pl.col("difference").abs(), "text", descending=[False, False, True, False])
