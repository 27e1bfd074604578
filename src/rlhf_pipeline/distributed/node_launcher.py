"""Run DeepSpeed's launcher of one machine without importing torch, which takes seconds.

    python -m rlhf_pipeline.distributed.node_launcher --world_info=... --module PROGRAM JOB

`deepspeed.launcher.launch` starts a process for each rank and waits for them. DeepSpeed's packages
import torch, but the four names that it uses do not need it: packages with only these names take
their place. A version of the launcher that uses further names gets DeepSpeed itself: it starts the
same ranks, some seconds later.
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
    try:
        _replace_packages()
        from deepspeed.launcher import launch
    except (ImportError, AttributeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]
        from deepspeed.launcher import launch
    launch.main()


def _replace_packages() -> None:
    spec = importlib.util.find_spec("deepspeed")  # finds the package and does not import it
    assert spec is not None and spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])

    def add(name: str, **names: object) -> None:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        vars(package).update(names)

    accelerator = SimpleNamespace(
        visible_devices_envs=lambda: [VISIBLE],
        set_visible_devices_envs=lambda environment, devices: environment.update(
            {VISIBLE: ",".join(map(str, devices))}
        ),
    )
    add("deepspeed")
    add("deepspeed.accelerator", get_accelerator=lambda: accelerator)
    add("deepspeed.utils", logger=logging.getLogger("DeepSpeed"))
    from deepspeed.utils import numa

    def show_from(level: str) -> None:
        logging.basicConfig(format="[%(asctime)s] [%(levelname)s] %(message)s", level=level.upper())

    names = {"get_numactl_cmd": numa.get_numactl_cmd, "set_log_level_from_string": show_from}
    vars(sys.modules["deepspeed.utils"]).update(names)


if __name__ == "__main__":
    main()
