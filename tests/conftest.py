"""Shared fixtures: small models and policies, a machine, and a full run of the project."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed's import, which decides for the process

import gc
import importlib
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import dynaconf.loaders.py_loader
import dynaconf.utils.files
import pytest
import warm
from filelock import FileLock
from ports import reserved_port

from rlhf_pipeline.stages.launch import node_program

pytest_plugins = ["rank_fixtures", "rank_lab", "s3_fixtures"]

PROJECT = Path(__file__).parents[1]
KEDRO = str(Path(sys.executable).with_name("kedro"))


gc.set_threshold(0)  # until `pytest_collection_finish`: imports make no garbage


def pytest_configure(config):
    """Refuse to run on personal parameters, which every command of the tests would read."""
    own = [path.name for path in (PROJECT / "conf" / "local").glob("[!.]*")]
    if own:
        pytest.exit(f"conf/local: found {', '.join(own)}, expected no file. Fix: move them away", 4)


def pytest_make_parametrize_id(val):
    """Shorten names of tests with up to three million characters, which each report contains."""
    if isinstance(val, str | bytes) and len(val) > 100:
        return f"{ascii(val[:60])[1:-1]}..."


CHANGE_THE_PROJECT = {"test_full.py", "test_labelling.py", "test_published_inputs.py"}
"""Files whose tests run commands in the full run of `project`; the others read a copy of it."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items):
    """Run the tests of a file, and all tests that change the full run, in the same worker.

    The first worker makes the full run while the second one runs slow tests that need no full run.
    Quick tests come last, so the workers end at about the same time.
    """
    slow, reads_the_run = set(), set()
    for item in items:
        name = item.path.name
        group = "project" if name in CHANGE_THE_PROJECT else name
        item.add_marker(pytest.mark.xdist_group(group))
        if item.get_closest_marker("slow") is not None:
            slow.add(group)
        if "project" in item.fixturenames:
            reads_the_run.add(group)

    def turn(item) -> int:
        group = item.get_closest_marker("xdist_group").args[0]
        return 0 if group == "project" else 3 if group not in slow else 1 + (group in reads_the_run)

    items.sort(key=turn)


def frames() -> list[SimpleNamespace]:
    """What dynaconf, which reads Kedro's settings, needs of `inspect.stack`: names of files.

    `inspect.stack` also looks for the source of each frame in each imported module, which takes a
    fifth of a second with all that tests import.
    """
    frame, found = sys._getframe(1), []
    while frame is not None:
        found.append(SimpleNamespace(filename=frame.f_code.co_filename))
        frame = frame.f_back
    return found


for module in (dynaconf.utils.files, dynaconf.loaders.py_loader):
    module.inspect = SimpleNamespace(stack=frames)


def pytest_collection_finish():
    """Spare garbage collections the million objects of the imported libraries."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_runtest_teardown():
    """Spare them what later imports made, too: programs collect the garbage of each model."""
    if len(gc.get_objects()) > 20_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _exact_products():
    """A model in fp32 on a pretend GPU sets TF32 for the whole process, a rank sets oneDNN."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_float32_matmul_precision("highest")
    if (products := sys.modules.get("rlhf_pipeline.distributed.products")) is not None:
        products.use_onednn(False)


@pytest.fixture(autouse=True)
def _no_ambient_tracking(monkeypatch, tmp_path):
    """Keep tests out of the MLflow store of the project."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level BPE tokenizer of 288 tokens with special tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from rlhf_pipeline.data.template import HUMAN_ASSISTANT_TEMPLATE

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=288, special_tokens=["<|pad|>", "<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    text = "\n\nHuman: what is the colour of snow?\n\nAssistant: the colour of snow is white."
    backend.train_from_iterator([text], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>"
    )
    made.chat_template = HUMAN_ASSISTANT_TEMPLATE
    return made


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY = SIZES | {"intermediate_size": 64, "max_position_embeddings": 128, "initializer_range": 0.2}
GROUPED = ROTARY | {"num_key_value_heads": 2, "attention_dropout": 0.1}
WINDOWED = GROUPED | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
LINEAR = GROUPED | {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
ARCHITECTURES = {
    "opt": SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 16, "max_position_embeddings": 128,
                    "init_std": 0.2, "attention_dropout": 0.1, "layerdrop": 0.1},
    "llama": ROTARY | {"attention_dropout": 0.1},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2},
    "gpt_neox": ROTARY | {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2,
              "attention_dropout": 0.1, "hidden_dropout": 0.1},
    "qwen2": ROTARY | {"num_key_value_heads": 2, "tie_word_embeddings": True,
                       "attention_dropout": 0.1},
    "qwen3": GROUPED | {"head_dim": 16},
    "mistral": GROUPED,
    "olmo3": WINDOWED,
    "smollm3": GROUPED | {"no_rope_layers": [1, 0]},
    "gemma3_text": WINDOWED | {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma4_text": WINDOWED | {"head_dim": 16, "hidden_size_per_layer_input": 8},
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                            "shared_expert_intermediate_size": 16},
    "lfm2": ROTARY | {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"],
                      "block_auto_adjust_ff_dim": False},
    "granitemoehybrid": GROUPED | {"layer_types": ["linear_attention", "full_attention"],
                                   "shared_intermediate_size": 32, "num_local_experts": 4,
                                   "num_experts_per_tok": 2, "mamba_n_heads": 4,
                                   "mamba_d_state": 8},
}  # fmt: skip
"""Fields of a tiny model of each family, with dropout if the family has it, and with weights large
enough to reveal a wrong position or mask."""


@pytest.fixture(scope="session", params=ARCHITECTURES)
def family(request):
    """Each model type."""
    return request.param


@pytest.fixture(scope="session")
def architecture():
    """Returns `base_model.architecture` of a tiny model, by model type."""
    return lambda model_type: {"model_type": model_type, **ARCHITECTURES[model_type]}


@pytest.fixture(scope="session")
def make_model(tokenizer, tmp_path_factory):
    """Saves tiny random models, by model type and seed; `vocabulary` may add unused rows.

    Further arguments replace fields of `ARCHITECTURES`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlhf_pipeline.config.base_model import BaseModelConfig
    from rlhf_pipeline.data.token_contract import TokenContract
    from rlhf_pipeline.models.base_model import as_loaded

    def make(
        model_type: str = "llama", seed: int = 0, vocabulary: int | None = None, **changes: int
    ) -> Path:
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp(model_type)
        fields = {"model_type": model_type, **ARCHITECTURES[model_type], **changes}
        own = as_loaded(tokenizer, BaseModelConfig(architecture=fields, vocab_size=300), folder)
        config = AutoConfig.for_model(
            **fields, vocab_size=vocabulary or len(own), bos_token_id=None,
            pad_token_id=own.pad_token_id, eos_token_id=own.eos_token_id,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        own.save_pretrained(folder)
        TokenContract.of(own).write(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def publish():
    """Turns the folder of a model into an artifact of a stage; returns the folder."""
    from rlhf_pipeline.runtime.manifest import Manifest, file_entries

    def publish(folder: Path, stage: str = "ppo") -> Path:
        files = file_entries(folder)
        Manifest(stage, f"{stage:0<64}", 7, {}, {}, {"torch": "2"}, {}, files).write(folder)
        return folder

    return publish


@pytest.fixture(scope="session")
def published(make_model, publish):
    """A policy that PPO could have made: a Llama of 128 positions and 288 tokens, 12 rows more."""
    return publish(make_model("llama", vocabulary=300))


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi in front of PATH that lists that many GPUs; None: its driver is broken."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def install(gpus):
        listing = "".join(
            f"GPU {number}: NVIDIA A100-SXM4-40GB (UUID: GPU-8932f937-{number})\n"
            f"  MIG 3g.20gb Device 0: (UUID: MIG-{number}-0)\n"
            f"  MIG 3g.20gb Device 1: (UUID: MIG-{number}-1)\n"
            for number in range(gpus or 0)
        )
        text, code = {None: ("NVIDIA-SMI has failed", 9), 0: ("No devices were found", 6)}.get(
            gpus, (listing, 0)
        )
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho {shlex.quote(text)}\nexit {code}\n")
        program.chmod(0o755)

    return install


@pytest.fixture(scope="session")
def bubblewrap():
    """Skips a test of the sandbox where there is no bubblewrap, or it gets no namespaces."""
    if (program := shutil.which("bwrap")) is None:
        pytest.skip("needs bubblewrap: apt-get install bubblewrap")
    command = [program, "--unshare-all", "--ro-bind", "/", "/", "true"]
    tried = subprocess.run(command, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"bubblewrap does not work on this machine: {tried.stderr.strip()}")


def end_group(leader: subprocess.Popen) -> None:
    """Kill a process and its group, and wait for the process."""
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


@pytest.fixture
def start_server(tmp_path):
    """Starts a server on a free port and waits until it answers at a path; returns its address.

    The server ends with the test.
    """
    log = tmp_path / "server.log"
    with ExitStack() as cleanup:

        def start(command: list[str], answers_at: str, environment: dict[str, str]) -> str:
            port = cleanup.enter_context(reserved_port())
            with log.open("w") as output:
                server = subprocess.Popen(
                    [*command, "--port", str(port), "--workers", "1"],
                    env=os.environ | environment, cwd=tmp_path, start_new_session=True,
                    stdout=output, stderr=output,
                )  # fmt: skip
            cleanup.callback(end_group, server)
            deadline = time.monotonic() + 600  # only for a server that hangs
            while server.poll() is None and time.monotonic() < deadline:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{answers_at}", timeout=10):
                        return f"http://127.0.0.1:{port}"
                except OSError:
                    time.sleep(0.2)
            pytest.fail(f"the server at port {port} does not answer:\n{log.read_text()}")

        yield start


SECRETS = {
    name: f"canary-{name}"
    for name in "HF_TOKEN AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY MLFLOW_TRACKING_USERNAME "
    "MLFLOW_TRACKING_PASSWORD MLFLOW_TRACKING_TOKEN WANDB_API_KEY".split()
}
"""Values that no run may write anywhere."""


class Disk:
    """A file system in memory; a filler file controls its free space."""

    def __init__(self, path: Path, size: int = 8 * 2**20) -> None:
        self.path, self.filler = path, path / "filler"
        path.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={size}", "none"]
        mounted = subprocess.run(
            ["mount", *options, str(path)], capture_output=True, text=True, check=False
        )
        if mounted.returncode != 0:
            pytest.skip(f"a file system in memory cannot be mounted: {mounted.stderr.strip()}")

    def leave(self, free: int) -> None:
        """Fill the disk up to `free` bytes."""
        with self.filler.open("ab") as file:
            os.posix_fallocate(file.fileno(), file.tell(), shutil.disk_usage(self.path).free - free)

    def make_room(self) -> None:
        self.filler.unlink()

    def remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path):
    """A small file system; skips the test if it cannot be mounted."""
    disk = Disk(tmp_path / "disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk.path)], check=True)


class Project:
    """The project with a separate data folder and tracking store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.secrets = SECRETS
        """Variables of the environment of a run."""
        self.uri = f"sqlite:///{root}/mlflow.db"

    def kedro(self, *arguments, params="", env="tiny", check=True, command="run") -> str:
        # Values are YAML. Quotes keep line breaks, and " #" does not start a comment.
        given = f"root={json.dumps(str(self.root))}" + f",{params}" * bool(params)
        words = [KEDRO, *command.split(), f"--env={env}", *arguments, f"--params={given}"]
        environment = os.environ | self.secrets
        environment |= {"MLFLOW_TRACKING_URI": self.uri, "COLUMNS": "100"}
        code, output = warm.output_of(words, environment, PROJECT)
        assert (code == 0) == check, output
        return output

    def versions(self, path: str) -> list[Path]:
        return sorted(each for each in (self.root / path).iterdir() if not each.is_symlink())

    def newest(self, path: str) -> Path:
        return self.versions(path)[-1] / Path(path).name

    def recipes(self, stage: str) -> list[Path]:
        return sorted((self.root / "07_workspace" / stage).iterdir())

    def client(self):
        from mlflow import MlflowClient

        return MlflowClient(self.uri)

    def runs(self):
        client = self.client()
        return client.search_runs([client.get_experiment_by_name("rlhf-pipeline").experiment_id])


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a module of `benchmarks/`."""
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    return importlib.import_module


@pytest.fixture(scope="session")
def shared(tmp_path_factory, request):
    """A temporary folder of all workers."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture(scope="session")
def empty_database(shared):
    """A tracking store to copy, made by one worker, because its tables take a second."""
    from rlhf_pipeline.tracking.store import connect

    folder = shared / "database"
    database = folder / "mlflow.db"
    with FileLock(shared / "database.lock"):
        if not database.exists():
            connect(f"sqlite:///{database}", folder)
    return database


@pytest.fixture(scope="session")
def new_project(empty_database):
    """Makes a `Project` in a folder, with an empty tracking store."""

    def make(root: Path) -> Project:
        root.mkdir(parents=True, exist_ok=True)
        shutil.copy(empty_database, root / "mlflow.db")
        return Project(root)

    return make


@pytest.fixture(scope="session")
def _full_run(shared):
    """Two folders with the same full run, one to change and one to read, made by one worker."""
    # A shell would split or execute the name.
    name = 'it\'s a "root"\nof $HOME; touch `executed` & # 100% <é>\\'
    root, copy, output = shared / "project" / name, shared / "copy" / name, shared / "project.log"
    with FileLock(shared / "project.lock"):
        if not output.exists():
            root.mkdir(parents=True, exist_ok=True)
            printed = Project(root).kedro("--pipeline=full")
            shutil.copytree(root, copy, symlinks=True)
            output.write_text(printed)
    return {True: root, False: copy}, output.read_text()


@pytest.fixture(scope="module")
def project(_full_run, request):
    """A full run of the environment `tiny` by the command line, shared by all tests."""
    roots, output = _full_run
    project = Project(roots[request.path.name in CHANGE_THE_PROJECT])
    project.output = output
    return project


@pytest.fixture(scope="session", autouse=True)
def _own_interpreter_first():
    """Programs are launched from the environment of the tests."""
    assert Path(sys.executable).with_name("deepspeed").exists(), (
        "install the project first: make test"
    )


@pytest.fixture(scope="session", autouse=True)
def _warm_template(tmp_path_factory, request):
    """Workers of pytest-xdist share a template of the programs; a run without them starts cold."""
    if hasattr(request.config, "workerinput"):
        warm.open_template(tmp_path_factory.getbasetemp().parent, os.getppid())


@pytest.fixture(autouse=True)
def _warm_programs(monkeypatch, request):
    if request.node.get_closest_marker("cold"):
        monkeypatch.setattr(warm, "address", "")
    elif warm.address:
        monkeypatch.setattr(node_program, "start", warm.start)


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """A stand-in for the lm-evaluation-harness, which does not know "bad"; what it was asked."""
    calls, package = tmp_path / "asked", tmp_path / "packages" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        f"import sys, time\nopen({str(calls)!r}, 'a').write(sys.argv[-1] + '\\n')\n"
        "time.sleep(99 * ('slow' in sys.argv[-1]))\n"
        "sys.exit('Tasks not found: bad' if 'bad' in sys.argv[-1] else 0)\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)
    return lambda: calls.read_text().splitlines() if calls.is_file() else []
