"""Make the figures and numbers: SmolLM2 on IOI prompts, the built-in model in training.

python docs/studies/channels.py ioi                     # some minutes; writes docs/figures/channels-*
python docs/studies/channels.py training CHECKPOINTS    # the folder of checkpoints that training saved
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl
from docs.studies.survey import Survey, rotation_test, separation, survey, token_strengths
from study_figures import (
    plot_condition_numbers,
    plot_rotations,
    plot_signal_sizes,
    plot_slices_used,
    plot_token_strengths,
)

import headtrace
from headtrace.channels import condition_numbers
from headtrace.channels.emergence import emergence, strongest_cases
from headtrace.figures.channels import plot_early_and_late, plot_emergence
from headtrace.tasks import TaskSet, load_task
from headtrace.vocabulary import head_name

FIGURES = Path(__file__).parents[1] / "figures"
ROTATIONS = 20


def ioi(n_per_cell: int = 10) -> None:
    model = headtrace.load("smollm2-135m")
    tasks = load_task("ioi", model.tokenizer, n_per_cell=n_per_cell, seed=0)
    prompts = [list(example.token_ids) for example in tasks]
    found = survey(
        model, prompts, rotations=ROTATIONS, progress=lambda done, of: print(f"{done}/{of}", file=sys.stderr)
    )
    mover = name_mover(found, tasks)
    plot_signal_sizes(found, FIGURES / "channels-signal-sizes.png")
    plot_rotations(found, FIGURES / "channels-rotations.png")
    plot_slices_used(found, [mover, *busiest(found, 3)], FIGURES / "channels-slices.png")
    plot_condition_numbers(model, FIGURES / "channels-condition.png")
    first = model.record(prompts[0])
    end, giver = tasks[0].roles["end"], tasks[0].roles["IO"]
    why = model.decompose(first, f"{head_name(*mover)}:{end}:{giver}")
    why.plot(str(FIGURES / "channels-firing.png"))
    numbers: dict[str, Any] = {
        "prompts": len(prompts),
        "rotations": ROTATIONS,
        "sizes": size_numbers(found),
        "rotation_tests": [asdict(rotation_test(found, control)) for control in ("basis", "spectrum")],
        "names": name_numbers(model, found, tasks, mover),
        "condition_numbers": {
            name: {"median": float(c.median()), "max": float(c.max())}
            for name, c in zip(("W_Q", "W_K"), condition_numbers(model), strict=True)
        },
        "example": {"text": tasks[0].text, "firing": str(why.firing), "attention": why.attention},
    }
    write(numbers, "channels-smollm2.json")


def name_mover(found: Survey, tasks: TaskSet) -> tuple[int, int]:
    """The head that fires most often from the end to the indirect object."""
    roles = pl.DataFrame(
        {
            "prompt": list(range(len(tasks))),
            "dest": [e.roles["end"] for e in tasks],
            "src": [e.roles["IO"] for e in tasks],
        }
    )
    firing = found.frame.filter(pl.col("fires")).join(roles, on=["prompt", "dest", "src"])
    layer, head, _ = (
        firing.group_by("layer", "head").len().sort("len", "layer", "head", descending=True).row(0)
    )
    return layer, head


def busiest(found: Survey, n: int) -> list[tuple[int, int]]:
    """Heads that fire often with few channels, with a middling number, and with many."""
    often = found.heads.filter(pl.col("firings") >= 3 * found.n_prompts).sort("signal_size", "layer", "head")
    steps = [round((0.15 + 0.7 * i / (n - 1)) * (often.height - 1)) for i in range(n)]
    return [often.select("layer", "head").row(i) for i in steps]


def size_numbers(found: Survey) -> dict[str, Any]:
    firing, quiet = pl.Series(found.sizes(fires=True)), pl.Series(found.sizes(fires=False))
    heads = found.heads.filter(pl.col("firings") > 0)
    rows = found.frame.filter(pl.col("fires"))
    return {
        "firings": len(firing),
        "median_firing": firing.median(),
        "quartiles_firing": [firing.quantile(q) for q in (0.25, 0.75)],
        "median_over_heads_of_head_medians": heads["signal_size"].median(),
        "heads_that_fire": heads.height,
        "quiet_pairs": len(quiet),
        "median_quiet": quiet.median(),
        "median_sparseness": rows["sparseness"].median(),
        "median_n_recon": rows["n_recon"].median(),
        "median_sparseness_basis": rows["sparseness_basis"].median(),
        "median_sparseness_spectrum": rows["sparseness_spectrum"].median(),
    }


def name_numbers(
    model: headtrace.Model, found: Survey, tasks: TaskSet, mover: tuple[int, int]
) -> dict[str, Any]:
    """Names against other tokens in the name mover's consensus subspace, and in as many random channels."""
    groups = [{e.roles[r]: "name" for r in ("IO", "S1", "S2")} for e in tasks]
    prompts = [list(e.token_ids) for e in tasks]
    channels = found.consensus(*mover)
    table = token_strengths(model, prompts, *mover, channels, groups)
    area, p = separation(table, "name")
    title = f"{head_name(*mover)}: strength in its consensus subspace of {len(channels)} channels"
    plot_token_strengths(table, "name", title, FIGURES / "channels-names.png", most=70)
    rest = [k for k in range(model.d_head) if k not in channels]
    draws = [random.Random(seed).sample(rest, len(channels)) for seed in range(5)]
    control = [separation(token_strengths(model, prompts, *mover, d, groups), "name")[0] for d in draws]
    rows = found.rows_of(*mover)
    return {
        "head": head_name(*mover),
        "firings": len(rows),
        "channels": list(channels),
        "area_under_roc": area,
        "p_value": p,
        "tokens": table.height,
        "area_in_as_many_other_channels": control,
    }


def training(folder: str) -> None:
    places = sorted(p for p in Path(folder).iterdir() if (p / "model.safetensors").exists())
    last = headtrace.load(places[-1])
    tasks = load_task("ioi", last.tokenizer, n_per_cell=2, seed=0)
    cases = strongest_cases(last, [list(e.token_ids) for e in tasks], n=16)
    found = emergence(((p.name, headtrace.load(p)) for p in places), cases)
    heads = found.frame.select("layer", "head").n_unique()
    plot_emergence(
        found, FIGURES / "channels-emergence-builtin.png", f"Built-in model: {heads} heads over training"
    )
    plot_early_and_late(found, path=FIGURES / "channels-emergence-builtin-terms.png")
    write(
        {
            "checkpoints": found.checkpoints,
            "firings": [
                {"text": last.tokenizer.decode(list(c.prompt)), "firing": str(c.firing)} for c in cases
            ],
            "summary": found.summary().to_dicts(),
        },
        "channels-emergence-builtin.json",
    )


def write(numbers: dict[str, Any], name: str) -> None:
    (FIGURES / name).write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(numbers, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    if sys.argv[1:2] == ["ioi"]:
        ioi()
    elif sys.argv[1:2] == ["training"] and len(sys.argv) == 3:
        training(sys.argv[2])
    else:
        sys.exit(__doc__)
