"""The base model and its tokenizer: fetched, or a small one built."""

from .pipeline import create_pipeline as create_pipeline
from .spec import SPEC as SPEC
