from .nodes import SPEC as SPEC
from .pipeline import create_pipeline as create_pipeline
