"""The ``headtrace`` command and the list of all commands.

A command is a function of its name in a module of this package, imported when the command is used: ``headtrace --help``
imports none of them. Its help is its line in the list, then its docstring.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from importlib import import_module
from inspect import cleandoc
from keyword import iskeyword
from typing import Any

import typer
from typer.core import TyperCommand

from headtrace import __version__
from headtrace.cli.failures import DEBUG, Commands
from headtrace.cli.output import tolerate_few_characters

MARKUP = "rich"

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "One prompt": {
        "why": (
            "why",
            "Why does the model answer this? One sentence, its steps, and the answer without each step.",
        ),
        "matters": (
            "why",
            "Which words of a prompt matter? Replace each by similar ones and measure the answer.",
        ),
        "trace": (
            "trace",
            "Trace the circuit of a prompt (or many): which signals make heads attend where they do.",
        ),
        "explain": (
            "trace",
            "Why does this head attend here? The signals on the query side and on the key side.",
        ),
        "decompose": ("channels", "Decompose an attention score into the singular channels of its head."),
        "record": ("models", "Record one forward pass as components, and check that they sum exactly."),
        "show": (
            "circuits",
            "Print a circuit as a tree: the root, the heads that cause it, and why each of them attends.",
        ),
        "view": (
            "circuits",
            "Write circuits as one page (a single HTML file that needs no network) and open it.",
        ),
        "export": ("circuits", "Write circuits in the format of another tool."),
        "import": (
            "circuits",
            "Read circuits of other tools: GraphML and JSON of ACC and accpp-tracer, Neuronpedia's graphs.",
        ),
    },
    "Is it true, enough, needed?": {
        "verify": ("verify", "Test a circuit in the running model: do its numbers and predictions hold?"),
        "intervene": (
            "experiments",
            "Change the signal of one edge in the running model: attention and metric before and after.",
        ),
        "edges": (
            "experiments",
            "Ablate every edge into one head, in one circuit or many: do edge weights predict the effect?",
        ),
        "faithfulness": (
            "experiments",
            "Keep only the circuit's attention. How much of the answer is left? Then ablate only the circuit.",
        ),
        "sufficiency": (
            "experiments",
            "Keep only a circuit's head components and patch all others from a counterfactual prompt. What is left?",
        ),
        "bench": (
            "verify",
            "Compare methods on prompts with counterfactuals: sufficiency by size, CPR, CMD, cost in forward passes.",
        ),
        "expect": (
            "why",
            "Use a circuit as a test: check its claims on another model. Each passes or fails.",
        ),
    },
    "Many prompts": {
        "run": (
            "run",
            "Trace many prompts, one circuit each, into a folder. If interrupted, the same command resumes.",
        ),
        "runs": ("run", "Show what a run contains, how far it is, and what failed and why."),
        "merge": (
            "merge",
            "Merge the circuits of many prompts into one network by roles, with the frequency of each edge.",
        ),
        "families": (
            "families",
            "Group similar circuits into families: their representatives, and the labels they agree with.",
        ),
        "compare": (
            "families",
            "Compare circuits, runs or models: which nodes and edges they share, and which only one of them has.",
        ),
        "signals": (
            "families",
            "Compare what each head reads in two circuits or families, by the cosine of its query and key signals.",
        ),
        "sinks": (
            "sinks",
            "Study attention sinks: how much attention they take, their signals, and the effect of removing these.",
        ),
    },
    "A whole model": {
        "serve": (
            "serve",
            "Explore a model in the browser: type a prompt, click an attention weight, see why.",
        ),
        "atlas": (
            "interpret",
            "What does every head and channel attend to over a corpus? Which heads do induction? Tables and pages.",
        ),
        "interpret": (
            "interpret",
            "Describe the signals of circuits in words, and test the words on token pairs that were held out.",
        ),
    },
    "Models, tasks, toys": {
        "doctor": (
            "doctor",
            "Check this installation: versions, device, available models, and whether the numbers are exact here.",
        ),
        "models": ("models", "List supported architectures and the models ready to load; download models."),
        "info": (
            "models",
            "Show a model's shape: layers, heads, KV groups, norms, positions, softcaps, windows, memory.",
        ),
        "tasks": ("tasks", "Prompts with known answers: list them, preview them, measure a model on them."),
        "emerge": (
            "channels",
            "Follow heads through training: how few channels make up a score, checkpoint by checkpoint.",
        ),
        "toy": (
            "tasks",
            "Watch singular vectors align with features, in small models whose features are known.",
        ),
    },
}
"""All commands, in the groups in which ``headtrace --help`` lists them. By name: the module of ``headtrace.cli`` with a
function of that name, and the first line of its help."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
_GROUP_OF = {name: group for group, commands in GROUPS.items() for name in commands}


def flowing(help_text: str) -> str:
    """Help whose paragraphs break where the terminal ends, and not where the lines of the source do.

    >>> flowing("One paragraph\\nof prose.\\n\\n  headtrace why MODEL")
    'One paragraph of prose.\\n\\n  headtrace why MODEL'
    """
    paragraphs = cleandoc(help_text).split("\n\n")
    return "\n\n".join(each if "\n " in f"\n{each}" else each.replace("\n", " ") for each in paragraphs)


class LazyCommands(MutableMapping[str, Any]):
    """All commands by name, each made when it is looked up."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.made:
            module, summary = COMMANDS[name]
            function = f"{name}_" if iskeyword(name) else name
            found = getattr(import_module(f"headtrace.cli.{module}"), function)
            if isinstance(found, typer.Typer):
                self.made[name] = typer.main.get_group(found)
            else:
                from headtrace.cli.options import with_option_groups

                alone = typer.Typer(rich_markup_mode=MARKUP, add_completion=False)
                text = f"{summary}\n\n{flowing(found.__doc__ or '')}"
                alone.command(name, help=text)(with_option_groups(found))
                self.made[name] = typer.main.get_command(alone)
            self.made[name].rich_help_panel = _GROUP_OF[name]
        return self.made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self.made[name] = command

    def __delitem__(self, name: str) -> None:
        raise TypeError("Commands are not removed.")

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS | self.made)

    def __len__(self) -> int:
        return len(COMMANDS | self.made)


class ListedCommands(Commands):
    """All commands: listed without being imported, made where they are run."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.commands = self._lazy = LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What help, completion and suggestions need: the name, and the first line of the help."""
        if cmd_name in self._lazy.made or cmd_name not in COMMANDS:
            return self._lazy.get(cmd_name)
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1], rich_help_panel=_GROUP_OF[cmd_name])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self._lazy.get(args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="headtrace",
    cls=ListedCommands,
    help="Why does this attention head attend here? Exact circuits of transformer language models.\n\n"
    'Begin with: headtrace why builtin -p "When Mary and John went to the store, John gave a drink to"',
    no_args_is_help=True,
    rich_markup_mode=MARKUP,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"headtrace {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(  # noqa: ARG001
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, and end the process: 0, or 2 with one message that says what to do; see `failures`."""
    tolerate_few_characters()
    app(args=arguments, prog_name="headtrace")
