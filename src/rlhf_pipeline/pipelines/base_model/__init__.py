"""Base model: fetched, or built small, with its tokenizer."""

from .pipeline import create_pipeline as create_pipeline
from .spec import SPEC as SPEC
