"""The base of every parameter block: strict, frozen, documented field by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Block(BaseModel):
    """One block of parameters: YAML, the Kedro node's argument and `job.json` are all validated by the same class.

    An unknown key is an error, a value cannot be changed after validation, and the docstring under a field (meaning,
    unit, why that default) becomes its description in the JSON schema.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def recipe(self) -> dict[str, Any]:
        """The values that decide the result, as JSON types: everything but the operational fields, at any depth."""
        return _recipe(self, self.model_dump(mode="json"))


def operational(default: Any, **kwargs: Any) -> Any:
    """A field that does not change the result (log interval, port, number of workers), so no fingerprint contains it.

    Takes the default and any other argument of pydantic's `Field`, except `json_schema_extra`.
    """
    return Field(default, json_schema_extra={"operational": True}, **kwargs)


def leaves(parameters: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Values of nested mappings by dotted place, in their order; a list is a value."""
    found: list[tuple[str, Any]] = []
    for name, value in parameters.items():
        place = f"{prefix}{name}"
        found += leaves(value, f"{place}.") if isinstance(value, Mapping) else [(place, value)]
    return found


def _recipe(value: Any, dumped: Any) -> Any:
    """`dumped` (the JSON form of `value`) without what `value`'s blocks mark as operational."""
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
