"""The commands `kedro run` and `kedro rlhf ...` of rlhf-pipeline."""

from rlhf_pipeline.cli import cli as cli
from rlhf_pipeline.cli import run as run
