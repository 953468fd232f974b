"""The life of one rank: set itself up, answer one task after another, never outlive its parent."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import random
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from h3core.ranks.server import NUMERICS
from h3core.ranks.task import Done, Raised, Rank, RankFacts, Request, decode, encode

CLOSE: Final = b""
"""The message after which a rank leaves."""
START: Final = 0
"""The serial of a rank's first, unasked reply: its facts."""
SEED: Final = 440420
"""Rank r starts every task with generators seeded SEED + r. Equal seeds would make every rank's random payload the
same, and a transport that delivers the wrong rank's rows would pass."""

_LOADED_BY: Final = os.getpid()
# The parent is the only clock: a process group's own timeout would end the victims of a hang before their stacks
# are taken, and blame them.
_GROUP_TIMEOUT: Final = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Spec:
    """All that a rank has to know to set itself up; `folder` is the pool's temporary folder."""

    rank: int
    world: int
    backend: str
    device: str
    folder: str
    preload: tuple[str, ...]
    parent_environment: Mapping[str, str]
    pool_environment: Mapping[str, str]


def stack_file(folder: str, rank: int) -> Path:
    """Where rank `rank` writes its threads' stacks when it gets SIGUSR1 or crashes."""
    return Path(folder) / f"stacks-{rank}.txt"


def main(spec: Spec, conn: Connection) -> None:
    """Target of a rank's process: replies to START with RankFacts, then to each Request, until CLOSE or EOF."""
    # Importing this module to unpickle the target is what an unpreloaded rank does first, so look who imported it.
    preloaded = os.getpid() != _LOADED_BY and all(name in sys.modules for name in spec.preload)
    os.setsid()  # Ctrl-C in the terminal is for the parent, which then ends its ranks in good order
    with stack_file(spec.folder, spec.rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(file=stacks)
        threading.Thread(target=_watch_parent, args=(spec.folder,), daemon=True).start()
        try:
            rank = _join(spec)
            hello = encode(Done(START, _facts(rank, preloaded)))
        except Exception as error:
            conn.send_bytes(encode(_raised(START, error)))
            return
        with contextlib.suppress(EOFError, OSError):  # the parent is gone or has given up on this pool
            conn.send_bytes(hello)
            while (message := conn.recv_bytes()) != CLOSE:
                conn.send_bytes(_perform(rank, message))
        dist.destroy_process_group()


def _watch_parent(folder: str) -> None:
    """End this process and its children as soon as the parent is gone, even from inside a collective.

    PDEATHSIG does nothing here: a rank's parent is the fork server, which lives as long as its ranks do.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    # The sentinel is a pipe whose write end only the parent holds, but a fork of the parent could keep it open. The
    # pidfd has no such gap, but needs Linux 5.3, and the number could be another process's by now. Either will do.
    signs: list[int] = [parent.sentinel]
    if parent.pid is not None:
        with contextlib.suppress(OSError, AttributeError):
            signs.append(os.pidfd_open(parent.pid))
    multiprocessing.connection.wait(signs)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _environment(spec: Spec) -> dict[str, str]:
    """The parent's environment as it is now (the fork server has an older one), torchrun's names, the pool's own."""
    environment = {**spec.parent_environment, "OMP_NUM_THREADS": NUMERICS["OMP_NUM_THREADS"]}
    environment.setdefault("MKL_CBWR", NUMERICS["MKL_CBWR"])
    if spec.backend == "gloo":
        # Otherwise gloo looks up the host's name, which fails or stalls where DNS does.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if spec.device == "cpu":
        # comfy-kitchen asks CUDA for its device when it is imported: a context on the GPU, and its memory, a rank.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    rank, world = str(spec.rank), str(spec.world)
    environment |= {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": "0"}
    environment |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "ROLE_WORLD_SIZE": world, "GROUP_WORLD_SIZE": "1"}
    # Not str.format: a value may hold other braces.
    return environment | {name: value.replace("{rank}", rank) for name, value in spec.pool_environment.items()}


def _join(spec: Spec) -> Rank:
    """Set up environment, threads and device, and join the process group."""
    os.environ.clear()
    os.environ.update(_environment(spec))
    torch.set_num_threads(1)
    if spec.device == "cuda":
        device = torch.device("cuda", spec.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device(spec.device)
    # A file in a folder of this pool alone: TCPStore needs a port that is free, and stalls for seconds where the
    # loopback address is slow to look up.
    store = dist.FileStore(str(Path(spec.folder) / "rendezvous"), spec.world)  # type: ignore[attr-defined]
    dist.init_process_group(
        spec.backend,
        store=store,
        rank=spec.rank,
        world_size=spec.world,
        timeout=_GROUP_TIMEOUT,
        device_id=device if spec.backend == "nccl" else None,  # connect now: failures belong to the start
    )
    return Rank(spec.rank, spec.world, device, spec.backend, dist.group.WORLD)


def _facts(rank: Rank, preloaded: bool) -> RankFacts:
    """This rank's proof of presence: what the process group and the device say, not what was asked for."""
    name, uuid = None, None
    if rank.device.type == "cuda":
        properties = torch.cuda.get_device_properties(rank.device)
        name, uuid = properties.name, f"GPU-{properties.uuid}"
    return RankFacts(
        rank=dist.get_rank(rank.group),
        world=dist.get_world_size(rank.group),
        backend=dist.get_backend(rank.group),
        pid=os.getpid(),
        device=str(rank.device),
        device_name=name,
        device_uuid=uuid,
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        preloaded=preloaded,
    )


def _perform(rank: Rank, message: bytes) -> bytes:
    """Run one task; its encoded reply. SystemExit passes: a rank that leaves inside a task has not answered."""
    request: Request = decode(message)
    try:
        sys.path[:] = request.sys_path
        task = request.task.resolve()
        args, kwargs = decode(request.arguments)
        torch.manual_seed(SEED + rank.rank)
        random.seed(SEED + rank.rank)
        value: Any = task(rank, *args, **kwargs)
        if rank.device.type == "cuda":
            torch.cuda.synchronize(rank.device)  # an error of a kernel still running belongs to this task
    except SystemExit:
        raise
    except BaseException as error:  # pytest's skip and fail are no Exceptions; neither may end as "exited"
        return encode(_raised(request.serial, error))
    try:
        return encode(Done(request.serial, value))
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return encode(
            Raised(request.serial, f"the reply, a {kind}, cannot be pickled: {type(error).__name__}: {error}", None)
        )


def _raised(serial: int, error: BaseException) -> Raised:
    """The reply for `error`: one line, and the traceback from the first frame that is not this file's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    reason = next(iter(str(error).strip().splitlines()), "")
    return Raised(serial, f"{type(error).__name__}: {reason}" if reason else type(error).__name__, text)
