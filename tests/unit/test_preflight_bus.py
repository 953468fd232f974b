"""PCIe and the kernel's log: what stands between GPUs, and what the driver wrote about them.

A pass means: IOMMU, ACS and Xid events are found where they can be seen, given the GPU's number, and a log or a list
that is not the host's counts as not measured. Run: pytest tests/unit/test_preflight_bus.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from h3core.qualify.preflight.finding import Unreadable
from h3core.qualify.preflight.kernel_log import KernelLog, Xid, parse_log, read_kmsg
from h3core.qualify.preflight.pcie import Bridge, parse_cmdline, parse_lspci
from h3core.qualify.preflight.xid import MEANINGS, judge_xids
from tests.unit.preflight_boxes import finding, healthy_root, read, text


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return healthy_root(tmp_path)


def test_only_what_concerns_iommu_and_acs_is_kept_of_the_command_line() -> None:
    assert parse_cmdline(text("cmdline_iommu_off.txt")) == ("amd_iommu=off",)
    line = "quiet intel_iommu=on iommu=pt iommu.passthrough=1 pci=noacs pcie_acs_override=downstream"
    assert parse_cmdline(line) == tuple(line.split()[1:])


def units(root: Path, *names: str) -> Path:
    for name in names:
        (root / "sys/class/iommu" / name).mkdir()
    return root


def test_a_working_iommu_is_a_warning_between_gpus(tmp_path: Path) -> None:
    root = units(healthy_root(tmp_path, proc__cmdline=text("cmdline_iommu_on.txt")), "ivhd0", "ivhd1")
    found = finding(read(root), "IOMMU")
    assert (found.state, found.fault_class) == ("warning", "interconnect")
    assert found.got == "at work (ivhd0, ivhd1); kernel command line: amd_iommu=on"
    assert "amd_iommu=off" in str(found.action)
    assert "NCCL_P2P_DISABLE=1" in str(found.action)
    assert finding(read(root, devices=1, environ={"CUDA_VISIBLE_DEVICES": "0"}), "IOMMU").state == "ok"


@pytest.mark.parametrize("cmdline", ["iommu=pt amd_iommu=on", "iommu.passthrough=1"])
def test_an_iommu_that_passes_through_is_well(tmp_path: Path, cmdline: str) -> None:
    assert finding(read(units(healthy_root(tmp_path, proc__cmdline=cmdline), "ivhd0")), "IOMMU").state == "ok"


def test_units_at_work_outweigh_the_command_line(tmp_path: Path) -> None:
    root = units(healthy_root(tmp_path, proc__cmdline="intel_iommu=off"), "ivhd0")
    assert finding(read(root), "IOMMU").state == "warning"
    assert finding(read(healthy_root(tmp_path / "b", proc__cmdline="intel_iommu=on")), "IOMMU").state == "ok"


@pytest.mark.parametrize(
    ("cmdline", "state"),
    [
        ("amd_iommu=off", "ok"),
        ("iommu=pt", "ok"),
        ("amd_iommu=on", "warning"),
        ("intel_iommu=on", "warning"),
        ("quiet", "not measured"),
        ("pci=noacs", "not measured"),
        (None, "not measured"),
    ],
)
def test_where_units_cannot_be_seen_the_command_line_tells(tmp_path: Path, cmdline: str | None, state: str) -> None:
    root = healthy_root(tmp_path, proc__cmdline=cmdline)
    (root / "sys/class/iommu").rmdir()
    assert finding(read(root), "IOMMU").state == state


def test_acs_of_bridges_alone() -> None:
    bridges = parse_lspci(text("lspci_acs_on.txt"))
    redirecting = frozenset({"SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"})
    assert bridges == (
        Bridge("00:01.1", redirecting),
        Bridge("20:01.1", redirecting),
        Bridge("0000:40:01.1", frozenset({"SrcValid"})),
        Bridge("60:01.1", frozenset()),
    )
    # A network card has ACSCtl with SrcValid+ there; a bridge has no ACS at all.
    assert [bridge.enabled for bridge in parse_lspci(text("lspci_acs_off.txt"))] == [frozenset(), frozenset(), None]


def test_acs_on_bridges_is_a_warning(root: Path) -> None:
    box = read(root, outputs={"lspci": text("lspci_acs_on.txt")})
    found = finding(box, "ACS")
    assert (found.state, found.fault_class) == ("warning", "interconnect")
    assert found.got == "on at 3 of 4 bridges (00:01.1, 20:01.1, 0000:40:01.1); 2 of them redirect requests"
    one = read(root, outputs={"lspci": text("lspci_acs_on.txt")}, devices=1, environ={"CUDA_VISIBLE_DEVICES": "0"})
    assert finding(one, "ACS").state == "ok"
    assert finding(read(root), "ACS").got == "off on all 3 bridges"


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ({}, "lspci is not installed"),
        ({"lspci": text("lspci_no_access.txt")}, "it needs root"),
        ({"lspci": text("lspci_virtual_machine.txt")}, "no PCI bridge"),
    ],
)
def test_bridges_that_cannot_be_seen_are_not_measured(root: Path, outputs: dict[str, str], reason: str) -> None:
    found = finding(read(root, outputs=outputs), "ACS")
    assert (found.state, reason in found.got) == ("not measured", True)


def test_both_forms_of_the_kernel_log() -> None:
    log = parse_log(text("kmsg_xid.txt"))
    assert (log.lines, log.names_driver, log.first) == (6, True, 12.40612)
    assert [(xid.code, xid.pci) for xid in log.xids] == [(code, "0000:c1:00") for code in (48, 45, 79)]
    assert log.xids[0].seconds == 3600.40012
    assert log.xids[2].text == "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    assert [xid.code for xid in parse_log(text("dmesg_program_xids.txt")).xids] == [31, 13, 31]
    assert parse_log("<4>[   12.5] NVRM: Xid (0000:03:00): 14, Channel 00000001").xids[0].pci == "0000:03:00"
    assert parse_log("[1.0] NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7, name=x").xids[0].code == 94
    with pytest.raises(Unreadable, match="unknown form"):
        parse_log("Nov 30 12:00:00 host kernel: hello\n")
    with pytest.raises(Unreadable, match="empty"):
        parse_log("\n")


def test_the_kernel_log_is_read_to_its_end(root: Path) -> None:
    assert read_kmsg(root / "dev/kmsg") == text("kmsg_healthy.txt")


def test_a_log_that_would_wait_for_its_next_record_has_ended(tmp_path: Path) -> None:
    """/dev/kmsg never ends: a read waits. A pipe that somebody holds open behaves so too."""
    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)
    try:
        os.write(held, b"6,1,5,-;hello\n")
        assert read_kmsg(pipe) == "6,1,5,-;hello\n"
    finally:
        os.close(held)


def test_a_hardware_event_names_the_gpu_and_the_meaning(tmp_path: Path) -> None:
    found = finding(read(healthy_root(tmp_path, dev__kmsg=text("kmsg_xid.txt"))), "Xid events")
    assert (found.state, found.fault_class) == ("problem", "hardware")
    assert found.got.split("; ") == [
        "Xid 48 on GPU 6 (0000:c1:00): uncorrectable memory error (double-bit ECC), 1.5 hours ago",
        "Xid 79 on GPU 6 (0000:c1:00): GPU has fallen off the bus, 30.0 minutes ago",
        "Xid 45 on GPU 6 (0000:c1:00): a program's channels were removed, after an earlier error or its end, "
        "1.5 hours ago",
    ]


def test_gpus_are_numbered_as_cuda_numbers_them(tmp_path: Path) -> None:
    root = healthy_root(tmp_path, dev__kmsg=text("kmsg_xid.txt"))
    box = read(root, environ={"CUDA_VISIBLE_DEVICES": "7,6"}, devices=2)
    assert "Xid 79 on GPU 1 (0000:c1:00)" in finding(box, "Xid events").got


def test_an_event_on_another_gpu_of_the_host_is_a_warning(tmp_path: Path) -> None:
    root = healthy_root(tmp_path, dev__kmsg=text("kmsg_xid.txt"))
    found = finding(read(root, environ={"CUDA_VISIBLE_DEVICES": "0,1"}, devices=2), "Xid events")
    assert (found.state, found.fault_class) == ("warning", None)
    assert "Xid 79 on 0000:c1:00, no GPU under test" in found.got


def test_a_gpu_that_fell_off_the_bus_is_in_no_list_and_still_a_problem(tmp_path: Path) -> None:
    root = healthy_root(tmp_path, dev__kmsg=text("kmsg_xid.txt"))
    found = finding(read(root, nvml="nvml_sick.json", devices=5), "Xid events")
    assert found.state == "problem"
    assert found.got.startswith("Xid 79 on 0000:c1:00, no GPU under test: GPU has fallen off the bus")
    assert "; Xid 48 on 0000:c1:00, no GPU under test" in found.got


def test_events_of_programs_are_a_warning_and_counted(tmp_path: Path) -> None:
    root = healthy_root(tmp_path, dev__kmsg=None)
    found = finding(read(root, outputs={"dmesg": text("dmesg_program_xids.txt")}), "Xid events")
    assert found.state == "warning"
    assert found.got == (
        "Xid 31 on GPU 1 (0000:21:00): access to memory that is not mapped, 2 times, last 14.5 minutes ago; "
        "Xid 13 on GPU 1 (0000:21:00): exception in a kernel, 1.1 hours ago"
    )


@pytest.mark.parametrize(
    ("code", "state", "fault"),
    [
        (48, "problem", "hardware"),
        (64, "problem", "hardware"),
        (74, "problem", "interconnect"),
        (92, "problem", "hardware"),
        (94, "problem", "hardware"),
        (95, "problem", "hardware"),
        (119, "problem", "hardware"),
        (120, "problem", "hardware"),
        (140, "problem", "hardware"),
        (13, "warning", None),
        (31, "warning", None),
        (43, "warning", None),
        (45, "warning", None),
        (63, "warning", None),
        (999, "warning", None),
    ],
)
def test_what_codes_mean(code: int, state: str, fault: str | None) -> None:
    log = KernelLog(0.0, 10, True, (Xid(5.0, "0000:01:00", code, ""),))
    found = judge_xids(log, {"0000:01:00": 0}, frozenset())
    assert (found.state, found.fault_class) == (state, fault)
    assert f"Xid {code} on GPU 0 (0000:01:00): {MEANINGS.get(code, ('', 'not in our list'))[1]}" in found.got
    assert found.got.endswith("5 s after boot")


def test_no_event_is_well_only_in_the_log_of_the_gpus_host(root: Path) -> None:
    assert finding(read(root), "Xid events").got == "none since boot (6 lines)"
    (root / "dev/kmsg").unlink()
    found = finding(read(root, outputs={"dmesg": text("dmesg_gvisor.txt")}), "Xid events")
    assert (found.state, "never names NVIDIA's driver" in found.got) == ("not measured", True)


def test_a_log_that_lost_its_beginning_says_how_far_back_it_goes(tmp_path: Path) -> None:
    root = healthy_root(tmp_path, dev__kmsg="6,90411,5400000000,-;eth0: link up\n")
    found = finding(read(root), "Xid events")
    assert (found.state, found.got) == ("ok", "none in 1 lines, which begin 1.0 hours ago")


def test_an_unreadable_kernel_log_is_not_measured(root: Path) -> None:
    (root / "dev/kmsg").unlink()
    found = finding(read(root), "Xid events")
    assert found.state == "not measured"
    assert found.got.endswith("No such file or directory; dmesg: dmesg is not installed")
