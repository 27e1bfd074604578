"""The base model and its tokenizer: fetched, or a small one built."""

from .nodes import SPEC as SPEC
from .pipeline import create_pipeline as create_pipeline
