"""A folder of sinks: ``sinks.json``, tables as Parquet, directions and mean signals as safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from headtrace.errors import InputError
from headtrace.sinks.directions import MeanSignals
from headtrace.sinks.result import Settings, Sinks
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, parse_head
from headtrace.writing import replacing, write_bytes, write_text

SCHEMA = "headtrace.sinks/1"
TABLES = ("tokens", "mass", "firings", "constancy", "directions", "groups", "collapse")


def save_sinks(found: Sinks, folder: str | Path) -> Path:
    """Write everything but the figures."""
    path = Path(folder)
    tensors = {f"{side}.{name}": getattr(found.means[side], name) for side, name in _tensors()}
    heads = {side: found.means[side].names for side in ATTENTION_SIDES}
    content = {"schema": SCHEMA, "heads": heads, **found.to_dict()}
    for name in TABLES:
        _write(getattr(found, name), path / f"{name}.parquet")
    for side in ATTENTION_SIDES:
        _write(found.cosines(side), path / f"cosines-{side}.parquet")
    write_bytes(path / "signals.safetensors", save({k: t.contiguous() for k, t in tensors.items()}))
    write_text(
        path / "sinks.json", json.dumps(content, indent=1) + "\n"
    )  # last: it says that the rest is there
    return path


def _tensors() -> list[tuple[AttentionSide, str]]:
    return [(side, name) for side in ATTENTION_SIDES for name in ("means", "directions")]


def _write(table: pl.DataFrame, path: Path) -> None:
    with replacing(path) as temporary:
        table.write_parquet(temporary)


def load_sinks(folder: str | Path) -> Sinks:
    """Read what ``Sinks.save`` wrote."""
    path = Path(folder)
    content = _json(path / "sinks.json")
    if content.get("schema") != SCHEMA:
        raise InputError(
            f"{str(path / 'sinks.json')!r} has the schema {content.get('schema')!r}, not {SCHEMA!r}: it holds no sinks "
            "that this version can read. Make them again."
        )
    try:
        settings = dict(content["settings"])
        settings["sinks"] = tuple(settings["sinks"])
        heads, shares, model = content["heads"], content["directions"], dict(content["model"])
        tensors = _read_tensors(path / "signals.safetensors")
        means: dict[AttentionSide, MeanSignals] = {
            side: _means(side, heads[side], shares, tensors) for side in ATTENTION_SIDES
        }
        made = Settings(**settings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{str(path / 'sinks.json')!r} is damaged: {type(error).__name__} at {error}. Make the sinks again."
        ) from None
    tables = {name: _table(path / f"{name}.parquet") for name in TABLES}
    return Sinks(model=model, settings=made, means=means, **tables)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be read: {error.strerror}. Give the folder that was written with .save or --out."
        ) from None
    except (ValueError, RecursionError):
        raise InputError(f"{str(path)!r} is not JSON: it is damaged. Make the sinks again.") from None
    if not isinstance(content, dict):
        raise InputError(f"{str(path)!r} holds no JSON object: it is damaged. Make the sinks again.")
    return content


def _read_tensors(path: Path) -> Mapping[str, Tensor]:
    try:
        return load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise InputError(f"{str(path)!r} cannot be read: {error}. Make the sinks again.") from None


def _means(
    side: AttentionSide, heads: list[str], shares: list[dict[str, Any]], tensors: Mapping[str, Tensor]
) -> MeanSignals:
    explained = tuple(float(row["explained"]) for row in shares if row["side"] == side)
    means, directions = tensors[f"{side}.means"], tensors[f"{side}.directions"]
    if len(means) != len(heads) or len(directions) != len(explained):
        raise InputError(
            f"sinks.json names {len(heads)} heads on the {side} side, signals.safetensors has {len(means)}: the files "
            "do not belong together. Make the sinks again."
        )
    return MeanSignals(tuple(parse_head(name) for name in heads), means, directions, explained)


def _table(path: Path) -> pl.DataFrame:
    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(f"{str(path)!r} cannot be read: {error}. Make the sinks again.") from None
