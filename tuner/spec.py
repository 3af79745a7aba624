"""The base of every specification that a person writes: frozen, strict about unknown keys, finite."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=120)]


class Spec(BaseModel):
    """A frozen specification; an unknown key is an error (`load` turns pydantic's list into a SpecError)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def replace(self, **changes: Any) -> Any:
        """Return a validated copy with some fields changed."""
        return type(self).model_validate({name: getattr(self, name) for name in type(self).model_fields} | changes)
