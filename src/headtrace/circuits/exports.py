"""A circuit for other tools: networkx, GraphML, Graphviz, Neuronpedia; ``TEXTS`` has each format that is text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.circuits.files import dumps, to_json
from headtrace.circuits.graph import node_influence
from headtrace.circuits.summary import opposing, place, question
from headtrace.vocabulary import ATTENTION_SIDES
from headtrace.writing import write_text

if TYPE_CHECKING:
    import networkx as nx

    from headtrace.circuits.circuit import Circuit
    from headtrace.circuits.parts import Node


# -- networkx and GraphML ------------------------------------------------------------------------------------------


def to_networkx(circuit: Circuit) -> nx.MultiDiGraph[int]:
    """A directed multigraph whose attributes are the fields of nodes and edges."""
    import networkx as nx

    data = to_json(circuit)
    rest = {key: data[key] for key in data if key not in ("schema", "nodes", "edges")}
    graph: nx.MultiDiGraph[int] = nx.MultiDiGraph(
        model=circuit.model.name,
        prompt=circuit.prompt.text,
        question=question(circuit),
        method=circuit.method.name,
        headtrace=json.dumps(rest),  # with which `headtrace import` reads the graph again
    )
    for node in circuit.nodes:
        values = {key: value for key, value in asdict(node).items() if key != "id"}
        graph.add_node(node.id, name=node.name, token=circuit.token(node.dest), **values)
    for edge in circuit.edges:
        values = {key: value for key, value in asdict(edge).items() if key not in ("source", "target")}
        graph.add_edge(edge.source, edge.target, key=edge.side, **values)
    return graph


def networkx_text(circuit: Circuit) -> str:
    """JSON that ``networkx.node_link_graph(data, edges="edges")`` reads."""
    graph = to_networkx(circuit)
    data = {
        "directed": True,
        "multigraph": True,
        "graph": graph.graph,
        "nodes": [{"id": node, **values} for node, values in graph.nodes(data=True)],
        "edges": [
            {"source": source, "target": target, "key": key, **values}
            for source, target, key, values in graph.edges(keys=True, data=True)
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def graphml(graph: nx.MultiDiGraph[int]) -> str:
    """GraphML knows numbers and text only: lists and mappings become JSON, what is absent is left out.

    XML cannot hold control characters: they become replacement characters.
    """
    import networkx as nx

    def xml_text(text: str) -> str:
        return "".join(
            c if c in "\t\n\r" or (c >= " " and c not in "\ufffe\uffff") else "\ufffd" for c in text
        )

    for values in (
        graph.graph,
        *(v for _, v in graph.nodes(data=True)),
        *(v for *_, v in graph.edges(data=True)),
    ):
        for key in list(values):
            if values[key] is None:
                del values[key]
            elif isinstance(values[key], (dict, tuple, list)):
                values[key] = json.dumps(values[key])
            elif isinstance(values[key], str):
                values[key] = xml_text(values[key])
    return "\n".join(nx.generate_graphml(graph)) + "\n"


def to_graphml(circuit: Circuit, path: str | Path) -> Path:
    return write_text(path, graphml(to_networkx(circuit)))


# -- Graphviz --------------------------------------------------------------------------------------------------------

_SHAPES = {"head": "ellipse", "mlp": "box", "embedding": "house", "position": "house", "root": "doublecircle"}
"""Biases and rounding, which are always leaves, are diamonds."""
_STYLES = {
    "query": ("#0072b2", "solid"),
    "key": ("#d55e00", "dashed"),
    "value": ("#009e73", "solid"),
    "input": ("#cc79a7", "dotted"),
    "root": ("#555555", "bold"),
}


def to_dot(circuit: Circuit, path: str | Path | None = None) -> str:
    """The circuit in Graphviz's language, leaves at the bottom."""

    def quoted(value: str) -> str:
        text = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "")
        return f'"{text}"'.replace("\x00", "\ufffd")

    heaviest: dict[bool, float] = {}  # attention, and the unit of the root
    for edge in circuit.edges:
        unit = edge.side in ATTENTION_SIDES
        heaviest[unit] = max(heaviest.get(unit, 0.0), abs(edge.weight))
    lines = [
        "digraph circuit {",
        "  rankdir=BT;",
        f"  label={quoted(question(circuit))};",
        '  node [fontname="sans-serif"];',
    ]
    for node in circuit.nodes:
        label = question(circuit)
        if node.kind != "root":
            source = f" -> {circuit.token(node.src)}" if node.src is not None else ""
            label = f"{node.name}\n{circuit.token(node.dest)}{source}"
        lines.append(f"  n{node.id} [label={quoted(label)}, shape={_SHAPES.get(node.kind, 'diamond')}];")
    for edge in circuit.edges:
        colour, style = _STYLES[edge.side]
        share = abs(edge.weight) / (heaviest[edge.side in ATTENTION_SIDES] or 1.0)
        end, note = (", arrowhead=tee", ", opposing") if opposing(circuit, edge) else ("", "")
        lines.append(
            f"  n{edge.source} -> n{edge.target} [color={quoted(colour)}, style={style}{end}, "
            f"penwidth={0.5 + 3.5 * share:.3f}, tooltip={quoted(f'{edge.side} {edge.weight:.4g}{note}')}];"
        )
    text = "\n".join([*lines, "}", ""])
    if path is not None:
        write_text(path, text)
    return text


# -- Neuronpedia -----------------------------------------------------------------------------------------------------

_FEATURE_TYPES = {"head": "attention head", "root": "logit"}
"""Their words, where they are not ours."""


def to_neuronpedia(circuit: Circuit, path: str | Path | None, slug: str) -> dict[str, Any]:
    """Neuronpedia's attribution-graph JSON: metadata, qParams, nodes, links; written to ``path`` if one is given.

    Their schema knows features, embeddings and logits. A head becomes a node of its layer whose feature is its head
    index; every node says in its ``clerp`` (their word for a label) what it is here. Their ``influence`` is cumulative:
    a viewer that prunes at 0.8 keeps the nodes at or below 0.8, the most influential first.
    """
    own = node_influence(circuit)
    order = sorted((node.id for node in circuit.nodes), key=lambda i: (-own[i], i))
    whole = sum(own.values()) or 1.0
    cumulative = dict(zip(order, accumulate(own[i] for i in order), strict=True))
    nodes = {
        node.id: _neuronpedia_node(circuit, node, min(cumulative[node.id] / whole, 1.0))
        for node in circuit.nodes
    }
    data = {
        "metadata": {
            "slug": slug,
            "scan": circuit.model.name,
            "transcoder_list": [],
            "prompt_tokens": list(circuit.prompt.tokens),
            "prompt": circuit.prompt.text or "".join(circuit.prompt.tokens),
            "schema_version": 1,
            "info": {
                "description": circuit.summary(),
                "generator": {"name": "headtrace", "version": circuit.method.version or ""},
            },
            "generation_settings": {"method": circuit.method.name, "tau": circuit.method.tau},
            "headtrace": to_json(circuit),  # the whole circuit: `headtrace import` reads it again
        },
        "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
        "nodes": list(nodes.values()),
        "links": [
            {
                "source": nodes[edge.source]["node_id"],
                "target": nodes[edge.target]["node_id"],
                "weight": float(edge.weight),
                "side": edge.side,
            }
            for edge in circuit.edges
        ],
    }
    if path is not None:
        write_text(path, json.dumps(data, indent=1))
    return data


def _neuronpedia_node(circuit: Circuit, node: Node, influence: float) -> dict[str, Any]:
    position = circuit.root.position if node.kind == "root" else node.dest
    if position is None:
        position = len(circuit.prompt.tokens) - 1
    if node.kind in ("embedding", "position"):
        layer = "E"
    elif node.layer is not None:
        layer = str(node.layer)
    else:  # the root, and a bias of its own, are one layer above every component
        layer = str(max((each.layer for each in circuit.nodes if each.layer is not None), default=0) + 1)
    # The index of a feature: of a head its number, of the root its answer, of an embedding its token.
    feature = node.head
    if node.kind == "root":
        feature = next(iter(getattr(circuit.root, "answer", ())), None)
    elif node.kind == "embedding":
        feature = (circuit.prompt.token_ids or (None,) * len(circuit.prompt.tokens))[node.dest or 0]
    if node.kind in ("root", "embedding"):
        name = f"{layer}_{feature or 0}_{position}"
    elif node.kind == "head":
        name = f"{layer}_h{node.head}s{node.src}_{position}"
    else:
        name = f"{layer}_{node.kind}{'' if node.head is None else node.head}_{position}"
    return {
        "node_id": name,
        "feature": feature,
        "layer": layer,
        "ctx_idx": position,
        "feature_type": _FEATURE_TYPES.get(node.kind, node.kind.replace("_", " ")),
        "token_prob": 0.0,
        "is_target_logit": node.kind == "root",
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": name,
        "clerp": node.label or place(circuit, node),
        "influence": influence,
        "activation": node.attention,
    }


TEXTS: Mapping[str, Callable[[Circuit], str]] = {
    "json": dumps,
    "graphml": lambda circuit: graphml(to_networkx(circuit)),
    "networkx": networkx_text,
    "neuronpedia": lambda circuit: json.dumps(circuit.to_neuronpedia(), indent=1) + "\n",
    "dot": to_dot,
}
"""One circuit as text, by the name of the format; ``json`` is the circuit file."""
