"""The base of every parameter block: strict, frozen, documented field by field."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    model_serializer,
    model_validator,
)

RECIPE = "recipe"
"""Context of a dump without operational fields."""
OPERATIONAL: dict[str, Any] = {"operational": True}
"""Mark of an operational field in the JSON schema."""


class Block(BaseModel):
    """One block of parameters, validated by the same class in YAML, Kedro nodes and `job.json`.

    Unknown keys are errors, and values cannot change after validation. The docstring under a field
    (meaning, unit, default) becomes its description in the JSON schema.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def recipe(self) -> dict[str, Any]:
        """Return all values that can change the result, as JSON types: no operational fields."""
        return self.model_dump(mode="json", context=RECIPE)

    def _faults(self) -> Iterator[str]:
        """Why values that are valid alone do not fit each other; the first reason is shown."""
        yield from ()

    @model_validator(mode="after")
    def _fit(self) -> Self:
        for fault in self._faults():
            raise ValueError(fault)
        return self

    @model_serializer(mode="wrap")
    def _dumped(self, dump: Callable[..., Any], info: SerializationInfo) -> Any:
        values, fields = dump(self), type(self).model_fields
        if info.context != RECIPE:
            return values
        return {k: v for k, v in values.items() if fields[k].json_schema_extra != OPERATIONAL}


def operational(default: Any, **kwargs: Any) -> Any:
    """Define a field that does not change the result (log interval, port): no fingerprint has it.

    Takes the arguments of pydantic's `Field`, except `json_schema_extra`.
    """
    return Field(default, json_schema_extra=OPERATIONAL, **kwargs)


def leaves(parameters: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the values of nested mappings with their dotted names, in order.

    A list and an empty mapping are values.
    """
    found: list[tuple[str, Any]] = []
    for name, value in parameters.items():
        path = f"{prefix}{name}"
        is_inner = isinstance(value, Mapping) and value
        found += leaves(value, f"{path}.") if is_inner else [(path, value)]
    return found
