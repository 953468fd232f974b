"""RankPool with real processes: every way in which a rank can fail is named, bounded, and survived.

A pass means that a green rank test really had W positive answers, and that a red one says which rank and why.
It tests the suite, not the machine, so it carries no marker. Run: pytest tests/gloo/test_rank_pool.py
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from h3core.ranks import Rank, RankError, RankPool

WORLD = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Instead of the plugin's fixture: one world, and ranks that are broken on purpose."""
    with RankPool(WORLD, timeout=30) as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def _next_run_works(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test of the shared pool, whatever it broke, the pool answers."""
    yield
    if "pool" in request.fixturenames:
        assert request.getfixturevalue("pool").run(total) == [6] * WORLD


# Tasks. They are module-level, because ranks find them by name.


def who(rank: Rank) -> tuple[int, int, str, int]:
    return rank.rank, rank.world, str(rank.device), os.getpid()


def environment(rank: Rank, names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def total(rank: Rank) -> int:
    count = torch.tensor(rank.rank)
    dist.all_reduce(count, group=rank.group)
    return int(count)


def arguments(rank: Rank, *args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def draw(rank: Rank) -> tuple[torch.Tensor, float]:
    return torch.randn(8), random.random()


def threads(rank: Rank) -> int:
    return torch.get_num_threads()


def process_group(rank: Rank) -> int:
    return os.getpgrp()


def fail_on_2(rank: Rank) -> None:
    if rank.rank == 2:
        raise ValueError("planted on rank 2")
    dist.barrier(rank.group)


def fail_on_2_then_others(rank: Rank) -> None:
    if rank.rank == 2:
        raise ValueError("planted on rank 2")
    time.sleep(0.3)
    raise RuntimeError(f"secondary on rank {rank.rank}")


def die_on_1(rank: Rank, number: int) -> None:
    if rank.rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
    if rank.rank == 0:
        time.sleep(1)
    dist.barrier(rank.group)


def leave_on_3(rank: Rank, how: str) -> None:
    if rank.rank == 3:
        os._exit(0) if how == "os._exit" else sys.exit(0)
    dist.barrier(rank.group)


def never_arrive(rank: Rank) -> None:
    if rank.rank == 2:
        time.sleep(3600)
    dist.barrier(rank.group)


def unpicklable(rank: Rank) -> Any:
    return threading.Lock() if rank.rank == 1 else None


def skip_on_1(rank: Rank) -> None:
    if rank.rank == 1:
        pytest.skip("nothing to do here")


def big(rank: Rank, mib: int) -> torch.Tensor:
    return torch.full((mib << 20,), rank.rank, dtype=torch.uint8)


def echo(rank: Rank, value: Any) -> Any:
    return value


def row_of_a_large_buffer(rank: Rank) -> torch.Tensor:
    return torch.zeros(1 << 20, 4)[rank.rank]


def hold_a_pool(folder: str) -> None:
    """In a process of its own: a pool whose ranks write their pids and then sit in a collective that never ends."""
    with RankPool(3) as ranks:
        ranks.run(write_pid_and_wait, folder, timeout=600)


def write_pid_and_wait(rank: Rank, folder: str) -> None:
    dist.barrier(rank.group)
    (Path(folder) / f"{rank.rank}.tmp").write_text(str(os.getpid()))
    (Path(folder) / f"{rank.rank}.tmp").rename(Path(folder) / f"{rank.rank}.pid")
    if rank.rank == 0:
        time.sleep(600)
    dist.barrier(rank.group)


# Helpers of the parent.


def failing(ranks: RankPool, task: Any, *args: Any, **kwargs: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        ranks.run(task, *args, **kwargs)
    return caught.value


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


# What a healthy pool does.


def test_every_rank_answers_in_rank_order_from_its_own_process(pool: RankPool) -> None:
    replies = pool.run(who)
    assert [(rank, world, device) for rank, world, device, _ in replies] == [(r, WORLD, "cpu") for r in range(WORLD)]
    pids = [pid for *_, pid in replies]
    assert len({*pids, os.getpid()}) == WORLD + 1
    assert pids == [facts.pid for facts in pool.facts]


def test_ranks_were_forked_from_a_server_that_had_torch_and_h3core_loaded(pool: RankPool) -> None:
    assert [facts.preloaded for facts in pool.facts] == [True] * WORLD


def test_each_rank_leads_a_process_group_so_that_ctrl_c_is_the_parents_alone(pool: RankPool) -> None:
    assert pool.run(process_group) == [facts.pid for facts in pool.facts]


def test_ranks_see_torchruns_names_and_the_parent_does_not(pool: RankPool) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
    before = dict(os.environ)
    with RankPool(2) as ranks:
        assert ranks.run(environment, names) == [[str(r), str(r), "2", "2", "0"] for r in range(2)]
    assert dict(os.environ) == before


def test_ranks_compute_in_one_thread_with_pinned_mkl_kernels(pool: RankPool) -> None:
    assert pool.run(threads) == [1] * WORLD
    assert pool.run(environment, ["OMP_NUM_THREADS", "MKL_CBWR"]) == [["1", os.environ.get("MKL_CBWR", "AVX2")]] * WORLD


def test_env_of_the_pool_is_set_in_each_rank_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_AFTER_THE_SERVER_STARTED", "seen")
    with RankPool(2, env={"NCCL_HOSTID": "host-{rank}", "JSON": '{"a": 1}'}) as ranks:
        names = ["NCCL_HOSTID", "JSON", "SET_AFTER_THE_SERVER_STARTED"]
        assert ranks.run(environment, names) == [[f"host-{r}", '{"a": 1}', "seen"] for r in range(2)]


@pytest.mark.parametrize("size", [1, 2, 6, 8])  # "world" is the plugin's
def test_a_pool_of_any_size_has_a_working_group(size: int) -> None:
    with RankPool(size) as ranks:
        assert ranks.run(total) == [size * (size - 1) // 2] * size
        pids = [facts.pid for facts in ranks.facts]
    assert not [pid for pid in pids if is_alive(pid)]


def test_arguments_shared_per_rank_and_by_name(pool: RankPool) -> None:
    replies = pool.run(arguments, "all", per_rank=[(r, r * r) for r in range(WORLD)], key=7)
    assert replies == [(("all", r, r * r), {"key": 7}) for r in range(WORLD)]
    with pytest.raises(ValueError, match="3 entries for 4 ranks"):
        pool.run(arguments, per_rank=[()] * 3)


def test_random_numbers_differ_between_ranks_and_repeat_between_runs(pool: RankPool) -> None:
    first, second = pool.run(draw), pool.run(draw)
    assert all(torch.equal(a, b) and x == y for (a, x), (b, y) in zip(first, second, strict=True))
    assert len({tuple(numbers.tolist()) for numbers, _ in first}) == WORLD
    assert len({number for _, number in first}) == WORLD


# How values travel.


def test_large_tensors_cross_by_value_both_ways(pool: RankPool) -> None:
    for rank, tensor in enumerate(pool.run(big, 50)):
        assert tensor.numel() == 50 << 20
        assert int(tensor.min()) == int(tensor.max()) == rank
        tensor[0] = 9  # its own memory, and writable
    sent = torch.arange(5 << 20)
    assert all(torch.equal(sent, got) for got in pool.run(echo, sent))


def test_a_view_crosses_without_the_buffer_behind_it(pool: RankPool) -> None:
    assert [row.untyped_storage().nbytes() for row in pool.run(row_of_a_large_buffer)] == [16] * WORLD


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([True, False]),
        torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=["scalar", "empty", "transposed", "bool", "fp8", "conjugate"],
)
def test_tensors_of_every_kind_arrive_bit_for_bit(pool: RankPool, tensor: torch.Tensor) -> None:
    for got in pool.run(echo, tensor):
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        as_bytes = [t.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist() for t in (got, tensor)]
        assert as_bytes[0] == as_bytes[1]


# What is refused before anything is sent or started.


def test_what_ranks_cannot_find_by_name_is_refused(pool: RankPool) -> None:
    def nested(rank: Rank) -> None: ...

    pids = [facts.pid for facts in pool.facts]
    for task in (lambda rank: None, nested, print, Path("x").exists):
        with pytest.raises(TypeError, match="module-level function"):
            pool.run(task)  # type: ignore[arg-type]
    assert [facts.pid for facts in pool.facts] == pids


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"world": 0}, "at least 1"),
        ({"world": 2, "backend": "mpi"}, "gloo, nccl"),
        ({"world": 2, "backend": "nccl"}, "needs device cuda"),
        ({"world": 2, "device": "tpu"}, "cpu, cuda"),
        ({"world": 2, "timeout": 0}, "above 0"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_the_reason(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RankPool(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError):
        RankPool(2, backend="nccl", device="cuda")


def test_a_rank_that_cannot_join_fails_the_start_by_name() -> None:
    with pytest.raises(RankError, match="in start-up") as caught:
        RankPool(2, env={"GLOO_SOCKET_IFNAME": "nosuch{rank}"})
    assert {failure.rank for failure in caught.value.failures} == {0, 1}


def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises((RankError, TimeoutError), match="start"):
        RankPool(4, start_timeout=0.005)
    assert not list(tmp_path.iterdir())


# How failures are told.


def test_the_rank_that_raised_is_named_first_with_its_traceback(pool: RankPool) -> None:
    error = failing(pool, fail_on_2_then_others)
    text = str(error)
    assert text.startswith("rank 2 of 4 raised in")
    assert 'raise ValueError("planted on rank 2")' in text
    assert "h3core/ranks" not in text
    for rank in (0, 1, 3):
        assert f"rank {rank} raised: RuntimeError: secondary on rank {rank}" in text.splitlines()
    assert text.count("Traceback") == 1
    assert [failure.kind for failure in error.failures] == ["raised"] * WORLD
    assert error.absent == ()


def test_ranks_left_waiting_by_one_that_raised_show_where_they_are(pool: RankPool) -> None:
    error = failing(pool, fail_on_2)
    assert (error.failures[0].rank, error.failures[0].kind) == (2, "raised")
    assert error.absent == (0, 1, 3)
    assert all("barrier" in (failure.stacks or "") for failure in error.failures[1:])
    assert "no answer from ranks 0, 1, 3 of 4" in str(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=["SIGKILL", "SIGSEGV"])
def test_a_rank_killed_inside_a_collective_is_the_cause_and_not_its_peers(pool: RankPool, number: int) -> None:
    error = failing(pool, die_on_1, number)
    cause = error.failures[0]
    assert (cause.rank, cause.kind, cause.exitcode) == (1, "died", -number)
    assert signal.Signals(number).name in cause.message
    assert 1 in error.absent
    # Who of the peers sees "connection closed by peer", and who just waits on, is gloo's choice.
    assert "closed by peer" in str(error) or "reset by peer" in str(error)
    if number == signal.SIGSEGV:
        assert "die_on_1" in (cause.stacks or "")


def test_a_hang_ends_at_the_timeout_and_shows_the_rank_that_never_came(pool: RankPool) -> None:
    pids = [facts.pid for facts in pool.facts]
    start = time.monotonic()
    error = failing(pool, never_arrive, timeout=1.5)
    assert time.monotonic() - start < 20  # the bound of timeout, dump, SIGTERM and SIGKILL, far below the sleep
    assert [failure.kind for failure in error.failures] == ["hung"] * WORLD
    assert error.failures[0].rank == 2  # outside a collective, so the others wait for it
    assert "in never_arrive" in (error.failures[0].stacks or "")
    assert "ranks 0, 1, 3 inside:" in str(error)
    assert "barrier" in (error.failures[1].stacks or "")
    assert not any("selectors.py" in (failure.stacks or "") for failure in error.failures)  # the watching thread
    assert error.absent == (0, 1, 2, 3)
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.parametrize("how", ["os._exit", "sys.exit"])
def test_a_rank_that_leaves_without_an_answer_is_no_success(pool: RankPool, how: str) -> None:
    error = failing(pool, leave_on_3, how)
    cause = error.failures[0]
    assert (cause.rank, cause.kind, cause.exitcode) == (3, "exited", 0)
    assert 3 in error.absent


def test_a_rank_that_died_between_tasks_is_named(pool: RankPool) -> None:
    os.kill(pool.facts[1].pid, signal.SIGKILL)
    error = failing(pool, who)
    assert [(failure.rank, failure.kind) for failure in error.failures] == [(1, "died")]


def test_a_reply_that_cannot_be_pickled_names_rank_and_type(pool: RankPool) -> None:
    error = failing(pool, unpicklable)
    assert [failure.rank for failure in error.failures] == [1]
    assert "_thread.lock" in error.failures[0].message


def test_a_skip_inside_a_rank_is_no_success(pool: RankPool) -> None:
    assert "Skipped: nothing to do here" in str(failing(pool, skip_on_1))


# Who outlives whom.


def test_ctrl_c_in_the_parent_ends_the_ranks(pool: RankPool) -> None:
    pids = [facts.pid for facts in pool.facts]
    # A shell starts its background jobs with SIGINT ignored, and Python then leaves it so: no Ctrl-C to test.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.run(never_arrive)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [pid for pid in pids if is_alive(pid)]


def test_ranks_do_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import {Path(__file__).stem} as tasks; "
    code += f"tasks.hold_a_pool({str(tmp_path)!r})"
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environ) as parent:
        try:
            assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 3, 60)
            pids = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
            assert all(map(is_alive, pids))
            assert len(list(tmp_path.glob("h3core-ranks-*"))) == 1
        finally:
            parent.kill()
    assert wait_until(lambda: not any(map(is_alive, pids)), 10), "ranks live on without their parent"
    assert wait_until(lambda: not list(tmp_path.glob("h3core-ranks-*")), 10), "their folder was left behind"


def test_a_closed_pool_has_no_processes_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ranks = RankPool(2)
    pids = [facts.pid for facts in ranks.facts]
    assert list(tmp_path.iterdir())
    ranks.close()
    ranks.close()
    assert not [pid for pid in pids if is_alive(pid)]
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="closed"):
        ranks.run(who)
