"""The preflight's view of GPUs: NVML's answers, CUDA_VISIBLE_DEVICES, how many and which they are.

A pass means: GPUs are named in CUDA's order, too few, repeated, unlike, sliced and lost ones are found, and nothing
that NVML did not answer counts as well. Run: pytest tests/unit/test_preflight_gpus.py
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from h3core.qualify.preflight import blocking, judge
from h3core.qualify.preflight.finding import NotMeasured, Unreadable
from h3core.qualify.preflight.gpu import Gpu, pci_address
from h3core.qualify.preflight.nvml import read_nvml
from h3core.qualify.preflight.visible import resolve
from tests.unit.preflight_boxes import (
    GIB,
    RecordedNvml,
    finding,
    healthy_root,
    read,
    recording,
    torch_build,
)

UUID = "GPU-{0}a3f5c1e-7d20-4b86-9c4e-0f1e2d3c4b{0}{0}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return healthy_root(tmp_path)


def test_a_gpu_is_read_as_nvml_describes_it_and_nvml_is_closed_again() -> None:
    nvml = RecordedNvml(recording("nvml_pro6000_x8.json"))
    answers = read_nvml(nvml)
    assert nvml.open == 0
    assert (answers.driver, answers.cuda, answers.lost) == ("580.95.05", (13, 0), ())
    assert [gpu.index for gpu in answers.gpus] == list(range(8))
    gpu = answers.gpus[6]
    assert gpu.name == "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    assert (gpu.uuid, gpu.pci, gpu.capability) == (UUID.format(6), "0000:c1:00", (12, 0))
    assert gpu.memory_bytes == 97887 << 20


def test_an_nvml_that_does_not_start_says_why() -> None:
    with pytest.raises(Unreadable, match="NVML does not start: NVML Shared Library Not Found"):
        read_nvml(RecordedNvml({"init": {"error": "LibraryNotFound"}}))


def test_what_a_gpu_does_not_support_is_not_measured_and_the_rest_is_read() -> None:
    gpu = read_nvml(RecordedNvml(recording("nvml_mixed.json"))).gpus[1]
    assert gpu.ecc == gpu.remaps == NotMeasured("NVML: Not Supported")
    assert gpu.capability == (12, 0)


def test_a_gpu_that_the_container_was_not_given_is_not_lost() -> None:
    answers = recording("nvml_pro6000_x8.json")
    answers["gpus"][2] = {"error": "NoPermission"}
    read_back = read_nvml(RecordedNvml(answers))
    assert len(read_back.gpus) == 7
    assert read_back.lost == ()


def test_the_recorded_nvml_is_shaped_like_nvidia_ml_py() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name, function in vars(RecordedNvml).items():
        if name.startswith("nvml"):
            ours = list(inspect.signature(function).parameters)[1:]
            theirs = inspect.signature(getattr(pynvml, name)).parameters.values()
            assert len(ours) == len([p for p in theirs if p.default is inspect.Parameter.empty]), name
        elif name.startswith("NVML_"):
            assert function == getattr(pynvml, name), name


@pytest.mark.parametrize(
    ("text", "expected"),
    [("00000000:C1:00.0", "0000:c1:00"), ("0000:c1:00", "0000:c1:00"), ("00010000:01:00.0", "10000:01:00")],
)
def test_pci_addresses_have_one_spelling(text: str, expected: str) -> None:
    assert pci_address(text) == expected


def gpus_of(name: str) -> tuple[Gpu, ...]:
    return read_nvml(RecordedNvml(recording(name))).gpus


@pytest.mark.parametrize(
    ("value", "picked", "problem"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7], None),
        ("", [], None),
        ("-1", [], None),
        ("3,1", [3, 1], None),
        (" 2 , 5", [2, 5], None),
        ("0,2,-1,1", [0, 2], None),
        ("0,8,1", [0], "'8'"),
        ("0,x,1", [0], "'x'"),
        ("1gpu2", [1], None),
        (UUID.format(5) + "," + UUID.format(2), [5, 2], None),
        ("GPU-4,GPU-7a3", [4, 7], None),
        ("GPU-,1", [], "'GPU-'"),
        ("GPU-f", [], "'GPU-f'"),
        ("MIG-5c", [], "'MIG-5c'"),
        ("1,1", [1, 1], None),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    value: str | None, picked: list[int], problem: str | None
) -> None:
    visible = resolve(gpus_of("nvml_pro6000_x8.json"), {} if value is None else {"CUDA_VISIBLE_DEVICES": value})
    assert [gpu.uuid for gpu in visible.gpus] == [UUID.format(i) for i in picked]
    assert [gpu.index for gpu in visible.gpus] == list(range(len(picked)))
    assert (visible.problem is None) == (problem is None)
    assert problem is None or problem in str(visible.problem)
    assert visible.hides_all == (value in ("", "-1"))


def test_a_mig_gpu_shows_its_slices() -> None:
    devices = gpus_of("nvml_h100_mig.json")
    assert [gpu.name for gpu in resolve(devices, {}).gpus] == ["NVIDIA H100 80GB HBM3 MIG 3g.40gb"]
    (piece,) = resolve(devices, {"CUDA_VISIBLE_DEVICES": "MIG-7f4d"}).gpus
    assert piece.uuid == "MIG-7f4d0f0e-91cc-5c45-a6e2-12b6a2c0e6d1"
    assert (piece.mig, piece.memory_bytes, piece.capability, piece.pci) == (True, 40448 << 20, (9, 0), "0000:01:00")


def test_indices_of_unlike_gpus_need_an_order() -> None:
    devices = gpus_of("nvml_mixed.json")
    assert "CUDA_DEVICE_ORDER" in str(resolve(devices, {"CUDA_VISIBLE_DEVICES": "0,1"}).problem)
    for sure in ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "GPU-0"}):
        assert resolve(devices, sure).problem is None


@pytest.mark.parametrize("world", [None, 1, 8])
def test_enough_gpus_are_enough(root: Path, world: int | None) -> None:
    assert finding(read(root), "GPUs", world=world).state == "ok"


def test_more_ranks_than_gpus_are_refused_with_both_numbers(root: Path) -> None:
    found = finding(read(root), "GPUs", world=9)
    assert (found.state, found.got, found.fault_class) == ("problem", "8 visible, 9 ranks asked for", "stack")
    assert found.expected == "9, one for each rank"
    assert "--world=8" in str(found.action)
    assert "CUDA_VISIBLE_DEVICES is not set" in str(found.action)
    assert blocking([found]) == [found]


def test_shared_gpus_are_a_warning(root: Path) -> None:
    found = finding(read(root), "GPUs", world=9, share_gpus=True)
    assert found.state == "warning"
    assert blocking([found]) == []


@pytest.mark.parametrize(
    ("environ", "nvml", "advice"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "nvml_pro6000_x8.json", "unset it"),
        ({}, "nvml_pro6000_x8.json", "NVML lists 8"),
        ({}, None, "--gpus all"),
    ],
)
def test_no_gpu_at_all_says_why(root: Path, environ: dict[str, str], nvml: str | None, advice: str) -> None:
    found = finding(read(root, nvml=nvml, environ=environ, devices=0), "GPUs")
    assert (found.state, found.got) == ("problem", "torch sees none")
    assert advice in str(found.action)
    assert blocking([found]) == [found]


def test_a_torch_that_cannot_count_is_not_measured(root: Path) -> None:
    found = finding(read(root, devices=NotMeasured("RuntimeError: broken")), "GPUs")
    assert (found.state, found.got) == ("not measured", "RuntimeError: broken")


def test_the_list_names_the_gpus(root: Path) -> None:
    found = finding(read(root), "GPU list")
    assert found.got == "8 x NVIDIA RTX PRO 6000 Blackwell Server Edition (95.6 GiB, sm_120)"
    entry = finding(read(root, environ={"CUDA_VISIBLE_DEVICES": "0,9"}, devices=1), "GPU list")
    assert entry.state == "warning"
    assert "'9'" in str(entry.action)


def test_gpus_that_torch_and_nvml_count_differently_are_not_identified(root: Path) -> None:
    box = read(root, devices=5)
    for name in ("GPU list", "duplicate GPUs", "GPU models", "kernel images", "clock events"):
        found = finding(box, name)
        assert found.state == "not measured"
        assert "torch counts 5 GPUs, NVML 8" in found.got


def test_one_gpu_under_two_numbers_is_refused_by_uuid(root: Path) -> None:
    box = read(root, nvml="nvml_duplicate_uuid.json")
    found = finding(box, "duplicate GPUs")
    assert (found.state, found.got) == ("problem", f"GPUs 1, 3 are one: {UUID.format(1)}")
    assert blocking([found]) == [found]
    assert finding(box, "duplicate GPUs", share_gpus=True).state == "warning"
    assert finding(read(root), "duplicate GPUs").got == "8 different UUIDs"


def test_a_gpu_that_is_named_twice_is_found_where_cuda_shows_none(root: Path) -> None:
    box = read(root, environ={"CUDA_VISIBLE_DEVICES": "4,4"}, devices=0)
    assert finding(box, "duplicate GPUs").got == f"GPUs 0-1 are one: {UUID.format(4)}"
    assert "name each GPU once" in str(finding(box, "GPUs").action)


def test_an_unread_uuid_is_not_a_different_one(root: Path) -> None:
    answers = recording("nvml_pro6000_x8.json")
    answers["gpus"][7]["uuid"] = {"error": "Unknown"}
    found = finding(read(root, nvml=answers), "duplicate GPUs")
    assert (found.state, "GPU 7" in found.got) == ("not measured", True)


def test_unlike_models_are_refused_unless_meant(root: Path) -> None:
    box = read(root, nvml="nvml_mixed.json")
    found = finding(box, "GPU models")
    assert (found.state, found.fault_class) == ("problem", "hardware")
    assert "GPUs 0, 2: NVIDIA RTX PRO 6000 Blackwell Server Edition (95.6 GiB, sm_120)" in found.got
    assert "GPU 1: NVIDIA GeForce RTX 5090 (31.8 GiB, sm_120)" in found.got
    assert blocking([found]) == [found]
    assert finding(box, "GPU models", allow_mixed=True).state == "warning"


@pytest.mark.parametrize(("field", "value"), [("name", "NVIDIA GeForce RTX 5090"), ("capability", [12, 1])])
def test_unlike_gpus_with_the_same_memory_are_refused(root: Path, field: str, value: Any) -> None:
    answers = recording("nvml_pro6000_x8.json")
    answers["gpus"][4][field] = value
    assert finding(read(root, nvml=answers), "GPU models").state == "problem"


@pytest.mark.parametrize(
    ("memory", "state"), [(97887 << 20, "ok"), (97800 << 20, "ok"), (92 * GIB, "problem"), (None, "not measured")]
)
def test_one_model_with_uneven_memory_is_mixed_too(root: Path, memory: int | None, state: str) -> None:
    answers = recording("nvml_pro6000_x8.json")
    answers["gpus"][4]["memory"] = {"error": "NotSupported"} if memory is None else memory
    assert finding(read(root, nvml=answers), "GPU models").state == state


def test_a_lost_gpu_is_a_hardware_problem(root: Path) -> None:
    found = finding(read(root, nvml="nvml_sick.json", devices=5), "lost GPUs")
    assert (found.state, found.got, found.fault_class) == ("problem", "NVML device 5: GPU is lost", "hardware")
    assert finding(read(root), "lost GPUs").state == "ok"


def test_a_gpu_that_is_lost_while_it_answers_is_lost(root: Path) -> None:
    answers = recording("nvml_pro6000_x8.json")
    answers["gpus"][3]["ecc"] = {"error": "GpuIsLost"}
    box = read(root, nvml=answers, devices=7)
    assert finding(box, "lost GPUs").got == "NVML device 3: GPU is lost"


@pytest.mark.parametrize(("world", "state"), [(None, "warning"), (1, "warning"), (2, "problem")])
def test_a_slice_is_no_gpu(root: Path, world: int | None, state: str) -> None:
    found = finding(read(root, nvml="nvml_h100_mig.json", devices=1), "MIG", world=world)
    assert (found.state, found.got) == (state, "GPU 0: NVIDIA H100 80GB HBM3 MIG 3g.40gb")
    assert finding(read(root), "MIG", world=world).state == "ok"


def test_without_nvml_nothing_about_gpus_is_well(root: Path) -> None:
    findings = judge(read(root, nvml=None, build=torch_build(8)), world=8, device="cuda")
    asked = {"GPU list", "duplicate GPUs", "GPU models", "lost GPUs", "MIG", "kernel images", "clock events"}
    asked |= {"ECC errors", "row remapping"}
    said = {found.name: found for found in findings if found.name in asked}
    assert said.keys() == asked
    assert {(found.state, found.got) for found in said.values()} == {
        ("not measured", "nvidia-ml-py is not installed: pip install nvidia-ml-py")
    }
    assert [found.state for found in findings if found.name == "GPUs"] == ["ok"]
