from .nodes import CHAMPION as CHAMPION
from .nodes import SPEC as SPEC
from .pipeline import create_pipeline as create_pipeline
