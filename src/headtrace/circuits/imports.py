"""Circuits of other tools, read as circuits: what they lack stays empty.

``imported`` reads, by what a file holds:

- GraphML and JSON of ACC and accpp-tracer. A node is named ``(layer, head or kind, destination, source)``, an edge has
  ``type`` d (through the destination: the query) or s (through the source: the key), a weight, and, in accpp-tracer's,
  the singular vectors that carry it (``svs_used``).
- A Parquet table of such edges, one row each: ``model``, ``task``, ``prompt``, ``source``, ``target``, ``type``,
  ``weight``.
- Neuronpedia's attribution graphs. Features of one layer and token are one MLP here, and so is what its transcoder
  leaves over: their edges are added up. The root is the target logit; other logits are left out.
- What ``headtrace export`` writes as GraphML, networkx JSON or for Neuronpedia: the circuit itself.

ACC's graphs name places by roles or token texts, not by positions. They get positions in an order that fits who attends
to whom; a role that stands for tokens before and after another appears twice ("punct (earlier)"). Token ids are not
known, so that nothing that needs the model works on such circuits (`verify` says so), and everything else does.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from headtrace.circuits.circuit import Circuit
from headtrace.circuits.files import SCHEMA, from_json
from headtrace.circuits.parts import Edge, MethodInfo, ModelInfo, Node, PromptInfo
from headtrace.circuits.rows import column_types
from headtrace.errors import InputError
from headtrace.roots import Direction
from headtrace.validation import parse
from headtrace.vocabulary import Kind, Side

TABLE = ("model", "task", "prompt", "source", "target", "type", "weight")
"""The columns of a table of ACC's edges."""
SIDES: Mapping[str, Side] = {"d": "query", "s": "key"}
KINDS: Mapping[str, Kind] = {
    "MLP": "mlp",
    "AH bias": "attention_bias",
    "AH offset": "offset",
    "Embedding": "embedding",
}
"""ACC's words for what is no head."""
FROM = "imported_from"
"""The setting of a circuit's method that says where it was read."""


def imported(
    path: str | Path, *, model: str | None = None, where: Mapping[str, str] | None = None
) -> list[Circuit]:
    """The circuits in a file of another tool; ``model`` names the model where the file does not.

    ``where`` chooses rows of a table: ``{"model": "gpt2-small", "task": "ioi"}``.

    >>> import tempfile
    >>> from headtrace.circuits.describe import example
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     imported(example().to_graphml(f"{folder}/c.graphml")) == [example()]
    True
    """
    file = Path(path)
    try:
        if file.suffix.lower() == ".parquet":
            return _of_table(file, where or {})
        if where:
            raise InputError("where chooses rows of a Parquet table, and this is one circuit.")
        text = file.read_text(encoding="utf-8")
        if file.suffix.lower() in (".graphml", ".xml") or text.lstrip().startswith("<"):
            return [_of_graphml(text, file.stem, model)]
        return [_of_json(parse(text), file.stem, model)]
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}. Check the path.") from None
    except UnicodeDecodeError:
        raise InputError(f"{str(path)!r} is not text, and its name is not that of a Parquet file.") from None


# -- ACC and accpp-tracer --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Name:
    """A node's name: ``(9, 6, 'end', 'IO')``, ``(0, 'MLP', 'S2', 'S2')``, or the root ``('IO-S direction', 'end')``."""

    layer: int | None
    what: int | str
    dest: str
    src: str

    @classmethod
    def read(cls, text: str) -> _Name:
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            found = None
        match found:
            case (str(root), str(dest)):
                return cls(None, root, dest, dest)
            case (int(layer), int(head), str(dest), str(src)) if layer >= 0 and head >= 0:
                return cls(layer, head, dest, src)
            case (int(layer), str(kind), str(dest), str(src)) if layer >= 0 and kind in KINDS:
                return cls(layer, kind, dest, src)
            case _:
                raise InputError(
                    f"{text[:80]!r} is not a node of ACC: expected (layer, head, destination, source), with "
                    f"{', '.join(map(repr, KINDS))} in place of a head, or (name of the root, destination)."
                )


@dataclass(frozen=True)
class _Link:
    """An edge between named nodes."""

    source: str
    target: str
    type: str
    weight: float
    channels: tuple[int, ...] | None = None


def _of_links(
    links: Sequence[_Link],
    attention: Mapping[str, float],
    names: Iterable[str],
    info: ModelInfo,
    settings: Mapping[str, Any],
) -> Circuit:
    """One circuit of ACC's edges."""
    ends = [name for link in links for name in (link.source, link.target)]
    read = {name: _Name.read(name) for name in dict.fromkeys([*names, *ends])}
    roots = [name for name, each in read.items() if each.layer is None]
    if len(roots) != 1:
        raise InputError(f"expected one root such as ('IO-S direction', 'end'), found {len(roots)}")
    tokens, place = _places([each for each in read.values() if each.layer is not None], read[roots[0]].dest)
    expanded = {link.target for link in links}
    nodes: dict[tuple[Kind, int | None, int | None, int | None, int | None], Node] = {}

    def node(
        kind: Kind,
        layer: int | None = None,
        head: int | None = None,
        dest: int | None = None,
        src: int | None = None,
        **more: Any,
    ) -> int:
        site = (kind, layer, head, dest, src)
        if site not in nodes:
            nodes[site] = Node(len(nodes), *site, **more)
        return nodes[site].id

    ids = {roots[0]: node("root")}
    for name, each in read.items():
        if each.layer is None or each.what == "AH offset":
            continue
        dest, src = place(each.dest, each.src)
        if isinstance(each.what, int):
            ids[name] = node(
                "head",
                each.layer,
                each.what,
                dest,
                src,
                attention=attention.get(name),
                expanded=name in expanded,
            )
        elif each.what == "Embedding":
            ids[name] = node("embedding", None, None, dest)
        else:
            ids[name] = node(KINDS[each.what], each.layer, None, dest)
    edges: dict[tuple[int, int, Side], Edge] = {}
    for link in links:
        target, writer = read[link.target], read[link.source]
        side = _side(link, target)
        if writer.what == "AH offset":  # the bias of the head that reads it
            head = target.what if isinstance(target.what, int) else None
            source = node("offset", target.layer, head, place(writer.dest, writer.dest)[0])
        else:
            source = ids[link.source]
        key = (source, ids[link.target], side)
        if key in edges or link.source == roots[0]:
            raise InputError(f"an edge from {link.source} to {link.target} is impossible, or occurs twice")
        edges[key] = Edge(source, ids[link.target], side, link.weight, link.channels)
    layer = 1 + max((each.layer for each in read.values() if each.layer is not None), default=-1)
    return Circuit(
        info,
        PromptInfo(None, (), tokens),
        Direction(layer, label=str(read[roots[0]].what), position=len(tokens) - 1),
        MethodInfo("acc", settings=dict(settings)),
        tuple(nodes.values()),
        tuple(edges.values()),
        reason=None if edges else "the imported file has no edges",
    )


def _side(link: _Link, target: _Name) -> Side:
    if target.layer is None:
        return "root"
    if link.type not in SIDES:
        raise InputError(f"an edge has the type {link.type!r}: expected d (destination) or s (source)")
    return SIDES[link.type]


def _places(names: Sequence[_Name], end: str) -> tuple[tuple[str, ...], Any]:
    """Tokens in an order in which sources come before destinations, and the positions of a destination and its source.

    A role may stand for several tokens, so that two roles attend to each other: then the later one gets a second place
    at the beginning, where it is a source.
    """
    before: dict[str, dict[str, None]] = {end: {}}  # dictionaries keep the order in which they are filled
    for each in names:
        before.setdefault(each.src, {})
        before.setdefault(each.dest, {})
        if each.src != each.dest and each.src != end:
            before[each.dest][each.src] = None
    order: list[str] = []
    while before:
        try:
            order += list(TopologicalSorter(before).static_order())
            break
        except CycleError as error:  # leave one of the circle's wishes unheard
            circle: list[str] = error.args[1]
            del before[circle[1]][circle[0]]
    order = [*[label for label in order if label != end], end]
    position = {label: i for i, label in enumerate(order)}
    early = list(dict.fromkeys(each.src for each in names if position[each.src] > position[each.dest]))
    again = {label: i for i, label in enumerate(early)}

    def place(dest: str, src: str) -> tuple[int, int]:
        at, of = position[dest] + len(early), position[src] + len(early)
        return at, of if of <= at else again[src]

    return (*(f"{label} (earlier)" for label in early), *order), place


def _of_table(path: Path, where: Mapping[str, str]) -> list[Circuit]:
    import polars as pl

    try:
        table = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(f"it is not a Parquet table: {error}") from None
    if "circuit:model" in table.columns or "source_kind" in table.columns:
        raise InputError("it is a table of headtrace's own circuits: it needs no import")
    absent = [name for name in TABLE if name not in table.columns]
    if absent:
        raise InputError(f"the table has no column {absent[0]!r}; expected {', '.join(TABLE)}")
    if table.is_empty():
        raise InputError("the table has no rows")
    for name, value in where.items():
        if name not in TABLE[:3]:
            raise InputError(f"where chooses by {', '.join(TABLE[:3])}, not by {name!r}")
        chosen = table.filter(pl.col(name).cast(pl.String) == value)
        if chosen.is_empty():
            there = table[name].cast(pl.String).unique().sort().to_list()
            more = f" and {len(there) - 8} more" if len(there) > 8 else ""
            raise InputError(f"no row has {name}={value}: expected {', '.join(map(str, there[:8]))}{more}")
        table = chosen
    circuits: list[Circuit] = []
    for (model, task, prompt), rows in table.group_by("model", "task", "prompt", maintain_order=True):
        links = [_Link(*row) for row in rows.select("source", "target", "type", "weight").iter_rows()]
        settings = {FROM: path.name, "task": str(task), "prompt": str(prompt)}
        circuits.append(_of_links(links, {}, [], ModelInfo(str(model)), settings))
    return circuits


def _of_graphml(text: str, stem: str, model: str | None) -> Circuit:
    import networkx as nx

    try:
        graph: Any = nx.parse_graphml(text, force_multigraph=True)
    except Exception as error:  # whatever the XML reader raises
        raise InputError(f"it is not GraphML: {str(error)[:200]}") from None
    if "headtrace" in graph.graph:
        nodes = [(name, dict(values)) for name, values in graph.nodes(data=True)]
        edges = [(source, target, dict(values)) for source, target, values in graph.edges(data=True)]
        return _own(parse(graph.graph["headtrace"]), nodes, edges)
    links = [
        _Link(
            str(source),
            str(target),
            str(values.get("type", "")),
            _number(values.get("weight"), "weight"),
            _channels(values.get("svs_used")),
        )
        for source, target, values in graph.edges(data=True)
    ]
    attention = {
        str(name): float(values["attn_weight"])
        for name, values in graph.nodes(data=True)
        if "attn_weight" in values
    }
    info = ModelInfo(model or str(graph.graph.get("model", "unknown")))
    return _of_links(links, attention, map(str, graph.nodes), info, {FROM: stem})


def _of_json(data: Any, stem: str, model: str | None) -> Circuit:
    if not isinstance(data, dict):
        raise InputError("expected a JSON object")
    if str(data.get("schema", "")).startswith("headtrace.circuit/"):
        return from_json(data)
    if "links" in data and "metadata" in data:
        return _of_neuronpedia(data, stem, model)
    graph = data.get("graph")
    if isinstance(graph, dict) and "headtrace" in graph:
        nodes = [(str(node.pop("id")), node) for node in data["nodes"]]
        edges = [(str(edge.pop("source")), str(edge.pop("target")), edge) for edge in data["edges"]]
        return _own(parse(graph["headtrace"]), nodes, edges)
    nodes, edges = data.get("nodes"), data.get("edges")
    if not isinstance(nodes, dict) or not isinstance(edges, list):
        raise InputError(
            "it is not a circuit that headtrace can read: expected a circuit file, Neuronpedia's metadata and "
            "links, or accpp-tracer's nodes (by name) and edges"
        )
    try:
        links = [
            _Link(
                str(edge["u"]),
                str(edge["v"]),
                str(edge.get("type", "")),
                _number(edge.get("weight"), "weight"),
                _channels(edge.get("svs_used")),
            )
            for edge in edges
        ]
        attention = {str(name): float(v["attn_weight"]) for name, v in nodes.items() if "attn_weight" in v}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"an edge or a node is not as accpp-tracer writes it: {error!r}") from None
    return _of_links(links, attention, map(str, nodes), ModelInfo(model or "unknown"), {FROM: stem})


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(f"the {what} of an edge is {value!r}: expected a number") from None


def _channels(text: Any) -> tuple[int, ...] | None:
    if text in (None, "", "None"):
        return None
    try:
        return tuple(int(channel) for channel in (ast.literal_eval(text) if isinstance(text, str) else text))
    except (ValueError, SyntaxError, TypeError):
        raise InputError(f"svs_used is {text!r}: expected a list of numbers") from None


# -- what headtrace exports ------------------------------------------------------------------------------------------


def _own(
    rest: Any, nodes: Sequence[tuple[str, dict[str, Any]]], edges: Sequence[tuple[str, str, dict[str, Any]]]
) -> Circuit:
    """A circuit from its own export: nodes and edges as the graph has them now, and the rest as it was written."""

    def fields(shape: type, values: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, kind in column_types(shape).items():
            value = values.get(name)
            if value is None:
                continue
            listed = isinstance(value, str) and (kind is None or "list" in str(kind))
            found[name] = parse(value) if listed else value
        return found

    data = dict(rest)
    data["nodes"] = [fields(Node, values) | {"id": int(name)} for name, values in nodes]
    data["edges"] = [
        fields(Edge, values) | {"source": int(source), "target": int(target)}
        for source, target, values in edges
    ]
    return from_json({"schema": SCHEMA, **data})


# -- Neuronpedia -----------------------------------------------------------------------------------------------------


def _of_neuronpedia(data: Mapping[str, Any], stem: str, model: str | None) -> Circuit:
    metadata = data["metadata"]
    if isinstance(metadata, dict) and "headtrace" in metadata:
        return from_json(metadata["headtrace"])
    try:
        tokens = tuple(map(str, metadata["prompt_tokens"]))
        found = {node["node_id"]: node for node in data["nodes"]}
        target = _target_logit(found.values())
        nodes: dict[tuple[Kind, int | None, int | None], Node] = {("root", None, None): Node(0, "root")}
        ids: dict[str, int] = {target["node_id"]: 0}
        features: dict[int, int] = defaultdict(int)
        for name, node in found.items():
            kind = str(node.get("feature_type", ""))
            if kind == "logit":
                continue
            at: tuple[Kind, int | None, int | None] = (
                ("embedding", None, int(node["ctx_idx"]))
                if kind == "embedding"
                else ("mlp", int(node["layer"]), int(node["ctx_idx"]))
            )
            known = nodes.get(at)
            if known is None:
                known = nodes[at] = Node(len(nodes), at[0], at[1], None, at[2])
            ids[name] = known.id
            features[known.id] += kind != "embedding"
        weights: dict[tuple[int, int], float] = defaultdict(float)
        for link in data["links"]:
            source, into = ids.get(link["source"]), ids.get(link["target"])
            if source is not None and into is not None and source != into:
                weights[source, into] += float(link["weight"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"it is not as Neuronpedia writes it: {error!r} is missing or wrong") from None
    by_id = {node.id: node for node in nodes.values()}
    edges = tuple(
        Edge(source, into, "root" if into == 0 else "input", weight)
        for (source, into), weight in weights.items()
    )
    expanded = {edge.target for edge in edges}
    parts = tuple(
        node if node.kind != "mlp" else Node(
            node.id, "mlp", node.layer, None, node.dest, expanded=node.id in expanded,
            label=f"{features[node.id]} features" if features[node.id] > 1 else None,
        )
        for node in by_id.values()
    )  # fmt: skip
    layer = 1 + max((node.layer for node in parts if node.layer is not None), default=-1)
    label = str(target.get("clerp") or target["node_id"])
    name = model or str(metadata.get("scan") or "unknown")
    return Circuit(
        ModelInfo(name),
        PromptInfo(str(metadata["prompt"]) if metadata.get("prompt") else None, (), tokens),
        Direction(layer, label=label, position=int(target["ctx_idx"])),
        MethodInfo("attribution graph", settings={FROM: stem}),
        parts,
        edges,
        reason=None if edges else "the imported graph has no links to its target logit",
    )


def _target_logit(nodes: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    logits = [node for node in nodes if node.get("feature_type") == "logit"]
    if not logits:
        raise InputError("the graph has no logit")
    return max(
        logits, key=lambda node: (bool(node.get("is_target_logit")), float(node.get("token_prob") or 0))
    )
