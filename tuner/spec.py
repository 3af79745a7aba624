"""The base of every specification that a person writes: frozen, strict about unknown keys, finite."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tuner.errors import Problem, SpecError, nearest, printable


def _one_line(text: str) -> str:
    if text != printable(text) or not text.strip():
        raise ValueError("must be text that can be seen, without line breaks or other control characters")
    return text


Name = Annotated[str, Field(min_length=1, max_length=120), AfterValidator(_one_line)]


class Spec(BaseModel):
    """A frozen specification; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def replace(self, **changes: Any) -> Any:
        """Return a validated copy with some fields changed. Raises SpecError."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return checked(type(self), fields | changes, str(getattr(self, "name", type(self).__name__.lower())))


S = TypeVar("S", bound=Spec)


def checked(kind: type[S], data: dict[str, Any], where: str, *, units: bool = False) -> S:
    """Return `data` validated as `kind`, or raise a SpecError that lists all its problems. units: quantities need their unit."""
    try:
        return kind.model_validate(data, context={"units": units})
    except ValidationError as error:
        raise SpecError([_problem(kind, data, item, where) for item in error.errors(include_url=False)]) from None


_PLAIN = {
    "missing": "is missing",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "finite_number": "must be finite",
}


def _problem(kind: type[BaseModel], data: dict[str, Any], item: Any, where: str) -> Problem:
    location: tuple[int | str, ...] = item["loc"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if part != "[key]").lstrip(".")
    if item["type"] == "extra_forbidden":
        hint = nearest(str(location[-1]), _fields(kind, location[:-1]))
        return Problem(where=where, path=path[:200], value="", rule="unknown key", hint=hint)
    rule = _PLAIN.get(item["type"]) or str(item["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    value = item["input"]
    hint = nearest(value, _choices(item)) if isinstance(value, str) and item["type"] == "literal_error" else ""
    return Problem(where=where, path=path[:200], value="" if item["type"] == "missing" else _short(value, data), rule=rule, hint=hint)


def _short(value: Any, data: dict[str, Any]) -> str:
    if value is data or isinstance(value, (dict, BaseModel)):
        return ""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _choices(item: Any) -> list[str]:
    return re.findall(r"'([^']*)'", str(item.get("ctx", {}).get("expected", "")))


def _fields(kind: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the model that stands at `location` inside `kind`."""
    models = [kind]
    for part in location:
        inner = [m for model in models if part in model.model_fields for m in _models_in(model.model_fields[str(part)].annotation)]
        models = inner or models
    return [name for model in models for name in model.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
