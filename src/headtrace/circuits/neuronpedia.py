"""Neuronpedia's attribution-graph JSON: metadata, qParams, nodes, links.

Their schema knows features, embeddings and logits. A head becomes a node of its layer whose feature is its
head index; every node says in its ``clerp`` (their word for a label) what it is here. Their ``influence`` is
cumulative: a viewer that prunes at 0.8 keeps the nodes at or below 0.8, the most influential first.
"""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.circuits.graph import node_influence
from headtrace.circuits.summary import place
from headtrace.writing import write_text

if TYPE_CHECKING:
    from headtrace.circuits.circuit import Circuit
    from headtrace.circuits.parts import Node

_FEATURE_TYPES = {"head": "attention head", "root": "logit"}
"""Their words, where they are not ours."""


def to_neuronpedia(circuit: Circuit, path: str | Path | None, slug: str) -> dict[str, Any]:
    """The graph as data; written to ``path`` as well if one is given."""
    influence = _cumulative_influence(circuit)
    names = {node.id: _node_id(circuit, node) for node in circuit.nodes}
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
        },
        "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
        "nodes": [_node(circuit, node, names[node.id], influence[node.id]) for node in circuit.nodes],
        "links": [
            {"source": names[e.source], "target": names[e.target], "weight": float(e.weight), "side": e.side}
            for e in circuit.edges
        ],
    }
    if path is not None:
        write_text(path, json.dumps(data, indent=1))
    return data


def _cumulative_influence(circuit: Circuit) -> dict[int, float]:
    own = node_influence(circuit)
    order = sorted((node.id for node in circuit.nodes), key=lambda i: (-own[i], i))
    whole = sum(own.values()) or 1.0
    return {
        i: min(total / whole, 1.0) for i, total in zip(order, accumulate(own[i] for i in order), strict=True)
    }


def _place(circuit: Circuit, node: Node) -> tuple[str, int]:
    """Layer and position; the root, and the bias that it has of its own, are one layer above every component."""
    position = circuit.root.position if node.kind == "root" else node.dest
    if position is None:
        position = len(circuit.prompt.tokens) - 1
    if node.kind == "embedding":
        return "E", position
    if node.layer is not None:
        return str(node.layer), position
    layers = [other.layer for other in circuit.nodes if other.layer is not None]
    return str(max(layers, default=0) + 1), position


def _feature(circuit: Circuit, node: Node) -> int | None:
    """The index of a feature: of a head its number, of the root its answer, of an embedding its token."""
    if node.kind == "root":
        return next(iter(getattr(circuit.root, "answer", ())), None)
    return circuit.prompt.token_ids[node.dest or 0] if node.kind == "embedding" else node.head


def _node_id(circuit: Circuit, node: Node) -> str:
    layer, position = _place(circuit, node)
    if node.kind in ("root", "embedding"):
        return f"{layer}_{_feature(circuit, node) or 0}_{position}"
    if node.kind == "head":
        return f"{layer}_h{node.head}s{node.src}_{position}"
    return f"{layer}_{node.kind}{'' if node.head is None else node.head}_{position}"


def _node(circuit: Circuit, node: Node, name: str, influence: float) -> dict[str, Any]:
    layer, position = _place(circuit, node)
    return {
        "node_id": name,
        "feature": _feature(circuit, node),
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
