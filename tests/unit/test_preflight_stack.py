"""Driver, torch and NCCL: what was built for what, and which settings change it.

A pass means: a torch without code for a GPU and a driver too old for its CUDA are refused, with what to do in a pod;
settings in files are as visible as variables. Run: pytest tests/unit/test_preflight_stack.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from h3core.qualify.preflight import blocking
from h3core.qualify.preflight.driver import Driver, judge_driver, parse_module
from h3core.qualify.preflight.finding import NotMeasured, Reading, Unreadable
from h3core.qualify.preflight.memlock import parse_limits
from h3core.qualify.preflight.nccl import libraries_in
from h3core.qualify.preflight.nccl_settings import judge_variables, parse_conf
from h3core.qualify.preflight.torch_build import code_for, read_torch
from tests.unit.preflight_boxes import finding, healthy_root, read, recording, text, torch_build

NOTHING = NotMeasured("not asked")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return healthy_root(tmp_path)


@pytest.mark.parametrize(
    ("capability", "archs", "code"),
    [
        ((12, 0), "sm_120", "binary"),
        ((12, 1), "sm_120", "binary"),
        ((12, 0), "sm_121", None),
        ((12, 0), "sm_90 sm_100", None),
        ((9, 0), "sm_80", None),
        ((8, 9), "sm_75 sm_80", "binary"),
        ((9, 0), "sm_90a", "binary"),
        ((12, 1), "sm_120a", None),
        ((12, 1), "sm_120f", "binary"),
        ((12, 0), "sm_121f", None),
        ((12, 0), "sm_100f", None),
        ((12, 0), "compute_90", "ptx"),
        ((12, 0), "compute_120", "ptx"),
        ((9, 0), "compute_100", None),
        ((12, 0), "compute_90a", None),
        ((12, 0), "compute_100f", None),
        ((12, 0), "compute_90 sm_120", "binary"),
        ((12, 0), "", None),
        ((12, 0), "gfx942", None),
    ],
)
def test_which_code_a_gpu_can_run(capability: tuple[int, int], archs: str, code: str | None) -> None:
    assert code_for(capability, archs.split()) == code


def test_a_torch_without_code_for_the_gpu_is_refused(root: Path) -> None:
    build = torch_build(8, version="2.6.0+cu124", cuda="12.4", archs=("sm_80", "sm_86", "sm_90"))
    found = finding(read(root, build=build), "kernel images")
    assert (found.state, found.expected, found.fault_class) == ("problem", "code for sm_120", "stack")
    assert found.got == "GPUs 0-7: sm_120; torch 2.6.0+cu124 holds sm_80 sm_86 sm_90"
    assert blocking([found]) == [found]


def test_code_for_every_gpu_is_well_and_ptx_alone_is_a_warning(root: Path) -> None:
    assert finding(read(root), "kernel images").state == "ok"
    found = finding(read(root, build=torch_build(8, archs=("sm_90", "compute_90"))), "kernel images")
    assert (found.state, blocking([found])) == ("warning", [])
    assert "PTX alone" in found.got


def test_a_torch_built_for_the_cpu_is_refused(root: Path) -> None:
    build = torch_build(0, version="2.11.0+cpu", cuda=None, archs=(), nccl=NOTHING)
    box = read(root, build=build)
    found = finding(box, "kernel images")
    assert (found.state, found.got) == ("problem", "torch 2.11.0+cpu is built without CUDA")
    assert blocking([found]) == [found]
    driver = finding(box, "driver")
    assert (driver.state, driver.got) == (
        "not measured",
        "580.95.05 (CUDA 13.0); torch 2.11.0+cpu has no CUDA to hold it against",
    )


def test_unknown_capabilities_and_builds_are_not_measured(root: Path) -> None:
    answers = recording("nvml_pro6000_x8.json")
    answers["gpus"][3]["capability"] = {"error": "NotSupported"}
    assert finding(read(root, nvml=answers), "kernel images").got.startswith("compute capability of GPU 3: ")
    assert finding(read(root, build=torch_build(8, archs=())), "kernel images").state == "not measured"


def test_a_missing_image_outweighs_an_unknown_capability(root: Path) -> None:
    answers = recording("nvml_pro6000_x8.json")
    answers["gpus"][3]["capability"] = {"error": "NotSupported"}
    build = torch_build(8, archs=("sm_90",))
    assert finding(read(root, nvml=answers, build=build), "kernel images").state == "problem"


def test_the_installed_torch_is_read_without_cuda() -> None:
    build = read_torch()
    assert (build.version, build.cuda) == (torch.__version__, torch.version.cuda)
    assert isinstance(build.devices, int)
    no_nccl = NotMeasured(f"torch {torch.__version__} has no CUDA, so no NCCL")
    assert (build.nccl == no_nccl) == (torch.version.cuda is None)
    assert not torch.cuda.is_initialized()


def test_the_two_kernel_modules() -> None:
    assert parse_module(text("driver_open.txt")) == ("open", "580.95.05")
    assert parse_module(text("driver_proprietary.txt")) == ("proprietary", "570.133.20")
    with pytest.raises(Unreadable, match="unknown form"):
        parse_module("something else\n")


@pytest.mark.parametrize(
    ("version", "offers", "built", "state"),
    [
        ("580.95.05", (13, 0), "13.0", "ok"),
        ("590.44.01", (13, 1), "13.0", "ok"),
        ("580.95.05", (13, 0), "13.2", "warning"),
        ("570.133.20", (12, 8), "13.0", "problem"),
        ("570.133.20", (13, 0), "13.0", "warning"),  # cuda-compat
        ("570.133.20", (12, 8), "12.8", "ok"),
        ("535.183.01", (12, 2), "12.8", "warning"),
        ("520.61.05", (11, 8), "12.1", "problem"),
        ("580.95.05", NOTHING, "13.0", "ok"),
        ("570.133.20", NOTHING, "13.0", "problem"),
        ("525.60.13", NOTHING, "12.8", "ok"),
        ("515.65.01", NOTHING, "12.8", "problem"),
        (NOTHING, (12, 8), "13.0", "problem"),
        (NOTHING, NOTHING, "13.0", "not measured"),
        ("700.10", NOTHING, "15.0", "not measured"),
        ("700.10", (15, 0), "15.0", "ok"),
    ],
)
def test_drivers_against_the_cuda_that_torch_was_built_with(
    version: Reading[str], offers: Reading[tuple[int, int]], built: str, state: str
) -> None:
    found = judge_driver(Driver(version, offers, "open"), torch_build(1, cuda=built))
    assert found.state == state
    assert bool(blocking([found])) == (state == "problem")


def test_an_old_driver_says_what_a_pod_can_do(root: Path) -> None:
    found = finding(read(root, nvml="nvml_driver_570.json"), "driver")
    assert found.got == "570.133.20 (CUDA 12.8)"
    assert found.expected == "driver 580 or newer (CUDA 13) for torch 2.11.0+cu130, built with CUDA 13.0"
    for words in ("a pod cannot upgrade", "another host", "minCudaVersion", "allowedCudaVersions 13.0"):
        assert words in str(found.action)


def test_without_nvml_the_kernel_module_tells_the_driver(tmp_path: Path) -> None:
    root = healthy_root(tmp_path, proc__driver__nvidia__version=text("driver_proprietary.txt"))
    box = read(root, nvml=None, build=torch_build(8))
    assert finding(box, "driver").state == "problem"
    assert finding(box, "kernel module").got == "proprietary"


def test_an_unread_kernel_module_is_not_measured(tmp_path: Path) -> None:
    root = healthy_root(tmp_path, proc__driver__nvidia__version=None)
    found = finding(read(root), "kernel module")
    assert found.state == "not measured"
    assert found.got.endswith("No such file or directory")
    assert finding(read(root), "driver").state == "ok"


def test_the_loaded_nccl_is_named_with_its_file(root: Path) -> None:
    path = "/opt/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"
    assert libraries_in(text("maps.txt")) == (path,)
    assert finding(read(root), "NCCL").got == f"2.28.9, {path}"
    assert finding(read(root, build=torch_build(8, nccl=NOTHING)), "NCCL").state == "not measured"


def test_an_nccl_inside_torch_has_no_file(tmp_path: Path) -> None:
    root = healthy_root(tmp_path, proc__self__maps="7f00-7f01 r-xp 00000000 00:3b 1 /opt/libtorch_cuda.so\n")
    assert finding(read(root), "NCCL").got == "2.28.9, no file of its own: linked into torch"
    found = finding(read(healthy_root(tmp_path, proc__self__maps=None)), "NCCL")
    assert found.state == "not measured"
    assert found.got.startswith("2.28.9; its file: cannot read ")


def test_two_nccls_at_once_are_a_warning(tmp_path: Path) -> None:
    more = "7f1b-7f1c r-xp 00000000 00:3b 9    /opt/libnccl-other/libnccl.so.2.30.4\n"
    found = finding(read(healthy_root(tmp_path, proc__self__maps=text("maps.txt") + more)), "NCCL")
    assert found.state == "warning"
    assert "/opt/libnccl-other/libnccl.so.2.30.4" in found.got


@pytest.mark.parametrize(
    ("environ", "state", "got"),
    [
        ({}, "ok", "none is set"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/tmp/log"}, "ok", "NCCL_DEBUG=INFO, NCCL_DEBUG_FILE=/tmp/log"),
        ({"NCCL_P2P_DISABLE": "1", "HOME": "/home/user"}, "warning", "NCCL_P2P_DISABLE=1"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "ok", "none is set"),
        ({"NCCL_API_KEY": "x"}, "ok", "none is set"),
    ],
)
def test_nccl_variables_are_shown(root: Path, environ: dict[str, str], state: str, got: str) -> None:
    found = finding(read(root, environ=environ), "NCCL variables")
    assert (found.state, found.got) == (state, got)


def test_a_conf_file_is_parsed_as_nccl_parses_it() -> None:
    assert parse_conf(text("nccl.conf")) == (
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_SOCKET_IFNAME", "=eth0"),
        ("HF_TOKEN", "not-a-real-one"),
    )


def test_no_conf_file_is_well_and_the_places_are_named(root: Path) -> None:
    found = finding(read(root), "NCCL files")
    assert (found.state, found.got) == ("ok", "no /home/user/.nccl.conf; no /etc/nccl.conf")


def test_settings_that_no_variable_shows_are_listed_without_secrets(root: Path) -> None:
    (root / "etc/nccl.conf").write_text(text("nccl.conf"))
    found = finding(read(root), "NCCL files")
    assert found.state == "warning"
    assert found.got == (
        "NCCL_P2P_DISABLE=1 in /etc/nccl.conf; NCCL_SOCKET_IFNAME==eth0 in /etc/nccl.conf; "
        "HF_TOKEN=*** in /etc/nccl.conf"
    )


def test_the_first_to_set_a_name_wins(root: Path) -> None:
    (root / "home/user").mkdir(parents=True)
    (root / "home/user/.nccl.conf").write_text("NCCL_ALGO=Ring\nNCCL_P2P_LEVEL=PHB\n")
    (root / "etc/nccl.conf").write_text("NCCL_P2P_LEVEL=SYS\n")
    got = finding(read(root, environ={"NCCL_ALGO": "Tree"}), "NCCL files").got
    assert got == (
        "NCCL_ALGO=Ring in /home/user/.nccl.conf (another value wins); NCCL_P2P_LEVEL=PHB in /home/user/.nccl.conf; "
        "NCCL_P2P_LEVEL=SYS in /etc/nccl.conf (another value wins)"
    )


def test_a_named_conf_file_replaces_the_one_at_home(root: Path) -> None:
    (root / "home/user").mkdir(parents=True)
    (root / "home/user/.nccl.conf").write_text("NCCL_ALGO=Ring\n")
    (root / "opt").mkdir()
    (root / "opt/nccl.conf").write_text("NCCL_PROTO=Simple\n")
    found = finding(read(root, environ={"NCCL_CONF_FILE": "/opt/nccl.conf"}), "NCCL files")
    assert found.got == "NCCL_PROTO=Simple in /opt/nccl.conf"
    missing = finding(read(root, environ={"NCCL_CONF_FILE": "/opt/other.conf"}), "NCCL files")
    assert (missing.state, missing.got) == ("warning", "NCCL_CONF_FILE names /opt/other.conf, which is not there")


def test_an_unreadable_conf_file_is_not_measured(root: Path) -> None:
    (root / "etc/nccl.conf").mkdir()  # a folder: root may read any file
    found = finding(read(root), "NCCL files")
    assert (found.state, "Is a directory" in found.got) == ("not measured", True)


@pytest.mark.parametrize(
    ("soft", "state", "got"), [("unlimited", "ok", "no limit"), ("65536", "warning", "limited to 64 KiB")]
)
def test_locked_memory(tmp_path: Path, soft: str, state: str, got: str) -> None:
    line = f"Max locked memory         {soft:<20} unlimited            bytes     \n"
    found = finding(read(healthy_root(tmp_path, proc__self__limits=line)), "locked memory")
    assert (found.state, found.got) == (state, got)


def test_limits_without_the_line_are_not_measured(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="no line"):
        parse_limits("Limit   Soft Limit\n")
    assert finding(read(healthy_root(tmp_path, proc__self__limits="")), "locked memory").state == "not measured"


def test_the_label_of_an_image_is_no_setting():
    assert judge_variables({"NCCL_VERSION": "2.28.3-1"}).state == "ok"
    assert judge_variables({"NCCL_VERSION": "2.28.3-1", "NCCL_ALGO": "Ring"}).got == "NCCL_ALGO=Ring"
