"""From JSON data to a Circuit: every value is checked, and an error names the field that is wrong.

edges[3].channels[0]: expected a non-negative integer, got "x"
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn, TypeVar, cast

from headtrace.circuits.circuit import Circuit
from headtrace.circuits.parts import (
    KINDS,
    SCHEMA,
    SIDES,
    Edge,
    Elsewhere,
    Method,
    ModelInfo,
    Node,
    Prompt,
    Root,
)
from headtrace.errors import InputError

T = TypeVar("T")
ROOTS = ("linear", "probability", "direction")
_PLACE = {
    "root": (),
    "head": ("layer", "head", "dest", "src"),
    "mlp": ("layer", "dest"),
    "embedding": ("dest",),
    "attention_bias": ("layer", "dest"),
    "offset": ("layer", "head", "dest"),
}


def circuit_from_json(data: Any) -> Circuit:
    """A circuit from the data of a circuit file."""
    if not isinstance(data, dict):
        _fail("", 'a JSON object with the key "schema"', data)
    if data.get("schema") != SCHEMA:
        raise InputError(
            f"schema: expected {SCHEMA!r}, got {_shown(data.get('schema'))}. Is it a circuit file, and is "
            "headtrace new enough to read it?"
        )
    top = _Object({key: value for key, value in data.items() if key != "schema"}, "", Circuit)
    circuit = Circuit(
        model=_model(top.child("model", ModelInfo)),
        prompt=_prompt(top.child("prompt", Prompt)),
        root=_root(top.child("root", Root)),
        method=_method(top.child("method", Method)),
        nodes=tuple(_node(child) for child in top.children("nodes", Node)),
        edges=tuple(_edge(child) for child in top.children("edges", Edge)),
        reason=top.get("reason", _text),
        influence_kept=top.get("influence_kept", _number),
        unexplained=top.get("unexplained", _list_of(_text)) or (),
    )
    check(circuit, data["nodes"], data["edges"])
    return circuit


def _model(item: _Object) -> ModelInfo:
    return ModelInfo(
        name=item.need("name", _text),
        revision=item.nullable("revision", _text),
        architecture=item.nullable("architecture", _text),
        weights_sha256=item.nullable("weights_sha256", _text),
    )


def _prompt(item: _Object) -> Prompt:
    prompt = Prompt(
        text=item.nullable("text", _text),
        token_ids=item.need("token_ids", _list_of(_integer)),
        tokens=item.need("tokens", _list_of(_text)),
    )
    if len(prompt.token_ids) != len(prompt.tokens):
        raise InputError(
            f"prompt.tokens: expected {len(prompt.token_ids)}, one per token id, got {len(prompt.tokens)}"
        )
    return prompt


def _root(item: _Object) -> Root:
    return Root(
        kind=item.need("kind", _one_of(ROOTS)),
        answer=item.need("answer", _list_of(_integer)),
        wrong=item.nullable("wrong", _list_of(_integer)),
        value=item.nullable("value", _number),
        position=item.get("position", _integer),
        layer=item.get("layer", _integer),
        support=item.get("support", _list_of(_integer)),
        answer_tokens=item.get("answer_tokens", _list_of(_text)),
        wrong_tokens=item.get("wrong_tokens", _list_of(_text)),
        label=item.get("label", _text),
    )


def _method(item: _Object) -> Method:
    return Method(
        name=item.need("name", _text),
        tau=item.nullable("tau", _number_or_text),
        ig_steps=item.nullable("ig_steps", _integer),
        version=item.nullable("version", _text),
        settings=item.get("settings", _scalars),
    )


def _node(item: _Object) -> Node:
    node = Node(
        id=item.need("id", _integer),
        kind=item.need("kind", _one_of(KINDS)),
        layer=item.nullable("layer", _integer),
        head=item.nullable("head", _integer),
        dest=item.nullable("dest", _integer),
        src=item.nullable("src", _integer),
        attention=item.nullable("attention", _number),
        influence=item.nullable("influence", _number),
        expanded=item.need("expanded", _flag),
        explained=item.need("explained", _flag),
        predicted=item.get("predicted", _numbers),
        threshold=item.get("threshold", _number),
        label=item.get("label", _text),
        elsewhere=item.get("elsewhere", _list_of(_elsewhere)),
    )
    for key in ("layer", "head", "dest", "src"):
        given, wanted = getattr(node, key) is not None, key in _PLACE[node.kind]
        if given != wanted:
            expected = f"an integer, since a node of kind {node.kind!r} has one" if wanted else "null"
            _fail(f"{item.path}.{key}", expected, getattr(node, key))
    return node


def _elsewhere(value: Any, path: str) -> Elsewhere:
    item = _Object(value, path, Elsewhere)
    return Elsewhere(
        layer=item.need("layer", _integer),
        head=item.need("head", _integer),
        src=item.need("src", _integer),
        channels=item.need("channels", _list_of(_integer)),
        weight=item.need("weight", _number),
    )


def _edge(item: _Object) -> Edge:
    return Edge(
        source=item.need("source", _integer),
        target=item.need("target", _integer),
        side=item.need("side", _one_of(SIDES)),
        weight=item.need("weight", _number),
        channels=item.nullable("channels", _list_of(_integer)),
        effect=item.get("effect", _scalars),
        description=item.get("description", _text),
    )


def check(circuit: Circuit, nodes: Sequence[Any], edges: Sequence[Any]) -> None:
    """What must hold between the parts: ids exist once, positions lie in the prompt, edges lead upwards."""
    length = len(circuit.prompt.tokens)
    known: dict[int, Node] = {}
    for i, raw in enumerate(nodes):
        if raw["id"] in known:
            raise InputError(f"nodes[{i}].id: {raw['id']} is already taken by another node")
        known[raw["id"]] = circuit.node(raw["id"])
        for key in ("dest", "src"):
            if raw[key] is not None and raw[key] >= length:
                _fail(f"nodes[{i}].{key}", f"a position below {length}, the length of the prompt", raw[key])
        if raw["src"] is not None and raw["src"] > raw["dest"]:
            _fail(f"nodes[{i}].src", f"a position at or before dest ({raw['dest']})", raw["src"])
    if len({node.name for node in circuit.nodes}) < len(circuit.nodes):
        names = [node.name for node in circuit.nodes]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"nodes: {twice!r} occurs more than once")
    taken: set[tuple[int, int, str]] = set()
    for i, raw in enumerate(edges):
        _check_edge(f"edges[{i}]", raw, known)
        identity = (raw["source"], raw["target"], raw["side"])
        if identity in taken:
            raise InputError(
                f"edges[{i}]: a second {raw['side']} edge from {raw['source']} to {raw['target']}"
            )
        taken.add(identity)


def _check_edge(path: str, raw: Mapping[str, Any], known: Mapping[int, Node]) -> None:
    for end in ("source", "target"):
        if raw[end] not in known:
            _fail(f"{path}.{end}", "the id of a node", raw[end])
    source, target = known[raw["source"]], known[raw["target"]]
    if target.kind not in ("head", "root"):
        _fail(f"{path}.target", "a head or the root", target.name)
    if (raw["side"] == "root") != (target.kind == "root"):
        _fail(f"{path}.side", '"root" for an edge to the root, "query" or "key" for any other', raw["side"])
    if source.kind == "root":
        _fail(f"{path}.source", "a component, not the root", raw["source"])
    layered = target.kind == "head" and source.kind not in ("embedding", "offset")
    if layered and (source.layer or 0) >= (target.layer or 0):
        _fail(f"{path}.source", f"a component below layer {target.layer}", source.name)


# One function per type: a value and its path in, the checked value out.


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _fail(path: str, expected: str, value: Any) -> NoReturn:
    raise InputError(f"{path + ': ' if path else ''}expected {expected}, got {_shown(value)}")


def _text(value: Any, path: str) -> str:
    return value if isinstance(value, str) else _fail(path, "text", value)


def _flag(value: Any, path: str) -> bool:
    return value if isinstance(value, bool) else _fail(path, "true or false", value)


def _integer(value: Any, path: str) -> int:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if good else _fail(path, "a non-negative integer", value)


def _number(value: Any, path: str) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else _fail(path, "a finite number", value)


def _number_or_text(value: Any, path: str) -> float | str:
    return value if isinstance(value, str) else _number(value, path)


def _one_of(choices: Sequence[str]) -> Callable[[Any, str], Any]:
    def read(value: Any, path: str) -> Any:
        return (
            value
            if isinstance(value, str) and value in choices
            else _fail(path, f"one of {', '.join(choices)}", value)
        )

    return read


def _list_of(read: Callable[[Any, str], T]) -> Callable[[Any, str], tuple[T, ...]]:
    def read_list(value: Any, path: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            _fail(path, "a list", value)
        return tuple(read(item, f"{path}[{i}]") for i, item in enumerate(cast("list[Any]", value)))

    return read_list


def _numbers(value: Any, path: str) -> dict[str, float | None]:
    items = _mapping(value, path).items()
    return {key: None if item is None else _number(item, f"{path}.{key}") for key, item in items}


def _scalars(value: Any, path: str) -> dict[str, Any]:
    for key, item in _mapping(value, path).items():
        if isinstance(item, float):
            _number(item, f"{path}.{key}")
        elif not (item is None or isinstance(item, (bool, int, str))):
            _fail(f"{path}.{key}", "a number, text, true, false or null", item)
    return value


def _mapping(value: Any, path: str) -> dict[str, Any]:
    return value if isinstance(value, dict) else _fail(path, "a JSON object", value)


class _Object:
    """A JSON object that knows its path and refuses keys that its dataclass does not have."""

    def __init__(self, value: Any, path: str, shape: type) -> None:
        self.value, self.path = _mapping(value, path), path
        allowed = [field.name for field in fields(shape)]
        for key in self.value:
            if key not in allowed:
                raise InputError(f"{self.at(key)}: unknown key; expected one of {', '.join(allowed)}")

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def need(self, key: str, read: Callable[[Any, str], T]) -> T:
        """A key that must be there, with a value."""
        if key not in self.value:
            raise InputError(f"{self.at(key)}: missing")
        return read(self.value[key], self.at(key))

    def nullable(self, key: str, read: Callable[[Any, str], T]) -> T | None:
        """A key that must be there and may be null."""
        return self.need(key, lambda value, path: None if value is None else read(value, path))

    def get(self, key: str, read: Callable[[Any, str], T]) -> T | None:
        """A key that may be absent."""
        return self.nullable(key, read) if key in self.value else None

    def child(self, key: str, shape: type) -> _Object:
        return self.need(key, lambda value, path: _Object(value, path, shape))

    def children(self, key: str, shape: type) -> tuple[_Object, ...]:
        return self.need(key, _list_of(lambda value, path: _Object(value, path, shape)))
