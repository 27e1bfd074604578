"""The Python interface: `from rlhf_pipeline import run`; see docs/python.md.

Every rank imports this package, so a name is imported from its module when it is first used.
"""

__all__ = ["Evaluation", "RunResults", "evaluate", "load_policy", "policy", "run", "runs"]


def __getattr__(name: str) -> object:
    if name not in __all__:  # type checkers read `__init__.pyi`
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = "evaluation.judges" if name == "evaluate" else "api"
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
