import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

EARLIER_FORM = (
    "its recipe was written by an earlier version of rlhf-pipeline and cannot be compared"
)


def recipe_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], *, pending: Collection[str]
) -> list[str]:
    """The changes between two recipes of a stage (`fingerprint.recipe`), most likely causes first.

    `pending` inputs do not exist yet, so their content cannot be compared.
    """
    if old.get("form") != new["form"]:
        return [EARLIER_FORM]
    inputs = [name for name in _differing(old["inputs"], new["inputs"]) if name not in pending]
    code = _differing(old["code"], new["code"])
    return [
        *_changes(_settings(old), _settings(new)),
        *(f"input {name} {_fate(name, old['inputs'], new['inputs'])}" for name in inputs),
        *_changes(old["versions"], new["versions"]),
        *([f"code changed: {', '.join(code)}"] if code else []),
    ]


def distance(changes: Collection[str]) -> tuple[bool, int]:
    """Sorts recipes by their number of changes; those that cannot be compared come last."""
    return EARLIER_FORM in changes, len(changes)


def _settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    flags = {"base_model": "trust_remote_code", "launch": "deterministic"}
    found = {f"{block}.{name}": recipe.get(name, False) for block, name in flags.items()}
    others = {name: recipe[name] for name in ("seed", "processes")}
    return recipe["config"] | others | found


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """`ppo.kl.coef 0.1 -> 0.2`, for each value that differs."""
    for name in dict.fromkeys([*new, *old]):
        if not _differ(name, old, new):
            continue
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _changes(before, after, f"{place}{name}.")
        elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
            yield from _changes(_numbered(before), _numbered(after), f"{place}{name}.")
        else:
            yield f"{place}{name} {_shown(before, after)} -> {_shown(after, before)}"


def _shown(value: Any, other: Any) -> str:
    """A value. A list of blocks is shown without what all blocks of both lists share."""
    own, others = (each if isinstance(each, list) else [] for each in (value, other))
    if not own or not all(isinstance(block, Mapping) for block in own + others):
        return _value(value)
    fields = [set(map(_field, block.items())) for block in own + others]
    shared = {""} | (set.intersection(*fields) if others else set())
    texts = [" ".join(t for t in map(_field, each.items()) if t not in shared) for each in own]
    return f"[{', '.join(texts)}]"


def _field(item: tuple[str, Any]) -> str:
    return "" if item[1] is None else f"{item[0]} {_value(item[1])}"


def _numbered(values: list[Any]) -> dict[str, Any]:
    return {str(index): value for index, value in enumerate(values)}


def _differ(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return (name in old, old.get(name)) != (name in new, new.get(name))


def _value(value: Any, longest: int = 40) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _differing(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [name for name in sorted(old.keys() | new.keys()) if _differ(name, old, new)]


def _fate(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> str:
    if name in old and name in new:
        return "changed"
    return "is new" if name in new else "is gone"
