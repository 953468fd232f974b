"""One set of live rank processes: started together, asked together, ended together."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from h3core.ranks import child, server
from h3core.ranks.failures import RankError, RankFailure
from h3core.ranks.task import Done, Raised, RankFacts, decode

GRACE: Final = 2.0
"""Seconds that the other ranks get to answer once one has failed: often they fail too, and say why."""
TERMINATE: Final = 5.0
"""Seconds between SIGTERM and SIGKILL, and for a rank to leave when asked to."""
_DUMP: Final = 1.0
_POLL: Final = 0.02


class Crew:
    """`world` rank processes with their pipes and their temporary folder."""

    facts: tuple[RankFacts, ...]

    def __init__(
        self, world: int, *, backend: str, device: str, environment: Mapping[str, str], start_timeout: float
    ) -> None:
        """Start the ranks and wait until each has joined the process group.

        Raises RankError when one fails to, RuntimeError or TimeoutError when the fork server does; all within
        `start_timeout` seconds and the time it takes to end the ranks.
        """
        __tracebackhide__ = True
        deadline = time.monotonic() + start_timeout
        self.world = world
        self._folder = tempfile.mkdtemp(prefix="h3core-ranks-")
        self._senders: list[threading.Thread] = []
        context = server.context()
        pipes = [context.Pipe() for _ in range(world)]
        self._conns: list[Connection] = [ours for ours, _ in pipes]
        inherited = dict(os.environ)
        preload = tuple(server.preload_names())
        self._processes = [
            context.Process(
                target=child.main,
                args=(child.Spec(rank, world, backend, device, self._folder, preload, inherited, environment), theirs),
                name=f"rank {rank} of {world}",
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            try:
                server.start_all(self._processes, start_timeout)
            finally:
                for _, theirs in pipes:
                    theirs.close()  # or a dead rank's pipe would never reach its end
            self.facts = tuple(self.collect(child.START, deadline - time.monotonic(), doing="start-up"))
        except BaseException:
            self.kill()
            raise

    def send(self, messages: Sequence[bytes]) -> None:
        """Give each rank its message, without waiting: a rank that no longer reads must meet the caller's deadline."""
        self._senders = [sender for sender in self._senders if sender.is_alive()]
        for conn, message in zip(self._conns, messages, strict=True):
            sender = threading.Thread(target=_send, args=(conn, message), daemon=True)
            sender.start()
            self._senders.append(sender)

    def collect(self, serial: int, timeout: float, *, doing: str) -> list[Any]:
        """The value of one positive reply to `serial` from each rank, in rank order.

        Raises RankError unless every rank gives one within `timeout` seconds. The ranks are in no state to go on then.
        """
        __tracebackhide__ = True
        values: dict[int, Any] = {}
        failures: list[RankFailure] = []
        late = f"no answer within {timeout:.3g} s"
        deadline = time.monotonic() + timeout
        pending = set(range(self.world))
        while pending and (left := deadline - time.monotonic()) > 0:
            # Read whichever is ready: a rank with a large reply blocks in its write until somebody reads.
            handles = [self._conns[rank] for rank in pending] + [self._processes[rank].sentinel for rank in pending]
            ready = wait(handles, left)
            for rank in sorted(pending):
                if self._conns[rank] not in ready and self._processes[rank].sentinel not in ready:
                    continue
                pending.discard(rank)
                reply = self._read(rank, serial)
                if isinstance(reply, Done):
                    values[rank] = reply.value
                    continue
                if not failures:
                    deadline = time.monotonic() + GRACE
                    late = f"still inside {GRACE:g} s after the first failure"
                failures.append(reply)
        if pending:
            stacks = self._dump_stacks(pending)
            failures += [RankFailure(rank, "hung", late, stacks=stacks[rank]) for rank in sorted(pending)]
        if failures or len(values) != self.world:
            raise RankError(failures, world=self.world, doing=doing)
        return [values[rank] for rank in range(self.world)]

    def _read(self, rank: int, serial: int) -> Done | RankFailure:
        conn = self._conns[rank]
        try:
            # Look before reading: when only the sentinel is ready, a grandchild may hold the pipe open for good.
            data = conn.recv_bytes() if conn.poll() else None
        except (EOFError, OSError):
            data = None
        if data is None:
            return self._gone(rank)
        try:
            reply = decode(data)
        except Exception as error:
            return RankFailure(rank, "raised", f"its reply cannot be read here: {type(error).__name__}: {error}")
        if isinstance(reply, Raised):
            return RankFailure(rank, "raised", reply.message, traceback=reply.traceback)
        if not isinstance(reply, Done) or reply.serial != serial:
            return RankFailure(rank, "raised", f"answered something else: {reply!r:.200}")
        return reply

    def _gone(self, rank: int) -> RankFailure:
        process = self._processes[rank]
        process.join(GRACE)  # the pipe closes a moment before the fork server reports the exit code
        code = process.exitcode
        stacks = self._read_stacks(rank)
        if code is None:
            return RankFailure(rank, "exited", "closed its pipe without an answer and still runs", None, stacks)
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return RankFailure(rank, "died", f"killed by {name} before it answered", None, stacks, code)
        return RankFailure(rank, "exited", f"left with exit code {code} and without an answer", None, stacks, code)

    def _dump_stacks(self, ranks: Iterable[int]) -> dict[int, str | None]:
        """Ask `ranks` for their stacks and wait briefly until the files have stopped growing."""
        asked = {rank: child.stack_file(self._folder, rank) for rank in ranks}
        for rank, file in asked.items():
            # Without its file a rank has not installed the handler yet, and the signal would kill it.
            if file.exists() and self._processes[rank].exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid(rank), signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP
        sizes: dict[int, int] = {}
        while time.monotonic() < deadline:
            time.sleep(_POLL)
            now = {rank: file.stat().st_size if file.exists() else 0 for rank, file in asked.items()}
            if now == sizes and all(now.values()):
                break
            sizes = now
        return {rank: self._read_stacks(rank) for rank in asked}

    def _read_stacks(self, rank: int) -> str | None:
        """What the rank dumped, without its watching thread and without the frames around the task."""
        try:
            text = child.stack_file(self._folder, rank).read_text(errors="replace")
        except OSError:
            return None
        # A crash adds paragraphs of its own, such as the list of extension modules.
        threads = [part for part in text.strip().split("\n\n") if part.startswith(("Thread ", "Current thread "))]
        threads = [thread for thread in threads if "in _watch_parent" not in thread]
        around = f'File "{child.__file__}"'
        return "\n\n".join(thread.split(f"\n  {around}")[0] for thread in threads) or None

    def _pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        if pid is None:
            raise ProcessLookupError(f"rank {rank} was never started")
        return pid

    def close(self) -> None:
        """Ask the ranks to leave, then end those that have not within TERMINATE seconds."""
        for conn in self._conns:
            _send(conn, child.CLOSE)  # too short to block; at exit, Python 3.12 starts no thread
        self._wait(TERMINATE)
        self.kill()

    def kill(self) -> None:
        """SIGTERM, TERMINATE seconds, SIGKILL; then release pipes, processes and the folder."""
        if not self._wait(0):
            self._signal(signal.SIGTERM)
            self._wait(TERMINATE)
        self._signal(signal.SIGKILL)  # to the whole group: what a rank has started ends with it
        self._wait(TERMINATE)
        for sender in self._senders:
            sender.join(TERMINATE)
        for conn in self._conns:
            conn.close()
        for process in self._processes:
            # ValueError: not even SIGKILL ended it. One not started is left to the thread that is starting it.
            with contextlib.suppress(ValueError):
                if process.pid is not None:
                    process.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, seconds: float) -> bool:
        """Whether all ranks have ended, after at most `seconds`."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            if process.pid is not None:
                process.join(max(0.0, deadline - time.monotonic()))
        return all(process.pid is None or process.exitcode is not None for process in self._processes)

    def _signal(self, number: signal.Signals) -> None:
        for rank, process in enumerate(self._processes):
            try:
                os.killpg(self._pid(rank), number)
            except ProcessLookupError:
                # Not the leader of its group yet, or gone.
                if process.pid is not None and process.exitcode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)


def _send(conn: Connection, message: bytes) -> None:
    with contextlib.suppress(OSError):  # the rank is gone; `collect` sees that by itself
        conn.send_bytes(message)
