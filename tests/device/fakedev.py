"""Builds the fake accelerator, and makes it torch's: `fakedev:0` and `fakedev:1`. Once in a process, and for good."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import sysconfig
import time
import types
import warnings
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("fakedev.cpp")
LONGEST_BUILD = 600.0
"""Seconds; it takes about 30."""


def missing() -> str:
    """What this machine lacks to build the extension; empty if nothing."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "no C++ compiler"
    if shutil.which("ninja", path=_programs()) is None:
        return "no ninja"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "no Python headers"
    return ""


def _programs() -> str:
    """Where programs are found: this environment's first, though it may not be the active one."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


@functools.cache
def load() -> Any:
    """The extension; `torch.fakedev` and the device are there from now on.

    `counts()` says how many copies (`to_device`, `to_host`, `on_device`) and allocations there were since `reset()`,
    and their bytes; `refuse_allocation(nth)` lets one fail, `refuse_pin()` every registration of host memory;
    `waiting()` is how many copies wait in streams.
    """
    from torch.utils import cpp_extension

    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "snapshot-tests"
    folder /= f"fakedev-{torch.__version__}-{sys.implementation.cache_tag}"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # of a build that was killed: others would wait for it for ever
        if time.time() - (folder / "lock").stat().st_mtime > LONGEST_BUILD:
            (folder / "lock").unlink()
    os.environ["PATH"] = _programs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the compiler: not what is tested here
        extension = cpp_extension.load(
            "snapshot_fakedev", [str(SOURCE)], extra_cflags=["-O1", "-g0"], build_directory=str(folder)
        )
    torch.utils.rename_privateuse1_backend("fakedev")
    torch._register_device_module("fakedev", _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return extension


def _module(extension: Any) -> types.ModuleType:
    """What torch and others expect of `torch.<backend>`; its generators are apart from the CPU's."""
    module: Any = types.ModuleType("torch.fakedev")
    generators = [torch.Generator() for _ in range(extension.device_count())]

    def index_of(device: Any) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return extension.current_device() if index is None else index

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module.device_count = extension.device_count
    module.current_device = extension.current_device
    module.set_device = extension.set_device
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.current_stream = torch.accelerator.current_stream  # DCP's save uses both
    module.stream = lambda stream: stream
    module.is_current_stream_capturing = lambda: False
    # The names of CUDA's runtime: a library asks every backend for them alike.
    module.cudart = lambda: types.SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: extension.pin(address, nbytes),
        cudaHostUnregister=extension.unpin,
    )
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda device="fakedev": generators[index_of(device)].get_state()
    module.set_rng_state = lambda state, device="fakedev": generators[index_of(device)].set_state(state)
    module.generators = generators
    return module
