"""The reference of the command line, made from the commands themselves: what each does, takes, and examples."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from inspect import unwrap
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from mkdocs.structure.files import File

PAGE = "reference/commands.md"
_KINDS = {int: "integer", float: "number", Path: "file"}
_HEAD = """\
# Commands

Every command, its options and examples, as `--help` prints them. What all commands share (prompts, results, files, exit
codes) is on [another page](command-line.md).

"""


def described() -> str:
    """The page, in Markdown."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
    try:
        import typer

        from headtrace.cli import app
    finally:
        sys.path.pop(0)
    root: Any = typer.main.get_command(app)
    rows = [
        f"| [`headtrace {name}`](#headtrace-{name.replace(' ', '-')}) | {_summary(command)} |"
        for name, command in _commands(root)
    ]
    overview = "\n".join(["| command | what it does |", "| --- | --- |", *rows])
    sections = [_section(name, command) for name, command in _commands(root)]
    return _HEAD + overview + "\n\n" + "\n".join(sections)


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _group(command, f"{prefix}{name}")
        else:
            yield f"{prefix}{name}", command


def _group(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    if group.invoke_without_command:
        yield name, group
    yield from _commands(group, f"{name} ")


def _section(name: str, command: Any) -> str:
    text, examples = _parts(command.help or "")
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    usage = " ".join(["headtrace", name, *(_usage(each) for each in arguments), "[OPTIONS]"])
    lines = [f"## headtrace {name}", "", _escaped(text), "", "```text", usage, "```", ""]
    if arguments:
        lines += ["| argument | meaning |", "| --- | --- |", *map(_argument, arguments), ""]
    if options:
        hints = get_type_hints(unwrap(command.callback))
        rows = [_option(each, hints.get(each.name)) for each in options]
        lines += ["| option | value | meaning |", "| --- | --- | --- |", *rows, ""]
    if examples:
        lines += ["```sh", *examples, "```", ""]
    return "\n".join(lines)


def _parts(text: str) -> tuple[str, list[str]]:
    """What a command says of itself, and its examples, one command on a line; lines that continue one are indented."""
    said, _, rest = text.partition("Examples:")
    examples: list[str] = []
    for line in filter(None, map(str.rstrip, rest.splitlines())):
        if line.startswith("    "):
            examples[-1] += f" \\\n    {line.strip()}"
        else:
            examples.append(line.strip())
    return said.replace("\f", "").replace("\b", "").strip(), examples


def _summary(command: Any) -> str:
    return _cell(_parts(command.help or "")[0].split("\n\n")[0])


def _usage(argument: Any) -> str:
    name = _name(argument)
    return name if argument.required else f"[{name}]"


def _name(argument: Any) -> str:
    return argument.metavar or f"{argument.name.upper()}{' ...' if argument.nargs == -1 else ''}"


def _argument(argument: Any) -> str:
    return f"| `{_name(argument)}` | {_cell(argument.help)} |"


def _option(option: Any, hint: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    meaning = _cell(option.help)
    if option.required:
        meaning += " Required."
    elif (
        option.show_default and option.default not in (None, False, True, ()) and not callable(option.default)
    ):
        meaning += f" Default: `{option.default}`."
    return f"| {names} | {_kind(option, hint)} | {meaning} |"


def _kind(option: Any, hint: Any) -> str:
    """What follows an option, in words, by the type of the parameter that it sets."""
    if option.is_flag or hint is bool:
        return ""
    inside = [each for each in get_args(hint) if each is not type(None)]
    if get_origin(hint) is list:
        return f"{_kind(option, inside[0])}, repeatable"
    if inside:
        return _kind(option, inside[0])
    return option.metavar or _KINDS.get(hint, "text")


def _cell(text: str | None) -> str:
    return _escaped(" ".join((text or "").split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Text in which nothing is Markdown or HTML but code."""
    return re.sub(r"(?<!\\)([<>*_])", r"\\\1", text.replace("\\[", "["))


def on_files(files: Any, config: Any) -> Any:
    files.remove(files.get_file_from_path(PAGE))  # what stands there for those who read the repository
    files.append(File.generated(config, PAGE, content=described()))
    return files
