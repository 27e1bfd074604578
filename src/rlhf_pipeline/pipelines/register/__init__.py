"""Registration of both policies in MLflow's model registry."""

from .pipeline import create_pipeline as create_pipeline
