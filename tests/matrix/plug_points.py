"""The plug points of frameworks in their newest releases: `python -m tests.matrix.plug_points`, from a checkout.

Each adapter in `plugins/` replaces or calls some functions of its framework. This reads those functions in the
source of the framework's newest release, and says in a sentence what moved. Nothing is installed, imported or run, so
neither an accelerator nor the framework's dependencies are needed. The status is 1 if something moved.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PLUGINS = Path(__file__).parents[2] / "plugins"
HOMES = {
    "deepspeed": "snapshot_deepspeed.adapter", "megatron_bridge": "snapshot_megatron.bridge",
    "verl": "snapshot_publish.verl", "vllm": "snapshot_publish.vllm",
}  # fmt: skip
"""Adapter -> its module, if that is not one of `snapshot_trainers`."""


def home_of(adapter: str) -> str:
    """Return the module of an adapter."""
    return HOMES.get(adapter, f"snapshot_trainers.{adapter}")


def known(adapter: str, table: str = "METHODS", without: Sequence[str] = ()) -> dict[str, Sequence[str] | int | None]:
    """Return what an adapter itself checks: a table in its source, so that its framework need not be here."""
    path = PLUGINS.joinpath(*home_of(adapter).split(".")).with_suffix(".py")
    for each in ast.parse(path.read_text()).body:
        if isinstance(each, ast.Assign) and [getattr(target, "id", "") for target in each.targets] == [table]:
            found = ast.literal_eval(each.value).items()
            return {
                name: taken if isinstance(taken, int) else [each for each in taken if each != "self"]
                for name, taken in found
                if name not in without
            }
    raise LookupError(f"{path} has no table {table}")


@dataclass(frozen=True, slots=True)
class PlugPoint:
    """Functions of one class, or of one module, of a framework."""

    package: str
    """Name on the index."""
    file: str
    owner: str
    """The class; empty for functions of the module."""
    functions: Mapping[str, Sequence[str] | int | None]
    """Function -> its first parameters, their number, or None if only its name counts. Without `self`."""
    adapter: str
    """The adapter that uses it: see `home_of`."""


TITAN = "torchtitan/components/checkpointer"
TORCHDATA = "torchdata/stateful_dataloader"
VLLM = "vllm/distributed/weight_transfer"
POINTS = (
    PlugPoint("transformers", "transformers/trainer.py", "Trainer", known("transformers", "_HOOKS"), "transformers"),
    PlugPoint(
        "accelerate", "accelerate/accelerator.py", "Accelerator",
        {"prepare": None, "register_for_checkpointing": None, "load_state": ("input_dir",)}, "accelerate",
    ),
    PlugPoint("peft", "peft/mapping_func.py", "", {"get_peft_model": ("model", "peft_config")}, "transformers"),
    PlugPoint("trl", "trl/trainer/sft_trainer.py", "SFTTrainer", {"__init__": None}, "transformers"),
    PlugPoint("trl", "trl/trainer/dpo_trainer.py", "DPOTrainer", {"__init__": None}, "transformers"),
    PlugPoint(
        "lightning", "lightning/fabric/plugins/io/torch_io.py", "TorchCheckpointIO",
        {"save_checkpoint": ("checkpoint", "path", "storage_options"), "remove_checkpoint": ("path",)}, "lightning",
    ),
    PlugPoint(
        "deepspeed", "deepspeed/runtime/checkpoint_engine/checkpoint_engine.py", "CheckpointEngine",
        {"create": ("info",), "save": ("state_dict", "path"), "load": ("path", "map_location"), "commit": ("info",)},
        "deepspeed",
    ),
    PlugPoint(
        "ray", "ray/train/v2/api/train_fn_utils.py", "", {"report": ("metrics", "checkpoint", "checkpoint_dir_name")},
        "ray",
    ),
    PlugPoint(
        "nemo-automodel", "nemo_automodel/components/checkpoint/checkpointing.py", "Checkpointer",
        known("automodel", "_HOOKS"), "automodel",
    ),
    PlugPoint(
        "megatron-bridge", "megatron/bridge/training/checkpointing.py", "DefaultCheckpointManager",
        {"save": None, "load": None, "finalize_async_saves": None}, "megatron_bridge",
    ),
    PlugPoint(
        "mosaicml", "composer/core/callback.py", "Callback",
        {"init": ("state", "logger"), "batch_checkpoint": ("state", "logger"), "epoch_checkpoint": ("state", "logger"),
         "iteration_checkpoint": ("state", "logger"), "fit_end": ("state", "logger"), "post_close": ()}, "composer",
    ),
    PlugPoint(
        "mosaicml", "composer/utils/checkpoint.py", "",
        {"_torch_load_with_validation": ("checkpoint_filepath", "map_location")}, "composer",
    ),
    PlugPoint("torchft", "torchft/checkpointing/transport.py", "CheckpointTransport", known("torchft"), "torchft"),
    PlugPoint(
        "torchtune", "torchtune/training/checkpointing/_checkpointer.py", "DistributedCheckpointer",
        {"save_checkpoint": None, "load_checkpoint": None}, "torchtune",
    ),
    PlugPoint(
        "torchdata", f"{TORCHDATA}/stateful_dataloader.py", "StatefulDataLoader",
        {"state_dict": (), "load_state_dict": ("state_dict",)}, "torchdata",
    ),
    PlugPoint(
        "torchdata", f"{TORCHDATA}/sampler.py", "StatefulDistributedSampler",
        {"state_dict": (), "load_state_dict": ("state_dict",)}, "torchdata",
    ),
    PlugPoint("torchtitan", f"{TITAN}/dcp.py", "CheckpointManager", known("torchtitan"), "torchtitan"),
    PlugPoint(
        "torchtitan", f"{TITAN}/base.py", "BaseCheckpointManager",
        {"_save": ("curr_step", "last_step"), "_load": ("step",), "_maybe_wait_for_staging": (),
         "_wait_for_saving": (), "_close": ()},
        "torchtitan_manager",
    ),
    PlugPoint(
        "verl", "verl/checkpoint_engine/base.py", "CheckpointEngine",
        known("verl", without=["get_weights"]),
        "verl",
    ),
    PlugPoint(
        "verl", "verl/utils/checkpoint/fsdp_checkpoint_manager.py", "FSDPCheckpointManager", known("verl_manager"),
        "verl_manager",
    ),
    PlugPoint(
        "skyrl", "skyrl/backends/skyrl_train/distributed/fsdp_strategy.py", "FSDPStrategy",
        known("skyrl", without=["save_hf_configs"]), "skyrl",
    ),
    PlugPoint("vllm", f"{VLLM}/base.py", "WeightTransferEngine", known("vllm", "OF_WORKER"), "vllm"),
    PlugPoint("vllm", f"{VLLM}/base.py", "TrainerWeightTransferEngine", known("vllm", "OF_TRAINER"), "vllm"),
    PlugPoint(
        "vllm", f"{VLLM}/factory.py", "WeightTransferEngineFactory",
        {"register_engine": ("name", "module_path_or_cls", "class_name")}, "vllm_plugin",
    ),
)  # fmt: skip


class Release:
    """The Python files of a downloaded release: a wheel, or a source distribution."""

    def __init__(self, path: Path) -> None:
        self._wheel = zipfile.ZipFile(path) if path.suffix == ".whl" else None
        self._archive = tarfile.open(path) if self._wheel is None else None  # noqa: SIM115 - `close` closes it
        if self._wheel is not None:
            self._files = {name: name for name in self._wheel.namelist() if name.endswith(".py")}
        else:
            assert self._archive is not None
            names = [each.name for each in self._archive.getmembers() if each.isfile() and each.name.endswith(".py")]
            below = [(name.partition("/")[2], name) for name in names]
            self._files = {short.removeprefix("src/"): name for short, name in below}
        self.version = path.name.split("-")[1].removesuffix(".tar.gz")

    def source(self, file: str) -> str | None:
        """Return the text of a file, or None if there is none."""
        name = self._files.get(file)
        if name is None:
            return None
        if self._wheel is not None:
            return self._wheel.read(name).decode(errors="replace")
        assert self._archive is not None
        found = self._archive.extractfile(name)
        return None if found is None else found.read().decode(errors="replace")

    def files_with(self, word: str) -> Iterator[str]:
        """Yield the files that define a class or function of a name."""
        for file in self._files:
            text = self.source(file) or ""
            if (f"class {word}" in text or f"def {word}(" in text) and _find(text, word) is not None:
                yield file

    def close(self) -> None:
        """Close the file."""
        for each in (self._wheel, self._archive):
            if each is not None:
                each.close()


def _find(text: str, name: str) -> ast.AST | None:
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return None
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return next((each for each in body if isinstance(each, kinds) and each.name == name), None)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[tuple[str, bool]]:
    """Return the names of the parameters without `self`, and whether each has a default."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    first = len(plain) - len(given.defaults)
    found = [(each.arg, at >= first) for at, each in enumerate(plain)]
    found += [(each.arg, value is not None) for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [each for each in found if each[0] not in ("self", "cls")]


def moved(release: Release, point: PlugPoint) -> list[str]:
    """Return a sentence for each function that is not as the adapter knows it."""
    where = f"{point.package} {release.version}: {point.file}"
    adapter = home_of(point.adapter)
    text = release.source(point.file)
    name = point.owner or next(iter(point.functions))
    found = _find(text, name) if text is not None else None
    if text is None or found is None:
        others = [each for each in release.files_with(name) if "test" not in each][:3]
        place = f"it is in {', '.join(others)} now" if others else "no file of the release has it"
        what = f"has no {name}" if text is not None else f"does not exist, which had {name}"
        return [f"{where} {what}, which {adapter} uses: {place}."]
    body = found.body if isinstance(found, ast.ClassDef) else ast.parse(text).body
    here = {each.name: each for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    sentences = []
    for function, expected in point.functions.items():
        shown = f"{point.owner}.{function}" if point.owner else function
        if function not in here:
            sentences.append(f"{where} has no {shown}, which {adapter} uses.")
            continue
        taken = parameters(here[function])
        names = [each for each, _ in taken]
        count = expected if isinstance(expected, int) else len(expected or ())
        rest = [each for each, default in taken[count:] if not default]
        differs = names[:count] != list(expected) if isinstance(expected, Sequence) else len(names) != count
        if expected is not None and (differs or rest):
            wanted = f"{expected} parameters" if isinstance(expected, int) else f"({', '.join(expected)})"
            sentences.append(f"{where}: {shown} takes ({', '.join(names)}) now, and {adapter} knows {wanted}.")
    return sentences


def download(package: str, folder: Path) -> Path | str:
    """Download the newest release of a package. Return its path, or the reason why that failed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    command += ["--ignore-requires-python", package]  # the newest one may be for a newer Python
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    files = [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]
    if files:
        return files[0]
    errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR:")]
    return (errors or ["no file"])[-1].removeprefix("ERROR: ")


def main(argv: Sequence[str] | None = None) -> int:
    """Look at the plug points, and print a line for each framework, and a sentence for what moved.

    Return 1 if something moved, and 2 more if a release could not be had.
    """
    packages = list(dict.fromkeys(point.package for point in POINTS))
    parser = argparse.ArgumentParser(prog="python -m tests.matrix.plug_points", description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", action="append", metavar="PACKAGE", choices=packages, help="(default: all)")
    parser.add_argument("--without", action="append", metavar="PACKAGE", choices=packages, default=[])
    arguments = parser.parse_args(argv)
    status = 0
    for package in arguments.only or packages:
        if package in arguments.without:
            continue
        with tempfile.TemporaryDirectory(prefix="snapshot-plug-points-") as folder:
            path = download(package, Path(folder))
            if isinstance(path, str):
                print(f"{package} could not be had: {path}", flush=True)
                status |= 2  # what was not seen may have moved
                continue
            release = Release(path)
            sentences = [each for point in POINTS if point.package == package for each in moved(release, point)]
            release.close()
            print("\n".join(sentences) or f"{package} {release.version} is as it is known.", flush=True)
            status |= bool(sentences)
    return status


if __name__ == "__main__":
    sys.exit(main())
