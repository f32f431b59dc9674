"""Edge effects as flat rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headtrace.causal.report import EdgeEffect

_MEASURES = ("ablate_attention", "boost_attention", "ablate_metric", "boost_metric")
_RESIDUAL = ("cosine", "norm_ratio", "boost_cosine", "boost_norm_ratio")


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
