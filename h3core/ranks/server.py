"""The fork server that ranks come from: imports torch and h3core once, then forks a rank in milliseconds.

There is one fork server per parent process, started by whoever needs it first; what it preloads and the environment
in which it loads torch are fixed then.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Final

from h3core.numerics import MKL_CBWR

_PRELOAD: Final = ("torch", "torch.distributed", "h3core", "h3core.ranks.child")
_SUITE_TASKS: Final = "h3core.qualify.tasks"

NUMERICS: Final = {
    # One intra-op thread: ranks share the cores, and a second thread splits sums elsewhere and changes their bits.
    "OMP_NUM_THREADS": "1",
    # MKL reads this once, at its first call, so it is in place before torch loads.
    "MKL_CBWR": MKL_CBWR,
    # torch otherwise counts GPUs through the CUDA runtime, and a process forked after that cannot use CUDA.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment that has to be in place before torch loads."""

NVIDIA_DRIVER: Final = Path("/dev/nvidiactl")
"""There where the NVIDIA driver has a device."""


def preload_names() -> list[str]:
    """Modules that the server imports before it forks. They must be import-only and must not touch CUDA."""
    names = list(_PRELOAD)
    # A file test, not find_spec: that would import the suite's package into whoever starts ranks. Not where there is
    # a GPU: the tasks import comfy-kitchen, which asks CUDA for the device when it is imported, and a process forked
    # after that cannot use CUDA.
    if (Path(__file__).parents[1] / "qualify" / "tasks.py").is_file() and not NVIDIA_DRIVER.exists():
        names.append(_SUITE_TASKS)
    else:
        names.append("torch._dynamo")  # most of what importing the tasks takes
    if "pytest" in sys.modules:
        names.append("pytest")  # each rank imports its parent's main script, and bin/pytest imports pytest
    return names


def context() -> ForkServerContext:
    """multiprocessing's forkserver context, told what to preload; the server is not started yet."""
    forkserver_context = multiprocessing.get_context("forkserver")
    forkserver_context.set_forkserver_preload(preload_names())
    return forkserver_context


@contextmanager
def _server_environment() -> Iterator[None]:
    """The environment for the server, in this process only as long as the server may be starting."""
    changes = dict(NUMERICS)
    changes["MKL_CBWR"] = os.environ.get("MKL_CBWR", NUMERICS["MKL_CBWR"])
    # CPython 3.11 hands sys.path to the server, which ignores it and swallows the ImportError: a package found only
    # through sys.path would silently not be preloaded. The current folder, put first for `-c`, could shadow modules.
    changes["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    changes["PYTHONSAFEPATH"] = "1"
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_all(processes: Sequence[ForkServerProcess], timeout: float) -> None:
    """Start `processes`, and the fork server if there is none, within `timeout` seconds.

    Raises RuntimeError when the server dies while it imports, TimeoutError when it does not answer.
    """
    errors: list[BaseException] = []
    late = threading.Event()

    def start() -> None:
        try:
            for process in processes:
                process.start()
                if late.is_set():  # nobody waits for this rank any more
                    process.kill()
                    return
        except BaseException as error:
            errors.append(error)

    # In a thread: start() waits for the server without a limit, and the server may be importing from a dead disk.
    thread = threading.Thread(target=start, name="h3core-start-ranks", daemon=True)
    with _server_environment():
        forkserver.ensure_running()
        thread.start()
        thread.join(timeout)
    names = ", ".join(preload_names())
    if thread.is_alive():
        late.set()
        raise TimeoutError(f"the fork server did not start {len(processes)} ranks in {timeout:g} s; it imports {names}")
    if errors:
        raise RuntimeError(f"the fork server failed; it imports {names}; its stderr says more") from errors[0]
