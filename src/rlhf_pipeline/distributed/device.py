"""The device of this rank. All programs ask here, so torch and DeepSpeed never differ."""

import os

import torch
from deepspeed.accelerator import get_accelerator

from rlhf_pipeline.errors import StageError


def on_gpu() -> bool:
    """Whether the ranks compute on GPUs: DeepSpeed's decision, which DS_ACCELERATOR overrides.

    The driver sets the variable. `torch.cuda.is_available()` may be true although the user hid the
    GPUs: DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES for its ranks, on a CPU as well.
    """
    return bool(get_accelerator().device_name() == "cuda")


def take_device() -> torch.device:
    """The device of this rank: the GPU with its local number, or the CPU. Makes it the current one.

    Raises StageError if torch does not find that GPU.
    """
    if not on_gpu():
        return own_device()
    number, found = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if number >= found:
        raise StageError(
            f"torch: found {found} GPUs with "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}, expected at least "
            f"{number + 1}, one for each rank. Fix: check the driver with `nvidia-smi` and torch "
            "with `python -m torch.utils.collect_env`; or empty CUDA_VISIBLE_DEVICES to train on "
            "the CPU"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def own_device() -> torch.device:
    """The device that `take_device` has taken."""
    return torch.device(get_accelerator().current_device_name())
