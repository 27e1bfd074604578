"""Run DeepSpeed's launcher of one machine without importing torch, which takes two seconds.

    python -m rlhf_pipeline.distributed.node_launcher --world_info=... --module PROGRAM JOB

`deepspeed.launcher.launch` starts a process for each rank and waits for them. It needs four names
of DeepSpeed's packages, and none of them needs torch, but the packages as a whole do. So this
module gives it packages that contain these names only.
"""

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""What `visible_devices_envs` of DeepSpeed's accelerators `cpu` and `cuda` contains."""


def main() -> None:
    """Run the launcher with the arguments of the command line."""
    spec = importlib.util.find_spec("deepspeed")  # finds the package and does not import it
    assert spec is not None and spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    add_package("deepspeed", root)
    add_package("deepspeed.accelerator", root / "accelerator", get_accelerator=accelerator)
    utils = add_package("deepspeed.utils", root / "utils", logger=logging.getLogger("DeepSpeed"))
    from deepspeed.utils import numa

    vars(utils).update(get_numactl_cmd=numa.get_numactl_cmd, set_log_level_from_string=set_level)
    from deepspeed.launcher import launch

    launch.main()


def add_package(name: str, folder: Path, **names: object) -> ModuleType:
    """Make a package that contains the given names; its modules are imported from the folder."""
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    vars(package).update(names)
    sys.modules[name] = package
    return package


def accelerator() -> SimpleNamespace:
    """The part of DeepSpeed's accelerators that names the devices of a rank."""

    def set_visible(environment: dict[str, str], devices: list[int | str]) -> None:
        environment[VISIBLE] = ",".join(map(str, devices))

    return SimpleNamespace(
        visible_devices_envs=lambda: [VISIBLE], set_visible_devices_envs=set_visible
    )


def set_level(level: str) -> None:
    """Show messages of DeepSpeed's logger from this level on."""
    logging.basicConfig(format="[%(asctime)s] [%(levelname)s] %(message)s", level=level.upper())


if __name__ == "__main__":
    main()
