"""What headtrace keeps in JSON files: dataclasses whose annotations are the schema, checked when they are read.

A ``stored`` dataclass (a node, an edge) is plain and cheap to construct. It is checked when a file is read, or when it
is given to the constructor of a ``checked`` one (a circuit), which checks all that it holds. Errors name the field:

>>> from dataclasses import replace
>>> from headtrace.circuits.describe import example
>>> edge = example().edges[0]
>>> plain(edge)
{'source': 1, 'target': 0, 'side': 'root', 'weight': 2.5, 'channels': None}
>>> example().with_edges((replace(edge, weight=float("nan")),))
Traceback (most recent call last):
headtrace.errors.InputError: Circuit.edges[0].weight: expected a finite number, got NaN
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_type_hints

import pydantic.dataclasses
from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError
from typing_extensions import dataclass_transform

from headtrace.errors import InputError, shown

T = TypeVar("T")

# -- types of fields ---------------------------------------------------------------------------------------------

LARGEST = 2**63 - 1
"""The largest integer of a file: it fits into a column of a table."""


def _encodable(text: str) -> str:
    """Refuse text with lone surrogates, which no file in UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("surrogates", "Input should be text with no lone surrogates") from None
    return text


def _number_or(*types: type) -> PlainValidator:
    """A finite number or one of these types. Unlike a union of types, it gives one reason when it refuses a value."""
    names = {str: "text", bool: "true or false"}
    expected = " or ".join(["a finite number", *(names[each] for each in types)])

    def read(value: Any) -> Any:
        if isinstance(value, str) and str in types:
            return _encodable(value)
        if isinstance(value, bool):
            valid = bool in types
        elif isinstance(value, int):
            valid = abs(value) <= LARGEST
        else:
            valid = value is None or (isinstance(value, float) and math.isfinite(value))
        if not valid:
            raise PydanticCustomError("scalar", f"Input should be {expected}")  # type: ignore[arg-type]
        return value

    return PlainValidator(read)


Index = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]
Text = Annotated[str, Field(strict=True), AfterValidator(_encodable)]
Flag = Annotated[bool, Field(strict=True)]
Ids = tuple[Index, ...]
Words = tuple[Text, ...]
Scalar = Annotated[float | str | bool | None, _number_or(str, bool)]
NumberOrText = Annotated[float | str | None, _number_or(str)]

ALWAYS = "always written"
Written = Annotated[T, ALWAYS]
"""A field that every file has, even where it is null. Other fields are left out where they have their default."""


# -- dataclasses -------------------------------------------------------------------------------------------------


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def stored(cls: type[T]) -> type[T]:
    """A frozen dataclass that is checked when it is read from a file, not when it is constructed."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid", revalidate_instances="always")  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True)(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def checked(cls: type[T]) -> type[T]:
    """A frozen dataclass that checks all it holds when it is constructed; an ``InputError`` names the wrong field."""
    result: Any = pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    construct = result.__init__

    @wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except ValidationError as error:
            raise input_error(error, result, result.__name__) from None

    result.__init__ = __init__
    return result


@cache
def _adapter(shape: type) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


def read_object(shape: type[T], data: Mapping[str, Any]) -> T:
    """A checked object from JSON data, or an ``InputError`` that names the field which is wrong."""
    try:
        return _adapter(shape).validate_python(data)
    except ValidationError as error:
        raise input_error(error, shape) from None
    except RecursionError:
        raise InputError("nested too deeply to be read") from None


def read_document(shape: type[T], data: Any, schema: str) -> T:
    """A checked object from the data of a file that names its schema."""
    if not isinstance(data, dict):
        fail("", "a JSON object", data)
    if data.get("schema") != schema:
        fail("schema", f'"{schema}"', data.get("schema"))
    return read_object(shape, {key: value for key, value in data.items() if key != "schema"})


def plain(value: Any) -> Any:
    """JSON data of a value: dataclasses become objects without fields that are unset, mappings are sorted by key."""
    if is_dataclass(value):
        items = ((name, getattr(value, name), unset) for name, unset in defaults(type(value)).items())
        return {name: plain(item) for name, item, unset in items if item != unset}
    if isinstance(value, Mapping):
        return {key: plain(value[key]) for key in sorted(value)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


@cache
def defaults(shape: type) -> dict[str, Any]:
    """The default of each field, which is not written; ``MISSING`` for fields that every file has."""
    hints = get_type_hints(shape, include_extras=True)
    always = {name for name, hint in hints.items() if ALWAYS in getattr(hint, "__metadata__", ())}
    return {each.name: MISSING if each.name in always else each.default for each in fields(shape)}


# -- text --------------------------------------------------------------------------------------------------------


def file_text(path: str | Path, what: str, advice: str) -> str:
    """The text of a JSON file; ``advice`` says what to do if there is none."""
    path = Path(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"No {what.removeprefix('a ')} at {path}. {advice}") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; expected {what} (JSON).") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); expected {what} (JSON).") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def parse(text: str, what: str = "a circuit file") -> Any:
    """JSON data, or an error that says what is wrong with the text. No object may have a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(
                f"the key {shown(twice)} occurs more than once in one object; the file is damaged"
            )
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise InputError(
            f"not valid JSON at line {error.lineno}, column {error.colno} ({error.msg}); the file is damaged "
            f"or is not {what}"
        ) from None
    except RecursionError:
        raise InputError(f"nested too deeply to be {what}") from None
    except InputError:
        raise
    except ValueError as error:  # Python refuses to read integers of thousands of digits
        raise InputError(f"holds a number that cannot be read ({error}); the file is damaged") from None


def document(data: Mapping[str, Any]) -> str:
    """JSON data as text that can be compared line by line: one line per key, and per object of a list."""
    line = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    lines: list[str] = []
    for key, value in data.items():
        many = isinstance(value, list) and value and isinstance(value[0], dict)
        block = "[\n" + ",\n".join(map(line, value)) + "\n]" if many else line(value)
        lines.append(f"{line(key)}: {block}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


# -- errors ------------------------------------------------------------------------------------------------------

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
    "string_unicode": "text with no lone surrogates",
    "too_short": "at least {min_length} of them",
    "tuple_type": "a list",
    "union_tag_invalid": "one of {expected_tags}",
}


def fail(path: str, expected: str, value: Any) -> NoReturn:
    """Say which field is wrong, what was expected there and what was found."""
    raise InputError(f"{path + ': ' if path else ''}expected {expected}, got {shown(value)}")


def input_error(error: ValidationError, shape: type, name: str = "") -> InputError:
    """The first of pydantic's complaints about data for ``shape``, a dataclass, in the form of ``fail``.

    ``name`` stands before the field: for an object constructed in Python, that of its class.
    """
    first = error.errors(include_url=False)[0]
    path, owner = _path(shape, first["loc"])
    path = f"{name}.{path}" if name else path
    context = first.get("ctx", {})
    match first["type"]:
        case "missing":
            return InputError(f"{path}: missing")
        case "union_tag_not_found":
            return InputError(f"{path}.kind: missing")
        case "unexpected_keyword_argument":
            allowed = ", ".join(each.name for each in fields(owner)) if is_dataclass(owner) else ""
            return InputError(f"{path}: unknown key; expected one of {allowed}")
        case "unexpected_positional_argument":
            return InputError(f"{name}: expected at most {len(fields(shape))} values, got more")
        case "value_error":  # raised by checks between fields, which name the field themselves
            return InputError(str(context["error"]))
        case kind:
            expected = first["msg"].removeprefix("Input should be ")
            if kind in _EXPECTED:
                words = {key: str(value).replace("'", "") for key, value in context.items()}
                expected = _EXPECTED[kind].format(**words)
            if kind == "union_tag_invalid":
                return InputError(f"{path}.kind: expected {expected}, got {shown(context['tag'])}")
            return InputError(
                f"{path + ': ' if path else ''}expected {expected}, got {shown(first['input'])}"
            )


def _path(shape: type, location: tuple[int | str, ...]) -> tuple[str, type | None]:
    """The path to a value as a person writes it, and the dataclass that its last step belongs to."""
    path, owners, owner = "", [shape], None
    if location and isinstance(location[0], int):  # an argument given by its position
        names = [each.name for each in fields(shape)]
        location = (*names[location[0] : location[0] + 1], *location[1:])
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif len(owners) > 1:  # pydantic names the member of a union here; it is no step of the data
            owners = [each for each in owners if getattr(each, "kind", None) == step]
        elif step != "[key]":
            key = step.encode(errors="backslashreplace").decode()
            key = key if len(key) <= 60 else key[:57] + "..."
            path += f".{key}" if path else key
            owner = owners[0] if owners else None
            owners = [] if owner is None else _dataclasses(get_type_hints(owner).get(step))
    return path, owner


def _dataclasses(annotation: Any) -> list[type]:
    if is_dataclass(annotation):
        return [annotation]  # type: ignore[list-item]
    return [found for inner in get_args(annotation) for found in _dataclasses(inner)]
