"""Checked data: field types, dataclasses that check their fields, and one form of error for data that is wrong.

edges[3].channels[0]: expected a valid integer, got "x"
"""

from __future__ import annotations

from dataclasses import MISSING, field, fields, is_dataclass
from functools import cache, wraps
from math import isfinite
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import dataclass_transform

from headtrace.errors import InputError, shown

T = TypeVar("T")


def is_whole(text: str) -> bool:
    """False for text with half a character (a lone surrogate): no file in UTF-8, table or terminal can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def whole(text: str) -> str:
    """Refuse half a character."""
    if is_whole(text):
        return text
    raise PydanticCustomError("half", "Input should be text without half characters")


LARGEST = 2**63 - 1
"""No integer of a circuit is larger, so each fits into a column of a table."""

Index = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Text = Annotated[str, Field(strict=True), AfterValidator(whole)]
Flag = Annotated[bool, Field(strict=True)]
Ids = tuple[Index, ...]
Words = tuple[Text, ...]

ALWAYS = "always written"
Written = Annotated[T, ALWAYS]
"""A field that is in every file, even where it is null. Others are written only where they say something."""

CHECKED = ConfigDict(extra="forbid")
"""Fields are checked when an object is made; a name that is not one of them is refused."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def checked(cls: type[T]) -> type[T]:
    """A frozen dataclass that checks its fields when it is made, and says which is wrong in an ``InputError``."""
    made: Any = dataclass(frozen=True, config=CHECKED)(cls)
    check = made.__init__

    @wraps(check)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            check(self, *args, **kwargs)
        except ValidationError as error:
            raise input_error(error, made, made.__name__) from None

    made.__init__ = __init__
    return made


@cache
def _defaults(cls: type) -> dict[str, Any]:
    return {each.name: each.default for each in fields(cls) if each.default is not MISSING}


def _is_plain(value: Any) -> bool:
    """A finite number, one to count with, several of those, text, or None, of exactly those types."""
    kind = type(value)
    if kind is float:
        return isfinite(value)
    if kind is int:
        return 0 <= value <= LARGEST
    if kind is tuple:
        return all(type(each) is int and 0 <= each <= LARGEST for each in value)
    return kind is str or value is None


def quickly(cls: type[T], **given: Any) -> T:
    """The same object as ``cls(**given)`` for what a trace puts together by the thousand: fields of plain values are
    taken as they are. Anything else is for the full check to convert or to refuse: methods may be other people's."""
    if not all(map(_is_plain, given.values())):
        return cls(**given)
    made = object.__new__(cls)
    vars(made).update(_defaults(cls), **given)
    return made


# pydantic's words, except where it speaks of Python and the file is JSON.
_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a JSON object",
    "dict_type": "a JSON object",
    "float_type": "a finite number",
    "greater_than_equal": "a number of at least {ge}",
    "less_than_equal": "a number of at most {le}",
    "literal_error": "one of {expected}",
    "mapping_type": "a JSON object",
    "model_attributes_type": "a JSON object",
    "none_required": "null",
    "string_type": "text",
    "string_unicode": "text without half characters",
    "too_short": "at least {min_length} of them",
    "tuple_type": "a list",
    "union_tag_invalid": "one of {expected_tags}",
}


def fail(path: str, expected: str, value: Any) -> NoReturn:
    """Say which field is wrong, what was expected there and what was found."""
    raise InputError(f"{path + ': ' if path else ''}expected {expected}, got {shown(value)}")


def input_error(error: ValidationError, shape: type, name: str = "") -> InputError:
    """The first of pydantic's complaints about data for ``shape``, a dataclass, in the form of ``fail``.

    ``name`` stands before the field: for an object made in Python, that of its class.
    """
    first = error.errors(include_url=False)[0]
    path, owner = _place(shape, first["loc"])
    path = f"{name}.{path}" if name else path
    context = first.get("ctx", {})
    match first["type"]:
        case "missing":
            return InputError(f"{path}: missing")
        case "union_tag_not_found":
            return InputError(f"{path}.kind: missing")
        case "unexpected_keyword_argument":
            allowed = ", ".join(field.name for field in fields(owner)) if is_dataclass(owner) else ""
            return InputError(f"{path}: unknown key; expected one of {allowed}")
        case "unexpected_positional_argument":
            return InputError(f"{name}: expected at most {len(fields(shape))} values, got more")
        case "value_error":  # raised by our own checks, which name the field themselves
            return InputError(str(context["error"]))
        case _:
            return _unexpected(path, first, context)


def _unexpected(path: str, first: ErrorDetails, context: dict[str, Any]) -> InputError:
    expected = first["msg"].removeprefix("Input should be ")
    if first["type"] in _EXPECTED:
        plain = {key: str(value).replace("'", "") for key, value in context.items()}
        expected = _EXPECTED[first["type"]].format(**plain)
    if first["type"] == "union_tag_invalid":
        return InputError(f"{path}.kind: expected {expected}, got {shown(context['tag'])}")
    return InputError(f"{path + ': ' if path else ''}expected {expected}, got {shown(first['input'])}")


def _place(shape: type, location: tuple[int | str, ...]) -> tuple[str, type | None]:
    """The path as a person writes it, and the dataclass that its last step belongs to."""
    path, owners, owner = "", [shape], None
    if location and isinstance(location[0], int):  # a value that was given by its place
        names = [field.name for field in fields(shape)]
        location = (*names[location[0] : location[0] + 1], *location[1:])
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif len(owners) > 1:  # pydantic names the member of a union here; it is no step of the data
            owners = [each for each in owners if getattr(each, "kind", None) == step]
        elif step != "[key]":
            path += f".{_key(step)}" if path else _key(step)
            owner = owners[0] if owners else None
            owners = [] if owner is None else _dataclasses(get_type_hints(owner).get(step))
    return path, owner


def _key(key: str) -> str:
    """A key as it can be printed: of a damaged file, it may be anything."""
    plain = key.encode(errors="backslashreplace").decode()
    return plain if len(plain) <= 60 else plain[:57] + "..."


def _dataclasses(annotation: Any) -> list[type]:
    if is_dataclass(annotation):
        return [annotation]  # type: ignore[list-item]
    return [found for inner in get_args(annotation) for found in _dataclasses(inner)]
