"""Requests that several panels share, and the Python lines that do what a request says.

What to explain, and how, is said as everywhere in the library: in the JSON form of `headtrace.request.TraceRequest`.
Only the prompt is sent once, and then named by the id of its recording.

>>> asked = CircuitRequest.model_validate({"recording": "0f3a", "answer": " Mary", "paths": "complete"})
>>> asked.trace_request(PromptRequest(text="When John and Mary")).to_json()
{'text': 'When John and Mary', 'answer': ' Mary', 'paths': 'complete'}
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from headtrace.errors import InputError
from headtrace.request import ROOT_OPTIONS, TRACER_SETTINGS, TraceRequest
from headtrace.roots import ROOTS
from headtrace.tracing import METHODS, make_method
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    from headtrace.models import Model

MAX_TEXT = 100_000
"""Characters of a prompt; the number of tokens is limited by `Settings.max_tokens`."""

Position = Annotated[int, Field(ge=0, le=1_000_000)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
TokenIds = Annotated[list[Position], Field(min_length=1, max_length=MAX_TEXT)]


class Request(BaseModel):
    """A request. Unknown fields are refused, so that a misspelt option is not silently ignored."""

    model_config = ConfigDict(extra="forbid")


class View(BaseModel):
    """An answer, or a part of one, which may be read from an object with attributes of the same names."""

    model_config = ConfigDict(from_attributes=True)


class PromptRequest(Request):
    """A prompt, as text or as token ids, for one of the models that are served."""

    text: Text | None = None
    tokens: TokenIds | None = None
    bos: bool | None = None
    """Whether a beginning-of-sequence token precedes text; None: the model's default."""
    model: Annotated[int, Field(ge=0, le=1)] = 0
    """0: the model that is explored; 1: the one beside it (``--beside``)."""

    @model_validator(mode="after")
    def _one_of_them(self) -> PromptRequest:
        if (self.text is None) == (self.tokens is None):
            raise ValueError("give either text or tokens")
        return self

    @property
    def trace_request(self) -> TraceRequest:
        """The prompt alone, as the library takes it."""
        return TraceRequest(tuple(self.tokens or ()) if self.text is None else self.text, bos=self.bos)


class RecordingRequest(Request):
    """A request about a recorded prompt."""

    recording: Annotated[str, Field(max_length=64)]
    """The id that ``/api/record`` returned for the prompt."""


class FiringRequest(Request):
    """A head that attends from a destination to a source."""

    model_config = ConfigDict(from_attributes=True)

    layer: Position
    head: Position
    dest: Position
    src: Position

    @property
    def firing(self) -> Firing:
        return Firing(self.layer, self.head, self.dest, self.src)


# -- the fields of a TraceRequest ------------------------------------------------------------------------------

_Token = Annotated[str, Field(max_length=1_000)] | Position
Answers = _Token | Annotated[list[_Token], Field(min_length=1, max_length=50)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Name = Annotated[str, Field(max_length=100)]

LIMITED: dict[str, Any] = {
    "root": Annotated[str, Field(json_schema_extra={"enum": [*ROOTS]})],
    "answer": Answers,
    "wrong": Answers,
    "top_k": Annotated[int, Field(ge=1, le=1_000)],
    "top_p": Annotated[float, Field(gt=0, le=1)],
    "heads": _Name | Annotated[list[_Name], Field(min_length=1, max_length=1_000)],
    "direction": Annotated[list[_Finite], Field(min_length=1, max_length=MAX_TEXT)],
    "layer": Position,
    "position": Annotated[int, Field(ge=-1_000_000, le=1_000_000)],
    "counterfactual": Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1, max_length=16)],
    "neurons": Annotated[int, Field(ge=0, le=1_000)],
    "method": Annotated[str, Field(json_schema_extra={"enum": [*METHODS]})],
    "method_options": dict[str, bool | int | float | str],
    "max_firings": Annotated[int, Field(ge=1, le=10_000)],
    "min_influence": Annotated[float, Field(ge=0, le=1)],
}
"""What the server accepts in fields where the library would accept more, or any Python object."""

_HELP = {name: option.help for root in ROOTS.values() for name, option in root.options.items()} | {
    each.name: each.metadata.get("help") for each in fields(TraceRequest)
}


def _optional(names: Sequence[str]) -> dict[str, Any]:
    """Fields of a pydantic model: those of a ``TraceRequest`` with these names, each of which may be left out."""
    hints = get_type_hints(TraceRequest, localns={"Method": str})
    defaults = vars(TraceRequest("the defaults"))
    made: dict[str, Any] = {}
    for name in names:
        kind = LIMITED.get(name, hints.get(name, Any))
        if name != "max_firings":  # where null means no limit, and the server has one
            kind |= None
        made[name] = kind, Field(defaults.get(name), description=_HELP[name])
    return made


class _InTraceForm(RecordingRequest):
    """A request with fields of a ``TraceRequest``, checked as the library checks them."""

    @model_validator(mode="after")
    def _valid(self) -> _InTraceForm:
        request = self.trace_request(PromptRequest(text="any"))
        make_method(request.method, **request.method_options)
        return self

    def trace_request(self, prompt: PromptRequest) -> TraceRequest:
        """The request as the library takes it, for the prompt that was recorded."""
        given = self.model_dump(include={*_ROOT_FIELDS, *_OTHER_FIELDS}, exclude_unset=True)
        request = TraceRequest.from_json({"text": "the recorded prompt", **given})
        return replace(request, prompt=prompt.trace_request.prompt, bos=prompt.bos)

    @property
    def has_root(self) -> bool:
        """Whether it says what to explain."""
        return any(getattr(self, name) is not None for name in _ROOT_FIELDS)


_ROOT_FIELDS = ("root", *ROOT_OPTIONS)
_OTHER_FIELDS = tuple(
    each.name for each in fields(TraceRequest) if each.name not in ("prompt", "text", "bos", "about", "root")
)

RootedRequest = create_model(
    "RootedRequest",
    __base__=_InTraceForm,
    __doc__="A request about a recorded prompt, and what is explained about it.",
    **_optional(_ROOT_FIELDS),
)
_WithSettings = create_model("_WithSettings", __base__=RootedRequest, **_optional(_OTHER_FIELDS))


class CircuitRequest(_WithSettings):
    """A circuit to trace: the JSON form of a `headtrace.request.TraceRequest`, with a recording as its prompt."""


# -- Python lines that compute the same ------------------------------------------------------------------------


def python_lines(request: TraceRequest, model: Model, *lines: str, imports: Sequence[str] = ()) -> str:
    """Python source that does with a request what the server did: loads the model, states the prompt, and ``lines``.

    In ``lines``, ``{request}`` stands for the prompt with all options as arguments, ``{prompt}`` for the prompt alone,
    and ``tracer`` is a tracer with the settings of the request.

    >>> import headtrace
    >>> request = TraceRequest.create("When Mary and", answer=" John", method_options={"tau": 0.3})
    >>> print(python_lines(request, headtrace.load("builtin"), "circuit = tracer.trace({request})"))
    import headtrace
    <BLANKLINE>
    model = headtrace.load('builtin')
    prompt = 'When Mary and'
    tracer = headtrace.Tracer(model, tau=0.3)
    circuit = tracer.trace(prompt, answer=' John')
    """
    data = request.to_json()
    text = data.pop("text", None)
    prompt = data.pop("tokens", None) or data.pop("messages", None) or text
    settings = {name: data.pop(name) for name in TRACER_SETTINGS if name in data}
    settings |= settings.pop("method_options", {})
    for name in ("answer", "wrong"):
        if name in data:
            data[name] = _as_text(model, request, data[name])
    dtype = None if model.own_dtype == "float32" else model.own_dtype
    loaded = {"revision": model.revision, "dtype": dtype}
    source = ["import headtrace", *imports, ""]
    source.append(f"model = headtrace.load({_arguments(repr(model.name), loaded)})")
    source.append(f"prompt = {prompt!r}")
    if any("tracer." in line for line in lines):
        source.append(f"tracer = headtrace.Tracer({_arguments('model', settings)})")
    whole, alone = _arguments("prompt", data), _arguments("prompt", {"bos": request.bos})
    source += [line.replace("{prompt}", alone).replace("{request}", whole) for line in lines]
    return "\n".join(source)


def _arguments(first: str, options: dict[str, Any]) -> str:
    """Arguments of a call as Python source; options that are None are left out."""
    return ", ".join([first, *(f"{name}={value!r}" for name, value in options.items() if value is not None)])


def _as_text(model: Model, request: TraceRequest, answer: Any) -> Any:
    """A token id as the text of the token, where this text means the same token after the prompt.

    The page sends the ids of answers that were chosen from its list, since their text alone may be split differently.
    """
    if isinstance(answer, list):
        each: list[Any] = [_as_text(model, request, one) for one in answer]
        return each[0] if len(each) == 1 else each
    if isinstance(answer, int) and isinstance(request.prompt, str):
        label = model.output_labels([answer])[0]
        for text in (label, f" {label}"):
            with suppress(InputError):
                if model.continuation(request.prompt, text) == (answer,):
                    return text
    return answer
