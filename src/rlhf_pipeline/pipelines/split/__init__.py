"""The split: disjoint, tokenized rows for each phase."""

from .pipeline import create_pipeline as create_pipeline
from .spec import SPEC as SPEC
