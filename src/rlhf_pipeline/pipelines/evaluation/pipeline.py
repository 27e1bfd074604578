"""sft_model + ppo_model -> evaluation -> registration, and the same for another candidate."""

from kedro.pipeline import Node, Pipeline

from .nodes import evaluate, register


def create_pipeline(candidate: str = "ppo") -> Pipeline:
    """Nodes from left to right. PPO's have the plain names; those of another candidate say whose they are."""
    suffix, prefix = ("", "") if candidate == "ppo" else (f"_{candidate}", f"{candidate}_")
    return Pipeline(
        [
            Node(
                func=evaluate(f"evaluate{suffix}", candidate),
                inputs=[
                    "prepared_data",
                    "sft_model",
                    f"{candidate}_model",
                    "reward_model",
                    "params:evaluate",
                    "params:launch",
                    "params:seed",
                    "workspace",
                ],
                outputs=f"{prefix}evaluation",
                name=f"evaluate{suffix}",
            ),
            Node(
                func=register,
                inputs=["sft_model", f"{candidate}_model", f"{prefix}evaluation", "params:register", "project"],
                outputs=f"{prefix}registration",
                name=f"register{suffix}",
            ),
        ]
    )
