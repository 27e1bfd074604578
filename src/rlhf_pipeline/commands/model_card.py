import json
import re
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import metadata_load
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rlhf_pipeline.commands.artifacts import Policy
from rlhf_pipeline.config.base_model import COMMIT
from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.runtime.hub import UNKNOWN, license_of
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.verdict.comparison import read_evaluation
from rlhf_pipeline.verdict.words import metric_rows, summary


def model_card(
    policy: Policy,
    digest: str,
    model: str,
    registered: tuple[str, dict[str, str]] | None,
    license_name: str,
    adapter_of: str | None,
) -> str:
    """The card in Markdown with YAML front matter; only what is recorded, else "unknown".

    `registered` has the version and the tags of the policy in the registry; `adapter_of` is the
    base model of an exported adapter.
    """
    version, tags = registered or (None, {})
    environment = Environment(  # noqa: S701 - Markdown; `_shown` escapes
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=_shown,
    )
    origins = [
        _origin(manifest)
        for manifest in policy.made_from.values()
        if manifest.stage in ("base_model", "teacher", "source")
    ]
    return environment.get_template("model_card.md.j2").render(
        title=f"{model} {policy.stage.upper()}" + (f", version {version}" if version else ""),
        policy=policy, digest=digest, license=license_name, origins=origins, leaves=leaves,
        evaluation=_evaluation(policy), adapter_of=adapter_of,
        verdict=json.loads(tags.get("rlhf.verdict", "null")),
    )  # fmt: skip


def _shown(value: object) -> str:
    """A value as a cell of a Markdown table that shows it literally.

    JSON is for the front matter and stays.
    """
    if isinstance(value, Markup):
        return value
    text = str(value).replace("&", "&amp;").replace("<", "&lt;")
    return "<br>".join(re.sub(r"([\\`*_\[\]|~$])", r"\\\1", text).splitlines())


def _origin(manifest: Manifest) -> dict[str, str | None]:
    """A base model, a teacher or a source of data: its name, id on the hub, identity and licence.

    A path of this machine is not shown.
    """
    kind: Literal["dataset", "model"] = "dataset"
    if manifest.stage != "source":
        given = manifest.config["base_model"]
        path, kind = given["path"], "model"
        hub = path if COMMIT in manifest.inputs else None
        name = Path(path).name if path else f"{given['architecture']['model_type']}, random weights"
    else:
        source = SourceConfig.model_validate(manifest.config["source"])
        path, name = source.path, source.label()
        hub = source.name if path is None and "/" in source.name else None
    license_name = license_of(kind, hub, manifest.inputs.get(COMMIT)) if hub else UNKNOWN
    readme = Path(path or "") / "README.md"
    if hub is None and path is not None and readme.is_file():
        license_name = str((metadata_load(readme) or {}).get("license", UNKNOWN))
    identity = ", ".join(f"{each} {digest}" for each, digest in manifest.inputs.items())
    return {
        "what": manifest.stage.replace("_", " ") if kind == "model" else "data",
        "name": hub or name,
        "hub": hub,
        "identity": identity or f"recipe {manifest.fingerprint}",
        "license": "made by rlhf-pipeline" if path is None and hub is None else license_name,
    }


def _evaluation(policy: Policy) -> dict[str, Any] | None:
    """The newest evaluation of the policy as a candidate, or else as SFT; none of version 1.1."""
    read = ((read_evaluation(f, earlier=True), name) for f, name in policy.evaluations)
    found = [(compared, name) for compared, name in read if "judges" in compared]
    if not found:
        return None
    own = (compared for compared, name in found if compared["candidate"] == name)
    compared = next(own, found[0][0])
    decoding = ", ".join(f"{name} {value}" for name, value in compared["decoding"].items())
    return compared | {
        "decoding": decoding,
        "policies": [*compared["policies"]],
        "summary": summary(compared),
        "rows": metric_rows(compared),
    }
