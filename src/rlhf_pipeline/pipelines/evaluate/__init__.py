"""Comparison of a candidate policy with the SFT baseline."""

from .pipeline import create_pipeline as create_pipeline
from .spec import SPEC as SPEC
