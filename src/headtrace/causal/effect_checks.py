"""Effects that an earlier verification wrote into a file, compared with those measured now."""

from __future__ import annotations

from collections.abc import Sequence

from headtrace.causal.checks import Checking
from headtrace.causal.effects import EdgeEffect, effect_record
from headtrace.causal.opening import edge_name
from headtrace.vocabulary import ATTENTION_SIDES

EVERYWHERE = ("cosine", "norm_ratio")
"""Effects that do not depend on how far an intervention reached."""
DRAWN = ("control_attention", "control_metric")
"""Effects of channels that were drawn at random: another draw gives others."""


def check_effects(check: Checking, effects: Sequence[EdgeEffect], reach: str, scope: str) -> None:
    """Effects are compared where the same edge is measured now, with the same reach and scope."""
    kept = [edge for edge in check.circuit.edges if edge.effect and edge.side in ATTENTION_SIDES]
    found = {(e.edge.source, e.edge.target, e.edge.side): e for e in effects}
    for edge in kept:
        now = found.get((edge.source, edge.target, edge.side))
        written = edge.effect or {}
        if now is None:
            check.ledger.skip("effects that the file has of edges which were not measured now (--edges all)")
            continue
        same = (written.get("reach"), written.get("scope")) == (reach, scope)
        if not same:
            check.ledger.skip(
                "effects that the file has of another reach or scope, or of one it does not name"
            )
        allowed = _allowed(check, now)
        for name, value in effect_record(now, reach, scope).items():
            old = written.get(name)
            if name not in allowed or not isinstance(value, float) or not isinstance(old, (int, float)):
                continue
            if same or name in EVERYWHERE:
                where = edge_name(check.circuit, edge)
                check.ledger.compare(
                    f"effect.{name}", where, in_file=old, measured=value, allowed=allowed[name]
                )
    if any((edge.effect or {}).get(name) is not None for edge in kept for name in DRAWN):
        check.ledger.skip("effects that the file has of channels drawn at random")


def _allowed(check: Checking, effect: EdgeEffect) -> dict[str, float]:
    """A change is a difference of two numbers; with a boost, logits may be twice as large."""
    row = check.row(check.circuit.node(effect.edge.target).site.firing)
    attention = 4 * check.tolerance.attention(row.size)
    size = check.root.size if check.root is not None else row.size
    metric = 4 * check.tolerance.number(size)
    return {
        "attention": attention,
        "boost_attention": attention,
        "metric": metric,
        "boost_metric": metric,
        "cosine": 4 * check.tolerance.relative,
        "norm_ratio": 4 * check.tolerance.number(effect.norm_ratio),
    }
