"""How sparse attention emerges: the same heads and token pairs at several checkpoints of training.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> cases = strongest_cases(model, ["When Mary and John went to the store, John gave a drink to"], n=3)
>>> checkpoints = (("step0", model), ("step9", model))               # here the same one twice; loaded in turn
>>> found = emergence(checkpoints, cases, rotations=5)
>>> found.frame.height, found.checkpoints
(6, ['step0', 'step9'])
>>> found.summary().columns                                          # means over heads, true and rotated
['checkpoint', 'step', 'measure', 'basis', 'mean', 'low', 'high', 'heads']

``read_cases`` takes the firings to follow from a file, and ``found.plot("emergence.png")`` draws them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.channels.sparsity import CONTROLS, random_rotations, rotated_terms
from headtrace.channels.terms import FiringTerms, terms_of
from headtrace.errors import InputError
from headtrace.lines import Record, prompt_of, read_lines
from headtrace.prompts import as_prompts
from headtrace.vocabulary import Firing, Prompt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.models import Model

MEASURES = {"sparseness": ("true", "basis", "spectrum"), "n_recon": ("true", "basis")}
"""In which bases each is measured: the singular one, rotated ones of the same logit, rotated heads of the
same spectrum. Those have another logit, often a small one, which few terms reach: ``n_recon`` would not
compare."""


@dataclass(frozen=True)
class Case:
    """A head and a token pair of a prompt, to be followed through training."""

    prompt: str | tuple[int, ...]
    firing: Firing
    name: str = ""
    """What the head does, if known: shown in figures."""


def read_cases(path: str | Path) -> list[Case]:
    """Read firings from JSONL: ``{"text": ..., "firing": "L9H6:14:3"}`` or ``{"tokens": ...``.

    A line that cannot be used is an error: what is followed through training should be what was asked for.
    """
    return read_lines(path, _case, what="firings", strict=True).values


def _case(record: Record, where: str) -> Case:
    prompt = prompt_of(record, where)
    try:
        firing = Firing.parse(str(record.get("firing", "")))
    except InputError as error:
        raise InputError(f"{where}, field 'firing': {error}") from error
    return Case(prompt, firing, str(record.get("name", "")))


@dataclass(frozen=True, eq=False)
class Emergence:
    """Sparseness and ``n_recon`` of some firings at each checkpoint."""

    frame: pl.DataFrame
    """One row per checkpoint and case: checkpoint, step, case, layer, head, dest, src, attention, relative,
    and sparseness and n_recon, also under rotation: sparseness_basis, sparseness_spectrum, n_recon_basis."""
    cases: tuple[Case, ...]
    labels: tuple[tuple[str, str], ...]
    """Token text of each case's destination and source."""
    relative_terms: Float[Tensor, "checkpoint case channel"]
    rotated_terms: Float[Tensor, "case channel"]
    """One rotated head (same spectrum) at the last checkpoint, for looking at."""

    @property
    def checkpoints(self) -> list[str]:
        return self.frame["checkpoint"].unique(maintain_order=True).to_list()

    def summary(self, level: float = 0.95) -> pl.DataFrame:
        """Per checkpoint, measure and basis: the mean over heads, and its interval (Student's t).

        A head's cases are averaged first. ``n_recon`` is taken where the head attends more than to the
        other keys; elsewhere there is nothing to reconstruct.
        """
        rows = [
            _summary_row(part, str(name[0]), measure, basis, level)
            for name, part in self.frame.group_by("checkpoint", maintain_order=True)
            for measure, bases in MEASURES.items()
            for basis in bases
        ]
        return pl.DataFrame(rows, infer_schema_length=None)

    def plot(self, path: str | None = None) -> Figure:
        """Sparseness and ``n_recon`` over training, true basis and rotated ones, with intervals."""
        from headtrace.figures.channels import plot_emergence

        return plot_emergence(self, path)


def _summary_row(
    part: pl.DataFrame, checkpoint: str, measure: str, basis: str, level: float
) -> dict[str, str | float | None]:
    from scipy.stats import sem, t

    column = measure if basis == "true" else f"{measure}_{basis}"
    if measure == "n_recon":
        part = part.filter(pl.col("relative") > 0)
    by_head = part.group_by("layer", "head", maintain_order=True).agg(pl.col(column).mean())
    heads = by_head[column].to_numpy()
    mean = float(heads.mean()) if len(heads) else None
    half = float(t.interval(level, len(heads) - 1)[1] * sem(heads)) if len(heads) > 1 else None
    return {
        "checkpoint": checkpoint,
        "step": step_of(checkpoint),
        "measure": measure,
        "basis": basis,
        "mean": mean,
        "low": None if mean is None or half is None else mean - half,
        "high": None if mean is None or half is None else mean + half,
        "heads": len(heads),
    }


def emergence(
    checkpoints: Iterable[tuple[str, Model]], cases: Sequence[Case], *, rotations: int = 100, seed: int = 0
) -> Emergence:
    """Decompose the cases at every checkpoint: (label, model), which may be loaded one after another."""
    if not cases:
        raise InputError("No firings to follow. Give some, such as {'text': '...', 'firing': 'L9H6:14:3'}.")
    frames: list[pl.DataFrame] = []
    kept: list[Tensor] = []
    labels: tuple[tuple[str, str], ...] = ()
    last: FiringTerms | None = None
    for label, model in checkpoints:
        last, labels = _decompose_cases(model, cases)
        frames.append(_checkpoint_frame(label, last, rotations, seed))
        kept.append(last.relative_terms.cpu())
    if last is None:
        raise InputError("No checkpoints given.")
    return Emergence(pl.concat(frames), tuple(cases), labels, torch.stack(kept), _one_rotation(last, seed))


def _decompose_cases(model: Model, cases: Sequence[Case]) -> tuple[FiringTerms, tuple[tuple[str, str], ...]]:
    prompts = list(dict.fromkeys(case.prompt for case in cases))
    recording = model.record(prompts, last_logits=True)
    places: list[list[int]] = []
    labels: list[tuple[str, str]] = []
    for case in cases:
        prompt, f = prompts.index(case.prompt), case.firing
        recording.check_firing(f, prompt)
        places.append([f.layer, prompt, f.head, f.dest, f.src])
        tokens = recording.tokens(prompt)
        labels.append((tokens[f.dest], tokens[f.src]))
    return terms_of(recording, torch.tensor(places, device=model.device)), tuple(labels)


def _checkpoint_frame(label: str, terms: FiringTerms, rotations: int, seed: int) -> pl.DataFrame:
    layer, _, head, dest, src = terms.places.T.tolist()
    columns: dict[str, Sequence[object]] = {
        "checkpoint": [label] * len(terms),
        "step": [step_of(label)] * len(terms),
        "case": list(range(len(terms))),
        "layer": layer,
        "head": head,
        "dest": dest,
        "src": src,
        "attention": terms.attention.tolist(),
        "relative": terms.relative.tolist(),
        "sparseness": terms.sparseness.tolist(),
        "n_recon": [float(n) for n in terms.n_recon.tolist()],
    }
    for control in CONTROLS:
        turned = terms.rotated(rotations, control, seed)
        columns[f"sparseness_{control}"] = turned.mean_sparseness.tolist()
        if control == "basis":
            columns["n_recon_basis"] = turned.mean_n_recon.tolist()
    return pl.DataFrame(columns, schema_overrides={"step": pl.Float64})


def _one_rotation(terms: FiringTerms, seed: int) -> Float[Tensor, "case channel"]:
    shown = torch.zeros_like(terms.relative_terms)
    generator = torch.Generator().manual_seed(seed)
    for row in range(len(terms)):
        r = int(terms.rank[row])
        parts = (t[row : row + 1, :r].cpu() for t in (terms.query, terms.relative_key, terms.singular_values))
        query, key, S = parts
        draws = random_rotations(1, r, generator), random_rotations(1, r, generator)
        shown[row, :r] = rotated_terms(query, key, S, draws, "spectrum")[0, 0]
    return shown.cpu()


def step_of(label: str) -> float | None:
    """The training step in a checkpoint's name, if it ends in a number.

    >>> step_of("step1000"), step_of("final")
    (1000.0, None)
    """
    match = re.search(r"(\d+)$", label)
    return float(match.group(1)) if match else None


def strongest_cases(
    model: Model, prompts: Prompt | Sequence[Prompt], n: int = 20, least_keys: int = 4
) -> list[Case]:
    """The n heads that attend most sharply on these prompts, each at its strongest firing.

    Left out: the first token (the usual sink), tokens that attend to themselves, destinations with few keys.
    """
    best: dict[tuple[int, int], tuple[float, Case]] = {}
    for prompt in as_prompts(prompts):
        given = prompt if isinstance(prompt, str) else tuple(model.to_ids(prompt))
        recording = model.record(given, last_logits=True)
        length = recording.lengths[0]
        wanted = torch.ones(length, length, dtype=torch.bool, device=model.device).tril(-1)
        wanted[:, :1], wanted[: least_keys - 1] = False, False
        values, flat = recording.patterns[:, 0].masked_fill(~wanted, 0).flatten(2).max(dim=-1)
        for layer, head in torch.cartesian_prod(*(torch.arange(k) for k in values.shape)).tolist():
            attention, place = float(values[layer, head]), int(flat[layer, head])
            if attention > best.get((layer, head), (0.0, None))[0]:
                firing = Firing(layer, head, place // length, place % length)
                best[layer, head] = (attention, Case(given, firing))
    return [case for _, case in sorted(best.values(), key=lambda pair: -pair[0])[:n]]
