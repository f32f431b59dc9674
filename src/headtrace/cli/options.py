"""Options that several commands share, in groups, and what they read: a model, a prompt, an engine.

A group is a dataclass whose fields are options. A command that has a parameter of that type gets all of them, as one
object: ``with_option_groups`` puts the fields in place of the parameter before typer reads the signature.
"""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.markup import escape

from headtrace.cli.output import notes, printable
from headtrace.errors import InputError
from headtrace.lazy import require_ray

if TYPE_CHECKING:
    from headtrace.circuits import Circuit
    from headtrace.models import Model
    from headtrace.vocabulary import Prompt

ModelName = Annotated[str, typer.Argument(help="An alias, hub name, local folder, GGUF file, or 'builtin'.")]
OwnAnswer = Annotated[
    str | None, typer.Option(help="The answer, like ' Mary' (default: what the model itself answers).")
]
OwnRival = Annotated[
    str | None,
    typer.Option(help="The wrong answer to compare with (default: the answer's strongest rival)."),
]
Bos = Annotated[
    bool | None,
    typer.Option(
        "--bos/--no-bos", help="Whether the text begins with the BOS token (default: as the tokenizer does)."
    ),
]
Chat = Annotated[
    bool,
    typer.Option("--chat", help="Treat the text as a user's message, and apply the model's chat template."),
]
Dtype = Annotated[str, typer.Option(help="float32, float64, bfloat16, float16, or auto (as saved).")]
Device = Annotated[str, typer.Option(help="auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps ...")]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        metavar="STRATEGY|FILE",
        help="Use several devices: auto, balanced, balanced_low_0, sequential, or a JSON file {module: device}.",
    ),
]
CircuitSource = Annotated[
    str,
    typer.Argument(
        metavar="CIRCUIT",
        help="A circuit file, a Parquet file (one circuit of it: many.parquet#3), a folder, a run (one circuit of it: "
        "DIR#ID), or - for standard input.",
    ),
]
NumbersFile = Annotated[
    str | None,
    typer.Option(
        "--out",
        help="Write the numbers into this file (.json; .tex for a LaTeX table; - for standard output).",
    ),
]
Figure = Annotated[str | None, typer.Option(help="Draw a figure into this file (.png, .pdf or .svg).")]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object to standard output, and nothing else."),
]


class OptionGroup:
    """Options that belong together; the fields of a subclass, a dataclass, are the options."""

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """The options as parameters of a function."""
        hints = get_type_hints(cls, include_extras=True)
        return [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if each.default is MISSING else each.default,
                annotation=hints[each.name],
            )
            for each in fields(cls)  # type: ignore[arg-type]
            if each.init
        ]


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: each parameter that is a group replaced by the options of the group."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type[OptionGroup], list[str]]] = {}
    for each in inspect.signature(command).parameters.values():
        hint = hints[each.name]
        if isinstance(hint, type) and issubclass(hint, OptionGroup):
            inside = hint.parameters()
            groups[each.name] = (hint, [option.name for option in inside])
            parameters += inside
        else:
            parameters.append(each.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))

    def called(**given: Any) -> None:
        for name, (group, options) in groups.items():
            given[name] = group(**{option: given.pop(option) for option in options})
        command(**given)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(called)["__signature__"] = inspect.Signature(parameters)
    return called


# -- models ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """Which revision of a model is loaded, and how."""

    revision: Annotated[
        str | None, typer.Option(help="Revision of a hub model, such as Pythia's step1000.")
    ] = None
    dtype: Dtype = "float32"
    device: Device = "auto"
    device_map: DeviceMap = None

    def load(self, name: str) -> Model:
        """The model of this name."""
        return load_model(name, self.revision, self.dtype, self.device, self.device_map)


@dataclass(frozen=True)
class CircuitModels(OptionGroup):
    """The models of circuits, by name unless another place is given; each is loaded once."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="The model to load: a name or folder (default: the name stored in the circuit)."
        ),
    ] = None
    dtype: Dtype = "float32"
    device: Device = "auto"
    device_map: DeviceMap = None
    loaded: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False)
    """Models by name and revision."""

    def of(self, circuit: Circuit) -> Model:
        """The model that a circuit was traced in. A circuit of half precision belongs to the rounded weights."""
        from headtrace.circuits.checks import require_token_ids

        require_token_ids(circuit)  # before minutes of loading
        key = (circuit.model.name, circuit.model.revision) if self.model is None else (self.model, None)
        if key not in self.loaded:
            traced: Any = (circuit.method.settings or {}).get("dtype")
            dtype = traced if isinstance(traced, str) else self.dtype
            self.loaded[key] = load_model(*key, dtype, self.device, self.device_map)
        return self.loaded[key]


def load_model(
    name: str,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    device_map: str | None = None,
) -> Model:
    """Load a model with a spinner: it takes a few seconds."""
    places = device_kwargs(device, device_map)
    with notes.status(f"Loading {escape(printable(name))}"):
        from headtrace.models import load

        return load(name, revision=revision, dtype=dtype, **places)


def device_kwargs(device: str, device_map: str | None) -> dict[str, Any]:
    """Where a model goes, as keywords of ``headtrace.load``: one device, or a device map, which a file may hold.

    >>> device_kwargs("cpu", None), device_kwargs("auto", "balanced")
    ({'device': 'cpu'}, {'device_map': 'balanced'})
    """
    if device_map is None:
        return {"device": device}
    if device != "auto":
        raise InputError(
            f"--device {device} is one place for the whole model, and --device-map {device_map} says where its parts "
            "go. Give one of them."
        )
    if not device_map.endswith(".json"):
        return {"device_map": device_map}
    import json

    expected = (
        'Expected a JSON object from modules to devices: {"model.layers.0": 0, "model.layers.1": "cpu", ...}.'
    )
    try:
        with open(device_map, encoding="utf-8") as file:
            found: Any = json.load(file)
    except OSError as error:
        raise InputError(
            f"--device-map {device_map!r} cannot be read: {error.strerror}. {expected}"
        ) from None
    except ValueError as error:
        raise InputError(f"--device-map {device_map!r} is not JSON: {error}. {expected}") from None
    if not isinstance(found, dict) or not all(type(place) in (int, str) for place in found.values()):
        raise InputError(f"--device-map {device_map!r} is not a device map. {expected}")
    return {"device_map": found}


# -- prompts -----------------------------------------------------------------------------------------------------

_LONGEST = 100_000_000
"""Bytes of a prompt file; a device could be read for ever."""


@dataclass(frozen=True)
class PromptOptions(OptionGroup):
    """One prompt, in one of its forms."""

    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt, as text; - reads standard input.")
    ] = None
    prompt_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Read the prompt from a file; a line break at its end is dropped."),
    ] = None
    tokens: Annotated[str | None, typer.Option("--tokens", help="The prompt as token ids: 1,2,3.")] = None
    chat: Chat = False

    @property
    def given(self) -> int:
        """How many prompts there are."""
        return sum(each is not None for each in (self.prompt, self.prompt_file, self.tokens))

    def read(self) -> Prompt:
        """The prompt: text, token ids, or a conversation; exactly one of the options must be given."""
        if self.given != 1:
            raise InputError(
                "Give one prompt: as text (-p 'When Mary ...'), from a file (--prompt-file FILE), or as token ids "
                "(--tokens 1,2,3)."
            )
        if self.tokens is not None:
            if self.chat:
                raise InputError("--chat needs the prompt as text, not as token ids.")
            return parse_ids(self.tokens)
        text: Any = self.prompt
        if self.prompt_file == "-" or (self.prompt_file is None and self.prompt == "-"):
            stream = getattr(sys.stdin, "buffer", None)
            content = sys.stdin.read().encode() if stream is None else stream.read()
            text = _decoded(content, "Standard input")
        elif self.prompt_file is not None:
            text = _file_text(self.prompt_file)
        return [{"role": "user", "content": text}] if self.chat else text


def _file_text(file: str) -> str:
    try:
        with open(file, "rb") as opened:
            content = opened.read(_LONGEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"The prompt file {file!r} cannot be read: {reason}. Give a text file.") from None
    if len(content) > _LONGEST:
        raise InputError(
            f"The prompt file {file!r} is larger than {_LONGEST // 10**6} MB, which is too long for a "
            "prompt. Give a shorter one."
        )
    return _decoded(content, f"The prompt file {file!r}")


def _decoded(content: bytes, what: str) -> str:
    """The text without the line break that editors and echo put at its end."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise InputError(f"{what} is empty: it should hold the prompt.")
    return text


def parse_ids(text: str) -> list[int]:
    """Whole numbers with commas or spaces between them."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(
            f"{text!r} is not a list of token ids. Write numbers with commas, like 1,2,3."
        ) from None


# -- engines -----------------------------------------------------------------------------------------------------

ENGINES = ("local", "ray")


@dataclass(frozen=True)
class EngineOptions(OptionGroup):
    """Which processes do the work."""

    engine: Annotated[str, typer.Option("--engine", help="local (this machine) or ray.")] = "local"
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            help="Number of worker processes (default: local 1, ray one per CPU of this machine).",
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            help="With ray: the cluster's host:port, or auto (default: start Ray on this machine).",
        ),
    ] = None

    def check(self) -> dict[str, Any]:
        """The options as keywords; an error if there is no such engine, or a package for it is missing."""
        if self.engine not in ENGINES:
            raise InputError(f"--engine {self.engine!r}: choose {' or '.join(ENGINES)}.")
        if self.engine == "ray":
            require_ray()
        return {"engine": self.engine, "workers": self.workers, "ray_address": self.ray_address}


def command_line(arguments: Sequence[str]) -> str:
    """The command with these arguments, quoted for this system's shell."""
    words = ["headtrace", *arguments]
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def interrupted(progress: str = "") -> KeyboardInterrupt:
    """An interrupt that says how much is done, and how to resume."""
    words = ["Nothing is lost.", progress, f"To resume: {command_line(sys.argv[1:])}"]
    return KeyboardInterrupt(" ".join(each for each in words if each))
