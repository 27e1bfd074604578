"""The Python interface: `from rlhf_pipeline import run`; see docs/python.md.

Every rank imports this package, so a name is imported from its module when it is first used.
"""

_PLACES = {
    "api": ("RunResults", "load_policy", "policy", "run", "runs"),
    "commands.artifacts": ("Policy",),
    "evaluation.report": ("Evaluation",),
    "evaluation.texts": ("evaluate",),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}
__all__ = [*_MODULES]  # `__init__.pyi` has the same names for type checkers


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
