"""The layers of the configuration: base, the embedded default, the environment, local, --params."""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

from kedro.config import MissingConfigException, OmegaConfigLoader
from omegaconf import DictConfig, OmegaConf

from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.errors import ConfigError, short_path, suggestion

LOCAL = "local"
RUNTIME = "--params"
PACKAGED = Path(__file__).parents[1] / "conf"
"""The configuration of the package."""

EMBEDDED = {"base_model.path": "embedded/model", "split.sources": "embedded/data"}
"""Layers of parameters that suit only the embedded model, or only the embedded data. The loader
leaves a layer out if another layer sets the parameter."""

LAYERS = ("base", "embedded", "local")
"""Folders of conf/ that `--env` cannot choose; Kedro reads each of them on its own."""


class LayeredConfigLoader(OmegaConfigLoader):
    """Kedro's loader with these layers of parameters, of which a later one wins:

        conf/base
        conf/embedded/model      unless another layer sets base_model.path
        conf/embedded/data       unless another layer sets split.sources
        conf/ENVIRONMENT         with --env=ENVIRONMENT
        conf/local
        --params

    Other files have the layers base, ENVIRONMENT and local. In globals.yml the environment wins
    over conf/local, so that a smoke test never writes among real results.

    The resolver `suffix` gives -ENVIRONMENT, -embedded for the embedded model, or nothing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._origins: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        super().__init__(*args, **kwargs)

    def __getitem__(self, key: str) -> dict[str, Any]:
        """Load and merge the layers of one kind of configuration."""
        if key in self.data or key not in self.config_patterns:
            return dict(super().__getitem__(key))
        if key == "parameters":
            self._register_runtime_params_resolver()
            return self._parameters()
        try:
            config = dict(super().__getitem__(key))  # of base and the environment; local by default
        except MissingConfigException:
            if not self._files(LOCAL, key):
                raise
            config = {}  # only conf/local has such a file, in most cases credentials.yml
        if self._environment == LOCAL:
            return config
        order = [LOCAL, self._environment] if key == "globals" else [LOCAL]
        for layer in order:
            config |= self._merge_and_resolve(key, self._files(layer, key))
        return config

    def _get_conf_env_path(self, env: str) -> str:
        own = own_layer(self.conf_source, env)
        return str(super()._get_conf_env_path(env) if own is None else own)

    def _is_hidden(self, path_str: str) -> bool:
        """Whether Kedro skips a file. The folders above the configuration may be hidden."""
        return any(part.startswith(".") for part in Path(path_str).parts[-2:])

    def _read_dir_configs(self, conf_path: str, *args: Any) -> dict[Path, DictConfig]:
        """The files of a folder; only base and the environment must exist."""
        optional = [self._get_conf_env_path(layer) for layer in (LOCAL, *EMBEDDED.values())]
        if conf_path in optional and not self._fs.isdir(conf_path):
            return {}
        return cast(dict[Path, DictConfig], super()._read_dir_configs(conf_path, *args))

    def origin(self, name: str) -> str | None:
        """The file that sets a parameter, or "--params"; None: nothing sets it."""
        return self._origins.get(name)

    def chosen(self) -> dict[str, Any]:
        """The parameters that the environment, conf/local or --params set, by dotted name."""
        defaults = tuple(self._get_conf_env_path(layer) for layer in ("base", *EMBEDDED.values()))
        return {
            name: self._values[name]
            for name, origin in self._origins.items()
            if name in self._values and not str(Path(origin).absolute()).startswith(defaults)
        }

    @property
    def _environment(self) -> str:
        return str(self.env or self.default_run_env)

    def _refuse_unread(self) -> None:
        """Raise ConfigError for a YAML file of the user's layers that nothing reads."""
        patterns = [pattern for found in self.config_patterns.values() for pattern in found]
        base = Path(self._get_conf_env_path("base"))
        for layer in (self._environment, LOCAL):
            for file in sorted(Path(self._get_conf_env_path(layer)).glob("*.y*ml")):
                # A plugin of Kedro reads a file that the base has, too.
                is_read = any(fnmatch(file.name, pattern) for pattern in (".*", *patterns))
                if not is_read and not (base / file.name).is_file():
                    hint = suggestion(file.name, (f"{key}.yml" for key in self.config_patterns))
                    raise ConfigError(
                        f"{short_path(file)} is not read{hint}. Fix: rename it to catalog*, "
                        "parameters*, credentials* or globals.yml, or remove it"
                    )

    def _parameters(self) -> dict[str, Any]:
        self._refuse_unread()
        names = dict.fromkeys(("base", self._environment, LOCAL))
        base, *others = (self._files(name, "parameters") for name in names)
        others.append({RUNTIME: OmegaConf.create(dict(self.runtime_params))})
        set_by_user = [config for files in (base, *others) for config in files.values()]
        embedded = [
            self._files(layer, "parameters")
            for place, layer in EMBEDDED.items()
            if all(OmegaConf.select(config, place) is None for config in set_by_user)
        ]
        files = {name: each for layer in (base, *embedded, *others) for name, each in layer.items()}
        has_path = False
        for config in reversed(files.values()):
            if has_path and "base_model" in config:  # a model that is built gives way
                for name in ("architecture", "vocab_size"):
                    config.base_model.pop(name, None)
            has_path |= OmegaConf.select(config, "base_model.path") is not None
        suffix = "" if has_path else "-embedded"
        if self._environment not in (self.base_env, LOCAL):
            suffix = f"-{self._environment}"
        OmegaConf.register_new_resolver("suffix", lambda: suffix, replace=True)
        for name, config in files.items():
            places = leaves(cast(dict[str, Any], OmegaConf.to_container(config)))
            self._origins |= {place: short_path(name) for place, _ in places}
        merged = OmegaConf.unsafe_merge(*files.values())
        parameters = cast(dict[str, Any], OmegaConf.to_container(merged, resolve=True))
        self._values = dict(leaves(parameters))
        return parameters

    def _check_duplicates(self, key: str, config_per_file: dict[Path, Any]) -> None:
        for path, config in config_per_file.items():
            if not isinstance(config, DictConfig):
                raise ConfigError(
                    f"{short_path(path)}: found a list, expected parameters by name. Fix: write "
                    "`name: value` lines"
                )
        super()._check_duplicates(key, config_per_file)

    def _files(self, layer: str, key: str) -> dict[str, DictConfig]:
        folder = self._get_conf_env_path(layer)
        found = self._read_dir_configs(folder, self.config_patterns[key], key, set())
        return {str(path): found[path] for path in sorted(found)}


def check_environment(conf: Path, name: str | None) -> None:
    """Raise ConfigError if the configuration has no folder for the option `--env`."""
    if name is None or own_layer(str(conf), name) is not None:
        return
    if conf.is_dir() and not (conf / name).is_dir():
        known = sorted(
            path.name for path in conf.iterdir() if path.is_dir() and path.name not in LAYERS
        )
        raise ConfigError(
            f"--env: found {name!r}{suggestion(name, known)}; the environments, which are folders "
            f"of {conf.name}/, are {', '.join(known)}"
        )


def own_layer(conf: str, layer: str) -> Path | None:
    """The user's folder of a layer beside the configuration of the package; None: not the user's.

    `local` is always the user's. An environment in conf/ of the current folder, for example a
    preset, takes the place of one in the package.
    """
    own = Path("conf", layer).absolute()
    return own if Path(conf) == PACKAGED and (layer == LOCAL or own.is_dir()) else None
