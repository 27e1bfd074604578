from .pipeline import create_pipeline as create_pipeline
