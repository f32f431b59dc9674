"""Circuit files of earlier versions, brought up to the present one: data in, data out."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from headtrace.errors import InputError, shown
from headtrace.roots import ROOTS
from headtrace.validation import fail

SCHEMA = "headtrace.circuit/2"
_FIRST = "headtrace.circuit/1"
_ROOT_OF_FIRST = (
    *("kind", "answer", "wrong", "value", "position"),
    *("layer", "support", "answer_tokens", "wrong_tokens", "label"),
)
_HEADS = "attention of "


def upgrade(data: Any) -> dict[str, Any]:
    """The data of a circuit file as the present version has it, without the key ``schema``."""
    if not isinstance(data, dict):
        fail("", 'a JSON object with the key "schema"', data)
    schema = data.get("schema")
    if schema not in (SCHEMA, _FIRST):
        raise InputError(
            f"schema: expected {SCHEMA!r} or {_FIRST!r}, got {shown(schema)}. Is it a circuit file, and is headtrace "
            "new enough to read it?"
        )
    rest = {key: value for key, value in data.items() if key != "schema"}
    return rest if schema == SCHEMA else _from_first(rest)


def _from_first(data: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had one form of root for all kinds, and kept the names of unexplained firings beside the nodes."""
    unexplained = data.get("unexplained") or []
    if not isinstance(unexplained, list) or not all(isinstance(name, str) for name in unexplained):
        fail("unexplained", "a list of text", unexplained)
    rest = {key: value for key, value in data.items() if key != "unexplained"}
    return rest | {"root": _root_from_first(data["root"])} if isinstance(data.get("root"), dict) else rest


def _root_from_first(root: dict[str, Any]) -> dict[str, Any]:
    kind, label = root.get("kind"), root.get("label")
    if kind == "linear" and isinstance(label, str) and label.startswith(_HEADS):
        root = root | {"kind": "heads", "heads": label.removeprefix(_HEADS).split(", ")}
    if kind == "probability":
        root = root | {"wrong": None}
    kind = root.get("kind")
    if not isinstance(kind, str) or kind not in ROOTS:
        return root
    kept = {field.name for field in fields(ROOTS[kind])}
    return {key: value for key, value in root.items() if key in kept or key not in _ROOT_OF_FIRST}
