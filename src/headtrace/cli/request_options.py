"""The options of a request, for every command that traces: made from what `TraceRequest`, roots and methods declare.

A field of ``TraceRequest`` with a help text is an option. So is every option of a root (``BaseRoot.options``), and
every option of a method: those of the default method under their own names (``--tau``), those that only other methods
have under the name of the method (``--svt-channels``). What a package registers is found here without further ado.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import typer

from headtrace.cli.options import OptionGroup
from headtrace.cli.output import warn
from headtrace.errors import InputError
from headtrace.lines import Lines
from headtrace.request import ROOT_OPTIONS, TRACER_SETTINGS, TraceRequest
from headtrace.roots import ROOTS
from headtrace.roots.base import ANSWERS

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.tracing import Tracer

PromptsFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Many prompts, one JSON object per line: text (or tokens, messages), answer, wrong, counterfactual, "
        "labels, roles, id, and other options. Command-line options are defaults for lines without them.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Stop if a prompt cannot be used (default: report it and go on)."),
]
NOT_OPTIONS = ("prompt", "text", "about", "method_options", "id", "labels", "roles")
"""Fields of a request without an option of their own: the prompt has several (-p, --tokens ...), the options of roots
and methods have their names, and the others belong to one line of a file of prompts."""


@dataclass(frozen=True)
class Declared:
    """One option of the command line: the parameter that it sets, and what in a request that is."""

    name: str
    """The parameter."""
    where: Literal["field", "root", "method"]
    field: str
    """The field of the request, or the option of the root or method."""
    type: Any
    option: Any
    default: Any = None
    read: Callable[[Any], Any] | None = None
    """From what is given to what a request has, if that differs."""


def declared_options() -> list[Declared]:
    """All options, in the order in which help shows them."""
    return [*_of_roots(), *_of_fields(), *_of_methods()]


class RequestOptions(OptionGroup):
    """What a command line says about a request, apart from the prompt; checked as far as that needs no model."""

    only: ClassVar[tuple[str, ...]] = ()
    """The fields that apply, if not all do; the options of methods come with ``method``."""

    def __init__(self, **given: Any) -> None:
        self.options: dict[str, Any] = {}
        """Options of ``TraceRequest.create`` that differ from their defaults."""
        self.settings: dict[str, Any] = {}
        """Settings of a ``Tracer`` that differ from their defaults."""
        method_options: dict[str, Any] = {}
        for each in declared_options():
            if each.name not in given or given[each.name] in (each.default, None, []):
                continue
            value = given[each.name] if each.read is None else each.read(given[each.name])
            if each.where == "method":
                method_options[each.field] = value
            elif each.field in TRACER_SETTINGS:
                self.settings[each.field] = value
            elif each.field in self.options:
                raise InputError(f"Give the {each.field} as text or as a token id, not both.")
            else:
                self.options[each.field] = value
        if method_options:
            self.settings["method_options"] = method_options
        from headtrace.tracing import make_method

        make_method(TraceRequest("checks the settings", **self.settings).method, **method_options)

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        return [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=each.default,
                annotation=Annotated[each.type, each.option],
            )
            for each in declared_options()
            if not cls.only
            or (each.where == "field" and each.field in cls.only)
            or (each.where == "method" and "method" in cls.only)
        ]

    def tracer(self, model: Model) -> Tracer:
        """A tracer with these settings."""
        from headtrace.tracing import Tracer

        settings = dict(self.settings)
        return Tracer(model, **settings.pop("method_options", {}), **settings)


class ExplainOptions(RequestOptions):
    """What applies where one firing is explained, and there is no root."""

    only = ("method", "patterns", "bos")


def _of_roots() -> Iterator[Declared]:
    for name in ROOT_OPTIONS:
        same = [root.options[name] for root in ROOTS.values() if name in root.options]
        words, kind = max((each.help for each in same), key=len), same[0].type
        flag, words = f"--{name.replace('_', '-')}", f"{words[0].upper()}{words[1:]}."
        if kind == ANSWERS:
            texts = typer.Option(flag, help=f"{words} Repeat it for alternatives.")
            ids = typer.Option(f"{flag}-id", help=f"As --{name}, but a token id.")
            yield Declared(name, "root", name, list[str] | None, texts)
            yield Declared(f"{name}_id", "root", name, list[int] | None, ids)
        elif kind == list[float]:
            words = f"A file (.json, .npy or .safetensors) with {words[0].lower()}{words[1:]}"
            option = typer.Option(flag, help=words, metavar="FILE")
            yield Declared(name, "root", name, str | None, option, read=read_vector)
        elif kind == list[str]:
            option = typer.Option(flag, help=words)
            yield Declared(name, "root", name, str | None, option, read=lambda text: text.split(","))
        else:
            yield Declared(name, "root", name, kind | None, typer.Option(flag, help=words))


def _of_fields() -> Iterator[Declared]:
    hints = get_type_hints(TraceRequest, localns={"Method": str})
    for each in fields(TraceRequest):
        if each.name in NOT_OPTIONS:
            continue
        kinds: tuple[Any, ...] = get_args(hints[each.name]) or (hints[each.name],)
        kind = next((kind for kind in (bool, int, float) if kind in kinds), str)
        limitless = type(None) in kinds and each.default is not None
        words: str = each.metadata.get("help", "") + (" 0: no limit." if limitless else "")
        flag = f"--{each.name.replace('_', '-')}"
        option = typer.Option(f"{flag}/--no-{flag[2:]}" if kind is bool else flag, help=words)
        # Attention that is asked for by name is all that is followed; the default may give way (Tracer.trace).
        default = None if each.name == "paths" else each.default
        hint: Any = kind if default is not None else kind | None
        read: Callable[[Any], Any] | None = (lambda value: value or None) if limitless else None
        if any(get_origin(kind) is tuple for kind in kinds):  # may be repeated; one alone is no list
            hint, read = list[str] | None, lambda given: given[0] if len(given) == 1 else tuple(given)
        yield Declared(each.name, "field", each.name, hint, option, default, read)


def _of_methods() -> list[Declared]:
    from headtrace.tracing import METHODS, method_options

    standard = TraceRequest("the default method").method
    assert isinstance(standard, str)
    plain = {each.name for each in method_options(standard)}
    found: dict[str, Declared] = {}
    for method in (standard, *(name for name in METHODS if name != standard)):
        for each in method_options(method):
            name = each.name if each.name in plain else f"{method}-{each.name}"
            parameter = "".join(letter if letter.isalnum() else "_" for letter in name)
            shared = all(each.name in {other.name for other in method_options(name)} for name in METHODS)
            words = each.help if shared else f"For {method}: {each.help[:1].lower()}{each.help[1:]}"
            default = getattr(METHODS[method], "rule", None) if each.name == "tau" else each.default
            words += "" if default is None else f" Default: {default}."
            flag = f"--{parameter.strip('_').replace('_', '-')}"
            flag = f"{flag}/--no-{flag[2:]}" if each.type is bool else flag
            option = typer.Option(flag, help=words)
            found.setdefault(name, Declared(parameter, "method", each.name, each.type | None, option))
    return list(found.values())


def read_vector(path: str) -> list[float]:
    """A vector from a file: a JSON list, an .npy array, or the only tensor of a .safetensors file. Never a pickle."""
    expected = "Give a .json, .npy or .safetensors file of one row of numbers."
    try:
        if path.endswith(".npy"):
            import numpy as np

            found: Any = np.load(path, allow_pickle=False).tolist()
        elif path.endswith(".safetensors"):
            from safetensors.numpy import load_file

            tensors = list(load_file(path).values())
            found = tensors[0].tolist() if len(tensors) == 1 else None
        else:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
    except OSError as error:
        raise InputError(
            f"--direction {path!r} cannot be read: {error.strerror or error}. {expected}"
        ) from None
    except Exception as error:
        raise InputError(f"--direction {path!r} cannot be read: {error}. {expected}") from None
    if not isinstance(found, list) or not found or not all(type(x) in (int, float) for x in found):
        raise InputError(f"--direction {path!r} does not hold one row of numbers. {expected}")
    return [float(x) for x in found]


TOLERATED = 0.1
"""The share of prompts that may fail without a word in the exit code."""
TOO_MANY_FAILED = 3


def exit_by_share(failed: int, total: int) -> None:
    """End with exit code 3 where more than one in ten prompts could not be read or traced."""
    if failed > TOLERATED * total:
        warn(f"{failed} of {total} prompts failed: more than one in ten, hence exit code {TOO_MANY_FAILED}.")
        raise typer.Exit(TOO_MANY_FAILED)


def skipped_of(files: Iterable[Lines[Any]]) -> tuple[int, int]:
    """How many lines of some files could not be read, and how many there are."""
    read = list(files)
    skipped = sum(len(each.skipped) for each in read)
    return skipped, skipped + sum(map(len, read))


def report_skipped(lines: Lines[Any]) -> None:
    """How many lines of a file of prompts were skipped, and why the first few were."""
    for line in lines.report().splitlines():
        warn(line)
