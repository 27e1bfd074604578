"""Split: disjoint, tokenized sets of rows for every phase."""

from .pipeline import create_pipeline as create_pipeline
from .spec import SPEC as SPEC
