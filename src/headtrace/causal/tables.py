"""Edge effects as flat rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

    from headtrace.causal.report import EdgeEffect

_MEASURES = ("ablate_attention", "boost_attention", "ablate_metric", "boost_metric")
_RESIDUAL = ("cosine", "norm_ratio", "boost_cosine", "boost_norm_ratio")


def edge_table(effects: Sequence[EdgeEffect]) -> pl.DataFrame:
    """One row per edge; the columns are there even when no edge was measured."""
    import polars as pl

    schema: dict[str, Any] = {"source": pl.Int64, "target": pl.Int64}
    schema |= dict.fromkeys(("source_name", "target_name", "side"), pl.String)
    schema |= {"weight": pl.Float64, "channels": pl.List(pl.Int64), "attention": pl.Float64}
    schema |= dict.fromkeys(_MEASURES, pl.Float64)
    schema |= {f"control_{name}": pl.Float64 for name in _MEASURES}
    schema |= {f"controls_{name}": pl.List(pl.Float64) for name in _MEASURES}
    schema |= dict.fromkeys(_RESIDUAL, pl.Float64)
    return pl.DataFrame(edge_rows(effects), schema=schema)


def edge_rows(effects: Sequence[EdgeEffect]) -> list[dict[str, Any]]:
    """One row per edge; ``control_*`` is the mean over draws, ``controls_*`` holds every draw."""
    from headtrace.causal.report import mean

    rows: list[dict[str, Any]] = []
    for effect in effects:
        edge = effect.edge
        row: dict[str, Any] = {
            "source": edge.source,
            "target": edge.target,
            "source_name": effect.source,
            "target_name": effect.target,
            "side": edge.side,
            "weight": edge.weight,
            "channels": list(edge.channels or ()),
            "attention": effect.attention,
        }
        row |= {name: getattr(effect, name) for name in _MEASURES}
        row |= {f"control_{name}": mean(getattr(effect, f"control_{name}")) for name in _MEASURES}
        row |= {f"controls_{name}": list(getattr(effect, f"control_{name}")) for name in _MEASURES}
        row |= {name: getattr(effect, name) for name in _RESIDUAL}
        rows.append(row)
    return rows
