"""``headtrace bench``: methods side by side on prompts with counterfactuals."""

from __future__ import annotations

import typer

from headtrace.cli import options
from headtrace.cli.output import Output, note, show_table, warn
from headtrace.cli.progress import progress_bar
from headtrace.cli.request_options import exit_by_share
from headtrace.errors import InputError


def bench(
    *,
    model: options.ModelName,
    prompts: list[str] = typer.Option(
        help="A .jsonl file of prompts with answer, wrong and counterfactual, or a folder of them; may be given again."
    ),
    methods: str | None = typer.Option(
        None,
        help="Some, by commas, of acc++, content, complete, difference, attribution patching, integrated gradients and "
        "random.",
    ),
    number: int = typer.Option(20, "--n", "-n", min=1, help="Prompts of each file."),
    to: str | None = typer.Option(
        None, help="mib: write scores of edges for the MIB benchmark to --out x.json."
    ),
    out: str | None = typer.Option(
        None,
        help="Folder for bench.json, bench.parquet and bench.png; a table as .tex; with --to mib a .json.",
    ),
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    Each method ranks head components; the first 5, 10, 20, 40 are kept and all others take what they had on the
    counterfactual prompt. 1 is all of the answer back. The cost is in forward passes of the same prompt.

    Examples:

      headtrace bench smollm2-135m --prompts pairs/ --out bench
      headtrace bench gemma-3-270m --prompts ioi.jsonl --methods acc++,difference,random -n 50 --json
      headtrace bench smollm2-135m --prompts ioi.jsonl --methods difference --to mib --out ioi-edges.json
    """
    from headtrace.causal.bench import METHODS
    from headtrace.causal.bench import bench as measure
    from headtrace.writing import write_report, write_text

    if to not in (None, "mib"):
        raise InputError(f"There is no format {to!r} for scores: choose mib.")
    chosen = METHODS if methods is None else tuple(each.strip() for each in methods.split(","))
    if to == "mib" and (out is None or "difference" not in chosen):
        raise InputError(
            "--to mib writes flows of edges: give --out x.json, and difference among the methods."
        )
    output = Output(json, out, [".json"] if to == "mib" else [".tex"], folder=to is None)
    loaded = place.load(model)
    with progress_bar(f"Methods on {model}") as progress:
        found = measure(loaded, prompts, methods=chosen, n=number, progress=progress)
    columns = {"set": "{0[set]}", "method": "{0[method]}", "prompts": "{0[prompts]}"}
    columns |= {f"at {size}": f"{{0[at {size}]:.2f}}" for size in (5, 10, 20, 40)}
    columns |= {"CPR": "{0[cpr]:.2f}", "CMD": "{0[cmd]:.2f}", "cost": "{0[cost]:.1f}"}

    def save(path: str) -> None:
        if to == "mib":
            write_report(path, found.mib())
        elif output.ending == ".tex":
            write_text(path, found.to_latex() + "\n")
        else:
            found.save(path)

    output.finish(
        found.to_dict,
        lambda: show_table(
            found.medians.to_dicts(),
            columns,
            title="Median sufficiency by components kept; cost in forward passes",
            left=2,
        ),
        save=save,
        files="bench.json, bench.parquet, bench.png",
    )
    for name, counts in found.passed.items():
        left = {why: count for why, count in counts.items() if why != "used"}
        if left:
            note(f"{name}: passed over {', '.join(f'{count} ({why})' for why, count in left.items())}")
    for name, lines in found.skipped.items():
        warn(
            f"{name}: {len(lines)} lines skipped; the first is line {lines[0]['line']}: {lines[0]['reason']}"
        )
    exit_by_share(sum(map(len, found.skipped.values())), found.lines)
