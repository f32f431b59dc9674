"""Which commands there are. A command's module is imported, and its options are read, when the command is asked for.

The list of all commands, which ``headtrace --help`` shows, is stated here: no command is imported for it.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from headtrace.cli.failures import Commands

MARKUP = "rich"

COMMANDS: dict[str, tuple[str, str]] = {
    "models": ("models", "List supported architectures and names that are ready to load."),
    "info": (
        "models",
        "Show a model's shape: layers, heads, KV groups, norms, positions, softcaps, windows, memory.",
    ),
    "record": ("record", "Record one forward pass as components, and check that they sum exactly."),
    "decompose": ("decompose", "Decompose the attention score of a firing into the channels of its head."),
    "emerge": (
        "emerge",
        "Follow the same heads and token pairs through training: sparseness and n_recon per checkpoint.",
    ),
    "trace": (
        "trace",
        "Trace a prompt (or many) to its circuit: which signals cause the heads to attend where they do.",
    ),
    "explain": ("trace", "Why does this head attend here? The signals that cause one firing, side by side."),
    "run": (
        "run",
        "Trace many prompts, one circuit each, into a folder. Killed at any moment, the same command resumes it.",
    ),
    "runs": ("run", "What a run holds, how far it is, what failed and why."),
    "show": (
        "show",
        "Print a circuit as a tree: the root, its seeds, and under each firing the causes of its query and key.",
    ),
    "view": ("view", "Write circuits as one page (a single HTML file that needs no network) and open it."),
    "export": ("export", "Write circuits in the format of another tool."),
    "verify": ("verify", "Put a circuit to the test: PASS, FAIL or NOTHING TO VERIFY."),
    "sufficiency": (
        "sufficiency",
        "Keep only a circuit's head components, give all others what they had on a counterfactual prompt: what is "
        "left?",
    ),
    "intervene": (
        "intervene",
        "Change the signal of one edge in the running model: attention and metric before and after.",
    ),
    "edges": (
        "edges",
        "Ablate every edge into one head, in one circuit or many: does the weight say what the edge does?",
    ),
    "faithfulness": (
        "faithfulness",
        "Keep only the circuit's attention and see how much of the answer is left; then take away only the circuit.",
    ),
    "merge": (
        "merge",
        "Merge the circuits of many prompts into one network of components at roles, with how often each edge was "
        "found.",
    ),
    "families": (
        "families",
        "Group circuits by what they have in common: families, their representatives, what they agree with.",
    ),
    "signals": (
        "signals",
        "Compare what each head reads in two circuits or families: cosines of its summed query and key signals.",
    ),
    "compare": (
        "compare",
        "Compare circuits of several prompts, methods or checkpoints: shared nodes and edges, and those of one alone.",
    ),
    "sinks": (
        "sinks",
        "Attention sinks: how much they take of each head, the signals that send heads there, what is left without "
        "them.",
    ),
    "atlas": (
        "atlas",
        "What every head and channel attends to over a corpus: tables, and pages that open in a browser.",
    ),
    "tasks": ("tasks", "Prompts with known answers: list them, preview them, measure a model on them."),
    "toy": ("toy", "Watch singular vectors align with features, in small models whose features are known."),
    "interpret": (
        "interpret",
        "Put the signals of circuits into words, and test the words blind on pairs that the explainer did not see.",
    ),
    "serve": ("serve", "Explore a model in the browser: type a prompt, click an attention weight, see why."),
}
"""By name: the module of ``headtrace.cli`` that has it, and the first line of its help."""


class LazyCommands(MutableMapping[str, Any]):
    """All commands by name, each made when it is looked up."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            module, _ = COMMANDS[name]
            collected = typer.Typer(rich_markup_mode=MARKUP)
            import_module(f"headtrace.cli.{module}").register(collected)
            self._made = {**typer.main.get_group(collected).commands, **self._made}
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        raise TypeError("Commands are not taken away.")

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS | self._made)

    def __len__(self) -> int:
        return len(COMMANDS | self._made)

    def listed(self, name: str) -> Any:
        """What a list of commands needs of one: its name and the first line of its help."""
        if name in self._made or name not in COMMANDS:
            return self.get(name)
        return TyperCommand(name, help=COMMANDS[name][1])


class ListedCommands(Commands):
    """All commands, as they are listed; made where they are run."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.commands = self._lazy = LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What help, completion and suggestions need."""
        return self._lazy.listed(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self._lazy.get(args[0])
        return super().resolve_command(ctx, args)
