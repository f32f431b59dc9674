"""A project that uses headtrace as its README does. It is type-checked, strictly, against the installed wheel."""

from __future__ import annotations

import sys
from pathlib import Path

import headtrace
from headtrace.errors import InputError

PROMPT = "When Mary and John went to the store, John gave a drink to"


def traced(model: headtrace.Model, folder: Path) -> headtrace.Circuit:
    """A circuit, as a file and as a page, and the heads in it."""
    recording: headtrace.Recording = model.record(PROMPT)
    recording.check()
    answer, token, probability = recording.top_answers(1)[0]
    print(f"{answer!r} ({token}) with {probability:.0%} of {recording.logits.shape[-1]} tokens")
    tracer = headtrace.Tracer(model)
    circuit = tracer.trace(PROMPT, answer=" Mary", wrong=" John")
    why = tracer.explain(PROMPT, firing="L2H0:14:10")
    print(circuit.summary(), why)
    circuit.save(folder / "circuit.json")
    circuit.to_html(folder / "circuit.html")
    heads = {(node.layer, node.head) for node in circuit.nodes if node.kind == "head"}
    strongest = max(circuit.edges, key=lambda edge: abs(edge.weight))
    print(len(heads), strongest.side, strongest.channels)
    return headtrace.load_circuit(folder / "circuit.json")


def many(model: headtrace.Model, folder: Path) -> list[str]:
    """A run over a task, read back as tables and circuits."""
    task = headtrace.tasks.load_task("ioi", model.tokenizer, n_per_cell=1)
    run: headtrace.Run = headtrace.run(model, task, out=folder / "run")
    again = headtrace.open_run(folder / "run")
    columns: list[str] = again.edges.collect().columns
    first = next(iter(again.circuits()))
    network: headtrace.Network = headtrace.merge(run)
    families = headtrace.find_families(run, grain="edges")
    print(first.root.kind, network.prompts, families.labels)
    return columns


def more(model: headtrace.Model, circuit: headtrace.Circuit) -> None:
    """What else the pages show: tensors, tables, graphs, components by name."""
    recording = model.record(PROMPT)
    firing, attention = max(recording.strongest_firings(), key=lambda item: item[1])
    decomposed = model.decompose(recording, firing)
    print(attention, decomposed.sparseness, recording.residuals.shape, recording.tokens()[0])
    print(model.channels.at(0, 1).to_query.shape, recording.pattern(0).shape)
    print(float(recording.logits.max()), int(recording.token_ids[0, 0]))
    graph = circuit.to_networkx()
    names: list[str] = [node.name for node in circuit.nodes]
    print(graph.number_of_nodes(), names, circuit.model.name, circuit.prompt.tokens)
    root = (
        headtrace.circuits.LogitDifference(answer=circuit.root.answer)
        if circuit.root.kind == "linear"
        else None
    )
    again = headtrace.Tracer(model, method="acc", max_firings=5).trace(PROMPT, answer=" Mary", wrong=" John")
    print(root, headtrace.compare_signals(circuit, again, model))


def main(folder: Path) -> None:
    model = headtrace.load("builtin")
    layers: int = model.n_layers
    values = model.channels.singular_values
    print(layers, values.shape[0])
    circuit = traced(model, folder)
    report = headtrace.verify(circuit, model)
    error: float = report.max_prediction_error
    print(report.summary(), error)
    counterfactual = "When Anna and Tom went to the store, Emma gave a drink to"
    found = headtrace.sufficiency(circuit, model, counterfactual=counterfactual)
    print(found.summary(), found.cpr)
    print(many(model, folder))
    more(model, circuit)
    sinks: headtrace.Sinks = headtrace.find_sinks(model, [PROMPT])
    print(sinks)
    firing = headtrace.Firing.parse("L2H0:14:10")
    print(firing.layer, firing.head, firing.dest, firing.src)
    try:
        model.record("")
    except InputError as error_of_mine:
        print(error_of_mine)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
