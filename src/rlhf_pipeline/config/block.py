"""The base of every parameter block: strict, frozen, documented field by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Block(BaseModel):
    """One block of parameters, validated by the same class in YAML, Kedro nodes and `job.json`.

    Unknown keys are errors, and values cannot change after validation. The docstring under a field
    (meaning, unit, default) becomes its description in the JSON schema.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def recipe(self) -> dict[str, Any]:
        """Return all values that can change the result, as JSON types: no operational fields."""
        return _recipe(self, self.model_dump(mode="json"))


def operational(default: Any, **kwargs: Any) -> Any:
    """Define a field that does not change the result (log interval, port): no fingerprint has it.

    Takes the arguments of pydantic's `Field`, except `json_schema_extra`.
    """
    return Field(default, json_schema_extra={"operational": True}, **kwargs)


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


def _recipe(value: Any, dumped: Any) -> Any:
    """Remove operational fields from `dumped`, the JSON form of `value`."""
    match value:
        case Block():
            return {
                name: _recipe(getattr(value, name), item)
                for name, item in dumped.items()
                if not _is_operational(type(value), name)
            }
        case list() | tuple():
            return [_recipe(*pair) for pair in zip(value, dumped, strict=True)]
        case dict():
            return {
                key: _recipe(item, dumped_item)
                for item, (key, dumped_item) in zip(value.values(), dumped.items(), strict=True)
            }
        case _:
            return dumped


def _is_operational(block: type[Block], name: str) -> bool:
    extra = block.model_fields[name].json_schema_extra
    return isinstance(extra, dict) and extra.get("operational") is True
