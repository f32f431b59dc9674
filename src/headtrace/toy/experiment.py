"""What every experiment of the toy lab hands back, and how it is written to a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from headtrace.writing import replacing, write_text


@dataclass(frozen=True)
class Experiment:
    """The outcome of one experiment.

    `findings` is what a reader wants to know, in plain numbers; `table` has a row for each measurement;
    `arrays` is what the figures draw.
    """

    name: str
    findings: Mapping[str, object]
    table: pl.DataFrame
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])


def against_paper(
    claim: str, paper: object, measured: object, agrees: bool, remark: str = ""
) -> dict[str, object]:
    """One line of comparison: what the paper says, what was measured, and whether the two agree."""
    line: dict[str, object] = {"claim": claim, "paper": paper, "measured": measured, "agrees": agrees}
    return {**line, "remark": remark} if remark else line


def write(experiment: Experiment, folder: Path) -> list[Path]:
    """Write `toy-NAME.parquet` and `toy-NAME.json`; figures are drawn by `headtrace.figures.toy`."""
    table, findings = (folder / f"toy-{experiment.name}.{end}" for end in ("parquet", "json"))
    with replacing(table) as temporary:
        experiment.table.write_parquet(temporary)
    text = json.dumps({"experiment": experiment.name, **experiment.findings}, indent=2)
    write_text(findings, text + "\n")
    return [table, findings]
