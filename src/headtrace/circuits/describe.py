"""The documentation of the circuit file, made from the types that read and write it.

    python -m headtrace.circuits.describe > docs/reference/circuit-file.md

>>> describe_schema().splitlines()[0]
'# The circuit file'
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from headtrace.circuits.circuit import Circuit
from headtrace.circuits.files import SCHEMA, dumps
from headtrace.circuits.parts import (
    ComparedPrompt,
    CompetingKeySignal,
    DifferenceInfo,
    Edge,
    Evidence,
    EvidenceExample,
    MethodInfo,
    ModelInfo,
    Neuron,
    Node,
    PromptInfo,
)
from headtrace.roots import ROOTS, LogitDifference
from headtrace.validation import defaults
from headtrace.vocabulary import SIDES_OF

_PAGE = """\
# The circuit file

<!-- Made by `python -m headtrace.circuits.describe`: to change it, change the docstrings it is made from. -->

A circuit file says why a model answered a prompt as it did: which components cause the answer (the nodes), and which
signals between them made the heads attend where they did (the edges). It is JSON, schema `{schema}`,
with one node or edge per line, so that a diff of two files is readable. The same circuit always gives the same bytes.
The [glossary](glossary.md) defines the terms.

```python
import headtrace
from headtrace.circuits.describe import example

example().save("c.json")  # the small one below; circuits of your own: headtrace trace ... --out c.json
circuit = headtrace.load_circuit("c.json")
```

A small circuit:

```json
{example}```

Loading checks every value, and an error names the wrong field:
`edges[3].channels[0]: expected a valid integer, got "x"`. Numbers must be finite, counts and ids must not be negative,
and text must not contain lone surrogates. A key that is not listed here, or occurs twice, is refused. In the tables,
"yes" marks keys that are in every file; the others are written only if they have something to say.

{sections}
## What holds between them

- Every id is unique, and so is every component at its position. Edges join nodes that exist; two nodes have at most
  one edge per side.
- Positions (`dest`, `src`, `position`) are positions of the prompt, counted from 0. A head reads no token after its
  own.
- These kinds of nodes can have incoming edges, on these sides: {sides}.
- An edge goes from a lower layer to a higher one; within a layer, attention comes before the mlp. Embeddings,
  positions, offsets and roundings can be read anywhere. The source of a query or mlp edge is at the target's `dest`,
  the source of a key or value edge at its `src`. In a difference circuit, keys are read at every token
  that `dest` can attend to.
- In a difference circuit (one that has `difference`), weights are flows on every side, in the unit of the root. A
  node's `flow` is everything that flows into it, including edges that are not shown.
- Only an edge with a `description` has `evidence`, supported words have a p-value, and `src` and `dest` of an example
  are numbers of its pieces.
- A circuit without edges has a `reason` that says why it is empty.

## Versions

This is version 2. In version 1, `headtrace.circuit/1`, all roots had one form, and there were no `heads` roots, no
`value` and `input` sides, no `rounding` and no contributions.

Files of version 1 still load, and are saved as version 2:

- a `linear` root that stood for the attention of heads becomes a `heads` root;
- a `direction` keeps its layer, position and label, but has no `vector`, which version 1 did not store;
- a `probability` keeps its `support`;
- the list `unexplained` is dropped, because nodes have this information: `expanded` and not `explained` (in Python,
  `circuit.unexplained`).

## Other formats

`headtrace.circuits.write_parquet(circuits, path)` writes many circuits into one Parquet table, one row per edge, and
`read_parquet(path)` reads it ([how to](../how-to/trace-many-prompts.md)). Rows name their circuit by
`circuit.content_id`, a hash of its content; an incomplete circuit is refused. `circuit.to_networkx()`,
`.to_graphml(path)`, `.to_dot()` and `.to_neuronpedia()` export to [other tools](../how-to/other-tools.md).
"""

_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}


def describe_schema() -> str:
    """The page on the circuit file, in Markdown."""
    sections = [
        _section("The file", Circuit, "The keys of the file, besides `schema`."),
        *(_section(f"`{key}`", shape) for key, shape in _PARTS.items()),
        "## `root`\n\nWhat is explained. Its `kind` is one of these, each with keys of its own.\n",
        *(_section(f"`{kind}`", shape, level=3) for kind, shape in ROOTS.items()),
        *(_section(f"`{key}`", shape) for key, shape in _GRAPH.items()),
    ]
    sides = "; ".join(
        f"{kind}: {', '.join(f'`{side}`' for side in sides)}" for kind, sides in SIDES_OF.items()
    )
    return _PAGE.format(schema=SCHEMA, example=dumps(example()), sections="\n".join(sections), sides=sides)


_PARTS = {
    "model": ModelInfo,
    "prompt": PromptInfo,
    "method": MethodInfo,
    "difference": DifferenceInfo,
    "prompts": ComparedPrompt,
}
_GRAPH = {
    "nodes": Node,
    "elsewhere": CompetingKeySignal,
    "neurons": Neuron,
    "edges": Edge,
    "evidence": Evidence,
    "examples": EvidenceExample,
}


def example() -> Circuit:
    """A circuit small enough to be read: one head, and the mlp that made its query."""
    return Circuit(
        ModelInfo("made-up", None, "llama", None),
        PromptInfo("Mary told", (36, 5390), ("Mary", " told")),
        LogitDifference((36,), (42,), value=2.5, position=1, answer_tokens=("Mary",), wrong_tokens=("John",)),
        MethodInfo("acc++", "min(0.9, 2.5 / visible keys)", 64, "0.1.0"),
        nodes=(
            Node(0, "root", influence=1.0),
            Node(
                1,
                "head",
                9,
                6,
                1,
                0,
                0.75,
                influence=1.0,
                expanded=True,
                predicted={"query": 0.2, "key": None},
            ),
            Node(2, "mlp", 3, dest=1, influence=1.0),
        ),
        edges=(Edge(1, 0, "root", 2.5), Edge(2, 1, "query", 0.3, (1, 4))),
        influence_kept=1.0,
    )


def _section(title: str, shape: type, text: str | None = None, level: int = 2) -> str:
    docs, hints = field_docs(shape), get_type_hints(shape)
    always = {name: default is MISSING for name, default in defaults(shape).items()}
    rows = [
        f"| `{name}` | {_value(hints[name], always[name])} | {'yes' if always[name] else ''} | {docs[name]} |"
        for name in docs
    ]
    head = ["| key | value | in every file | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([f"{'#' * level} {title}", "", text or _text(shape.__doc__), "", *head, *rows, ""])


def _text(docstring: str | None) -> str:
    return inspect.cleandoc(docstring or "").replace("``", "`")


def field_docs(shape: type) -> dict[str, str]:
    """The docstring under each field of a class, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(shape))).body[0].body  # type: ignore[attr-defined]
    docs: dict[str, str] = {}
    for statement, following in pairwise(body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(_text(text).split())
            case _:
                pass
    return docs


def _value(annotation: Any, nullable: bool = True) -> str:
    """A type in words; what may be left out need not say that it may be null."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is tuple:
        item = _value(inner[0])
        return f"list of {item if item == 'text' or item.startswith('list') else item + 's'}"
    if origin is Mapping:
        return f"object with values: {_value(inner[1])}"
    if origin in (Union, UnionType):
        kinds = dict.fromkeys(_value(each) for each in inner if nullable or each is not type(None))
        *most, last = kinds
        return f"{', '.join(most)} or {last}" if most else last
    return "object" if is_dataclass(annotation) else _TYPES[annotation]


if __name__ == "__main__":
    print(describe_schema(), end="")  # noqa: T201
