"""Libraries that are hidden from an import."""

import sys

import pytest

from rlhf_pipeline.runtime.imports import hidden


def test_a_hidden_library_can_be_imported_later_and_an_imported_one_is_never_hidden(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with hidden("colorsys", "json"):
        import json  # noqa: F401

        with pytest.raises(ImportError, match="colorsys"):
            import colorsys
    import colorsys

    assert colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0)
