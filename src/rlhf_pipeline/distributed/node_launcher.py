"""Run DeepSpeed's launcher of one machine without importing torch, which takes seconds.

    python -m rlhf_pipeline.distributed.node_launcher --world_info=... --module PROGRAM JOB

`deepspeed.launcher.launch` starts a process for each rank and waits for them. It uses four names of
DeepSpeed's packages. The packages import torch, but these four names do not need it. So this module
puts packages with only these names in their place. A version of the launcher that uses further
names gets DeepSpeed itself: it starts the same ranks, some seconds later.
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
    accelerator = SimpleNamespace(
        visible_devices_envs=lambda: [VISIBLE],
        set_visible_devices_envs=lambda environment, devices: environment.update(
            {VISIBLE: ",".join(map(str, devices))}
        ),
    )
    _add_package("deepspeed", root)
    _add_package("deepspeed.accelerator", root / "accelerator", get_accelerator=lambda: accelerator)
    utils = _add_package("deepspeed.utils", root / "utils", logger=logging.getLogger("DeepSpeed"))
    from deepspeed.utils import numa

    vars(utils).update(get_numactl_cmd=numa.get_numactl_cmd, set_log_level_from_string=_show_from)


def _add_package(name: str, folder: Path, **names: object) -> ModuleType:
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    vars(package).update(names)
    sys.modules[name] = package
    return package


def _show_from(level: str) -> None:
    logging.basicConfig(format="[%(asctime)s] [%(levelname)s] %(message)s", level=level.upper())


if __name__ == "__main__":
    main()
