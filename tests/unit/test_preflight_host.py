"""The host around the GPUs: /dev/shm, memory and CPUs, and what a container's limits leave of them.

A pass means: the tighter of host and container decides, files of dead ranks are told from those in use, and a limit
that cannot be read is never taken for none. Run: pytest tests/unit/test_preflight_host.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from h3core.qualify.preflight.cgroup import parse_membership
from h3core.qualify.preflight.cpus import parse_allowed
from h3core.qualify.preflight.finding import Unreadable
from h3core.qualify.preflight.memory import parse_meminfo
from h3core.qualify.preflight.shm import held_by, judge_stale, names_in, read_shm
from tests.unit.preflight_boxes import GIB, finding, healthy_root, read, statvfs, text, write

MIB = 1 << 20
DOCKER = 64 * MIB


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return healthy_root(tmp_path)


def shared_files(root: Path, count: int, size: int) -> None:
    for i in range(count):
        (root / f"dev/shm/nccl-dead{i:02}").write_bytes(b"\0" * size)


def process(root: Path, pid: int, *, maps: str = "", opens: str | None = None) -> None:
    folder = root / f"proc/{pid}"
    (folder / "fd").mkdir(parents=True)
    (folder / "maps").write_text(maps)
    if opens is not None:
        (folder / "fd/3").symlink_to(opens)


def test_enough_shared_memory(root: Path) -> None:
    found = finding(read(root, shm=(2 * GIB, GIB)), "/dev/shm")
    assert (found.state, found.got) == ("ok", "1 GiB free of 2 GiB")


def test_dockers_default_is_too_little_for_nccl(root: Path) -> None:
    found = finding(read(root, shm=(DOCKER, DOCKER)), "/dev/shm")
    assert (found.state, found.got) == ("problem", "64 MiB free of 64 MiB")
    assert found.expected == "at least 1 GiB free for NCCL"
    assert "--shm-size=1g" in str(found.action)
    assert "stale" not in str(found.action)


def test_what_is_free_counts_not_the_size(root: Path) -> None:
    assert finding(read(root, shm=(64 * GIB, GIB - MIB)), "/dev/shm").state == "problem"


def test_the_gloo_tier_needs_no_shared_memory(root: Path) -> None:
    assert finding(read(root, shm=(DOCKER, 0)), "/dev/shm", device="cpu").state == "ok"


def test_files_of_dead_ranks_are_counted_and_never_deleted(root: Path) -> None:
    shared_files(root, 5, 1000)
    process(root, 4711, maps=text("maps.txt"))
    box = read(root, shm=(DOCKER, 1 * MIB))
    found = finding(box, "stale NCCL files")
    assert found.state == "warning"
    assert found.got.startswith("5 nccl-* files, 4.9 KiB, in /dev/shm that no process has: nccl-dead00, nccl-dead01")
    assert "remove the 5 stale NCCL files" in str(finding(box, "/dev/shm").action)
    assert len(list((root / "dev/shm").glob("nccl-*"))) == 5


@pytest.mark.parametrize("how", ["mapped", "open"])
def test_a_file_that_a_process_has_is_in_use(root: Path, how: str) -> None:
    (root / "dev/shm/nccl-Ab3dE9").write_bytes(b"\0" * 10)
    if how == "mapped":
        process(root, 4711, maps=text("maps.txt"))
    else:
        process(root, 4711, opens="/dev/shm/nccl-Ab3dE9")
    found = finding(read(root), "stale NCCL files")
    assert (found.state, found.got) == ("ok", "none; 1 in use")


def test_a_process_that_may_not_be_looked_at_hides_whether_a_file_is_in_use(root: Path) -> None:
    shared_files(root, 2, 10)
    for pid in (4711, 4712):
        process(root, pid, maps=text("maps.txt").replace("nccl-Ab3dE9", "nccl-dead00"))

    def look(folder: Path) -> list[str]:
        # What a user sees of another user's process; the tests may run as root, who sees everything.
        if folder.name == "4711":
            raise PermissionError(13, "Permission denied")
        return held_by(folder)

    shm = read_shm(root, statvfs(GIB, GIB), look)
    assert [file.in_use for file in shm.files] == [True, None]
    assert shm.stale == ()
    found = judge_stale(shm)
    assert (found.state, found.got) == (
        "not measured",
        "1 nccl-* file, 10 bytes, in /dev/shm; 1 processes do not show whether they use it",
    )


def test_a_process_that_has_ended_hides_nothing(root: Path) -> None:
    shared_files(root, 1, 10)
    (root / "proc/4711").mkdir()  # no maps any more
    assert finding(read(root), "stale NCCL files").state == "warning"


def test_names_of_shared_files_in_maps() -> None:
    assert names_in(text("maps.txt").splitlines()) == {"nccl-Ab3dE9", "nccl-gone00"}
    assert names_in(["/opt/nccl-tests/build/all_reduce_perf", "socket:[123]"]) == set()


def test_an_unreadable_shared_memory_is_not_measured(root: Path) -> None:
    def refuse(path: Path) -> os.statvfs_result:
        raise PermissionError(13, "Permission denied", str(path))

    box = read(root, shm=refuse)
    for name in ("/dev/shm", "stale NCCL files"):
        found = finding(box, name)
        assert (found.state, "Permission denied" in found.got) == ("not measured", True)


def test_meminfo_in_bytes() -> None:
    values = parse_meminfo(text("meminfo.txt"))
    assert (values["MemTotal"], values["MemAvailable"]) == (1056403456 << 10, 1003552768 << 10)
    assert values["HugePages_Total"] == 0
    with pytest.raises(Unreadable, match="MemAvailable"):
        parse_meminfo("MemTotal: 5 kB\n")


@pytest.mark.parametrize(("needed", "state"), [(None, "ok"), (950 * GIB, "ok"), (960 * GIB, "problem")])
def test_memory_of_a_host_without_limits(root: Path, needed: int | None, state: str) -> None:
    found = finding(read(root), "host memory", needed_bytes=needed)
    assert found.state == state
    assert found.got.startswith("957.1 GiB available of 1007.5 GiB")


def v1(root: Path, path: str, **files: str) -> None:
    write(root, {f"sys/fs/cgroup/memory{path}/memory.{name}": content for name, content in files.items()})


def test_the_containers_limit_decides_version_2(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/pod/rank\n",
            "sys/fs/cgroup/pod/memory.max": str(64 * GIB),
            "sys/fs/cgroup/pod/memory.current": str(60 * GIB),
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\nfile {30 * GIB}\ninactive_file {20 * GIB}\n",
            "sys/fs/cgroup/pod/rank/memory.max": "max\n",
            "sys/fs/cgroup/pod/rank/memory.current": "5\n",
        },
    )
    found = finding(read(root), "host memory", needed_bytes=30 * GIB)
    assert found.got == "24 GiB available of 1007.5 GiB, limited to 64 GiB by the control group"
    assert (found.state, found.expected) == ("problem", "at least 30 GiB for loading")
    assert finding(read(root), "host memory", needed_bytes=24 * GIB).state == "ok"


def test_the_containers_limit_decides_version_1(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("5:cpu,cpuacct:/docker/ab12\n4:memory:/docker/ab12\n0::/\n")
    # Inside a container the group's own folder is mounted at the top; the host's path is not there.
    v1(
        root,
        "",
        limit_in_bytes=str(32 * GIB),
        usage_in_bytes=str(2 * GIB),
        stat=f"inactive_file 7\ntotal_inactive_file {GIB}\n",
    )
    assert finding(read(root), "host memory").got.startswith("31 GiB available")
    v1(root, "", limit_in_bytes="9223372036854771712")
    assert finding(read(root), "host memory").got == "957.1 GiB available of 1007.5 GiB"


def test_a_limit_that_cannot_be_read_is_not_taken_for_none(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("4:memory:/docker/ab12\n")  # but no folder for version 1
    found = finding(read(root), "host memory", needed_bytes=GIB)
    assert found.state == "not measured"
    assert "957.1 GiB" in found.got
    assert "is not mounted" in found.got
    assert finding(read(root), "host memory", needed_bytes=2000 * GIB).state == "problem"


def test_membership_of_control_groups() -> None:
    assert parse_membership("5:cpu,cpuacct:/a\n4:memory:/b\n0::/c\n", "memory") == (1, "/b")
    assert parse_membership("5:cpu,cpuacct:/a\n0::/c\n", "memory") == (2, "/c")
    with pytest.raises(Unreadable, match="no group for memory"):
        parse_membership("5:cpu:/a\n", "memory")


def test_cpus_of_the_affinity_mask() -> None:
    assert parse_allowed(text("status.txt")) == (*range(32), *range(64, 96))
    assert parse_allowed("Cpus_allowed_list:\t3\n") == (3,)
    with pytest.raises(Unreadable, match="Cpus_allowed_list"):
        parse_allowed("Name:\tpython\n")


@pytest.mark.parametrize(("world", "state"), [(None, "ok"), (64, "ok"), (65, "warning")])
def test_cpus_against_ranks(root: Path, world: int | None, state: str) -> None:
    found = finding(read(root), "CPUs", world=world)
    assert (found.state, found.got.startswith("64 allowed")) == (state, True)


def test_a_quota_counts_as_cpus_version_2(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "600000 100000\n"})
    found = finding(read(root), "CPUs", world=8)
    assert (found.state, found.got) == ("warning", "64 allowed, a quota of 6 for 8 ranks")
    assert finding(read(root), "CPUs", world=6).state == "ok"


def test_a_quota_counts_as_cpus_version_1(root: Path) -> None:
    folder = "sys/fs/cgroup/cpu"
    write(
        root,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/ab12\n",
            f"{folder}/cpu.cfs_quota_us": "350000\n",
            f"{folder}/cpu.cfs_period_us": "100000\n",
        },
    )
    assert finding(read(root), "CPUs", world=4).got == "64 allowed, a quota of 3.5 for 4 ranks"
    write(root, {f"{folder}/cpu.cfs_quota_us": "-1\n"})
    assert finding(read(root), "CPUs", world=4).got == "64 allowed"


def test_a_quota_that_cannot_be_read_is_not_taken_for_none(root: Path) -> None:
    (root / "proc/self/cgroup").unlink()
    found = finding(read(root), "CPUs", world=4)
    assert (found.state, "64 allowed" in found.got) == ("not measured", True)
    assert finding(read(root), "CPUs", world=400).state == "warning"


@pytest.mark.parametrize(("name", "file"), [("host memory", "proc/meminfo"), ("CPUs", "proc/self/status")])
def test_missing_files_are_not_measured(root: Path, name: str, file: str) -> None:
    (root / file).unlink()
    found = finding(read(root), name)
    assert (found.state, "No such file" in found.got) == ("not measured", True)
