"""A circuit for other tools: networkx, GraphML, Graphviz; and ``TEXTS``, every format that is text, by its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.circuits.files import dumps
from headtrace.circuits.summary import opposing, question
from headtrace.vocabulary import ATTENTION_SIDES
from headtrace.writing import write_text

if TYPE_CHECKING:
    import networkx as nx

    from headtrace.circuits.circuit import Circuit
    from headtrace.circuits.parts import Node

_SHAPES = {"head": "ellipse", "mlp": "box", "embedding": "house", "root": "doublecircle"}
"""Of biases and rounding, which are no more than leaves, each is a diamond."""
_STYLES = {
    "query": ("#0072b2", "solid"),
    "key": ("#d55e00", "dashed"),
    "value": ("#009e73", "solid"),
    "input": ("#cc79a7", "dotted"),
    "root": ("#555555", "bold"),
}


def to_networkx(circuit: Circuit) -> nx.MultiDiGraph[int]:
    """A directed multigraph whose attributes are the fields of nodes and edges."""
    import networkx as nx

    graph: nx.MultiDiGraph[int] = nx.MultiDiGraph(
        model=circuit.model.name,
        prompt=circuit.prompt.text,
        question=question(circuit),
        method=circuit.method.name,
    )
    for node in circuit.nodes:
        values = {key: value for key, value in asdict(node).items() if key != "id"}
        graph.add_node(node.id, name=node.name, token=circuit.token(node.dest), **values)
    for edge in circuit.edges:
        values = {key: value for key, value in asdict(edge).items() if key not in ("source", "target")}
        graph.add_edge(edge.source, edge.target, key=edge.side, **values)
    return graph


def to_graphml(circuit: Circuit, path: str | Path) -> Path:
    return write_text(path, graphml_text(circuit))


def graphml_text(circuit: Circuit) -> str:
    """The circuit as GraphML."""
    return graphml(to_networkx(circuit))


def graphml(graph: nx.MultiDiGraph[int]) -> str:
    """GraphML knows numbers and text only: lists and mappings become JSON, what is absent is left out."""
    import networkx as nx

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
                values[key] = _xml_text(values[key])
    return "\n".join(nx.generate_graphml(graph)) + "\n"


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


def _xml_text(text: str) -> str:
    """XML cannot hold control characters, nor half a surrogate pair."""
    return "".join(
        c
        if c in "\t\n\r" or (c >= " " and not "\ud800" <= c <= "\udfff" and c not in "\ufffe\uffff")
        else "\ufffd"
        for c in text
    )


def to_dot(circuit: Circuit, path: str | Path | None = None) -> str:
    """The circuit in Graphviz's language, leaves at the bottom."""
    heaviest: dict[bool, float] = {}  # attention, and the unit of the root
    for edge in circuit.edges:
        unit = edge.side in ATTENTION_SIDES
        heaviest[unit] = max(heaviest.get(unit, 0.0), abs(edge.weight))
    lines = [
        "digraph circuit {",
        "  rankdir=BT;",
        f"  label={_quoted(question(circuit))};",
        '  node [fontname="sans-serif"];',
    ]
    lines += [
        f"  n{node.id} [label={_quoted(_dot_label(circuit, node))}, shape={_SHAPES.get(node.kind, 'diamond')}];"
        for node in circuit.nodes
    ]
    for edge in circuit.edges:
        colour, style = _STYLES[edge.side]
        share = abs(edge.weight) / (heaviest[edge.side in ATTENTION_SIDES] or 1.0)
        end, said = (", arrowhead=tee", ", opposing") if opposing(edge) else ("", "")
        lines.append(
            f"  n{edge.source} -> n{edge.target} [color={_quoted(colour)}, style={style}{end}, "
            f"penwidth={0.5 + 3.5 * share:.3f}, tooltip={_quoted(f'{edge.side} {edge.weight:.4g}{said}')}];"
        )
    text = "\n".join([*lines, "}", ""])
    if path is not None:
        write_text(path, text.encode(errors="replace").decode())
    return text


def _dot_label(circuit: Circuit, node: Node) -> str:
    if node.kind == "root":
        return question(circuit)
    tokens = circuit.token(node.dest) + (f" -> {circuit.token(node.src)}" if node.src is not None else "")
    return f"{node.name}\n{tokens}"


def _quoted(value: Any) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "")
    return f'"{text}"'.replace("\x00", "\ufffd")


def _neuronpedia_text(circuit: Circuit) -> str:
    return json.dumps(circuit.to_neuronpedia(), indent=1) + "\n"


def _dot_text(circuit: Circuit) -> str:
    return to_dot(circuit).encode(errors="replace").decode()


TEXTS: Mapping[str, Callable[[Circuit], str]] = {
    "json": dumps,
    "graphml": graphml_text,
    "networkx": networkx_text,
    "neuronpedia": _neuronpedia_text,
    "dot": _dot_text,
}
"""One circuit as text, by the name of the format; ``json`` is the circuit file."""
