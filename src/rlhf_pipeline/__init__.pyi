from rlhf_pipeline.api import RunResults as RunResults
from rlhf_pipeline.api import load_policy as load_policy
from rlhf_pipeline.api import policy as policy
from rlhf_pipeline.api import run as run
from rlhf_pipeline.api import runs as runs
from rlhf_pipeline.evaluation.judges import evaluate as evaluate
from rlhf_pipeline.verdict.words import Evaluation as Evaluation
