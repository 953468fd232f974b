"""Reports as the suite writes them: the Gloo tier on a CPU box that qualifies, that fails, and that was cut short."""

from __future__ import annotations

import copy
from typing import Any

from tests.unit.sample_checks import WORLDS, Report, instances, node

CONTROLS = (
    ("a flipped bit in one payload", "1 of 470,389 elements differ, first at (12, 7): rank 3"),
    ("swapped rows", "2 of 89 rows differ, first rows [4, 5]: rank 0"),
    ("a partial left out", "worst row 41.2 times the budget: rank 1"),
    ("a dead rank", "rank 2 was killed by SIGKILL"),
    ("a rank that never comes", "rank 7 never came; 7 ranks waited in all_to_all for 5 s"),
)
PREFLIGHT = (
    ("/dev/shm", "ok", "15.6 GiB free", "at least 0.5 GiB", None, None),
    ("open files", "ok", "1,048,576", "at least 4,096", None, None),
    ("loopback", "ok", "lo, 127.0.0.1", None, None, None),
    ("cores", "warning", "2 cores for 8 ranks", "a core for each rank", "Expect the tier to take minutes.", "stack"),
    ("memory", "ok", "29.4 GiB free", "at least 4 GiB", None, None),
)


def qualified() -> Report:
    """A full run of the Gloo tier."""
    checks = instances()
    required = len(checks)
    return {
        "schema": "h3core-report-1",
        "h3core": "0.1.0",
        "run": {
            "id": "9f1c2ab84d0e4c2f8a6b5d3e7c1f0a92",
            "state": "ended",
            "started_utc": "2026-11-30T23:59:01Z",
            "duration_s": 271.4,
            "host": "cpu-box-17",
            "command": "python -m pytest -m gloo --report-dir=report",
            "tier": "gloo",
            "worlds": list(WORLDS),
            "modes": ["ulysses", "tensor"],
            "options": [
                {"name": "--world", "value": "2,4,6,8", "source": "default"},
                {"name": "--rank-timeout", "value": "120", "source": "default"},
                {"name": "--report-dir", "value": "report", "source": "command line"},
            ],
            "pytest_exit_status": 0,
        },
        "verdict": {
            "word": "QUALIFIED (software, CPU)",
            "outcome": "qualified",
            "exit_code": 0,
            "line": f"QUALIFIED (software, CPU); worlds 1, 2, 4, 6, 8; both modes; {required} of {required} required "
            "checks, controls 5 of 5 caught; 4,911 comparisons in 271 s",
            "reasons": [],
            "narrowed": [],
        },
        "failures": [],
        "coverage": {"required": required, "passed": required, "failed": 0, "not_run": 0, "missing": []},
        "controls": {
            "required": 5,
            "caught": 5,
            "list": [{"name": name, "world": 8, "caught": True, "how": how} for name, how in CONTROLS],
        },
        "checks": checks,
        "presence": [
            {
                "world": world,
                "rank": rank,
                "world_seen": world,
                "backend": "gloo",
                "pid": 4000 + 10 * world + rank,
                "device": "cpu",
                "device_name": None,
                "device_uuid": None,
                "cpus": [0, 1],
            }
            for world in WORLDS
            for rank in range(world)
        ],
        "preflight": [
            dict(zip(("name", "state", "got", "expected", "action", "fault_class"), row, strict=True))
            for row in PREFLIGHT
        ],
        "tables": [
            {
                "title": "row-invariance",
                "lines": [
                    "23 of 24 operations give a row the same bits at every number of rows",
                    "bfloat16  video_out              differs at 3 of 15 sizes: 4, 8, 12",
                ],
            },
            {
                "title": "error budget: tensor in bf16",
                "lines": [f"world {world}, nvfp4, fp32 partials: rms_ratio 0.997..1.002" for world in WORLDS],
            },
        ],
        "machine": {
            "python": "3.11.7",
            "torch": "2.13.0+cpu",
            "torch_cuda": None,
            "platform": "Linux-6.18.44-x86_64-with-glibc2.36",
            "cpu": "AMD EPYC 9B14",
            "cpu_capability": "AVX512",
            "cores": 2,
            "memory_bytes": 33_554_432_000,
            "gpus": [],
            "driver": None,
            "nccl": None,
        },
        "environment": {"OMP_NUM_THREADS": "1", "MKL_CBWR": "AVX2,STRICT"},
        "comparison": None,
    }


def not_qualified() -> Report:
    """Three failures of two classes, one of them seen by two checks."""
    report = qualified()
    name = "real_ranks_equal_virtual_ranks_bit_for_bit"
    _fail(
        report,
        {node("denoise", name, 4, "tensor"): [3], node("denoise", name, 8, "tensor"): [3, 7]},
        fault_class="interconnect",
        problem="latents, video: 1,204 of 470,389 elements differ in 7 rows (first rows [12, 13])",
        meaning="Real ranks got other bytes than the same partition on virtual ranks, while every probe of the sums is "
        "sound: bytes changed on their way between ranks.",
        action="Run it alone three times; if the same rank differs each time, look at its link and at dmesg.",
    )
    _fail(
        report,
        {node("nvfp4_shards", "shards_of_one_block_are_the_rows_and_columns_of_the_whole", 6, None, "released"): []},
        fault_class="stack",
        problem="rank 2 was killed by SIGKILL",
        meaning="Something outside the suite killed a rank; most often it is the kernel, for lack of memory.",
        action="Look for 'Out of memory' in dmesg and at the container's memory limit; then run the check alone.",
    )
    _settle(report, "not qualified", "NOT QUALIFIED", 1, ["3 checks failed"])
    report["preflight"][4] |= {
        "state": "problem",
        "got": "1.1 GiB free",
        "action": "Free memory, or raise the container's limit to 4 GiB.",
        "fault_class": "stack",
    }
    return report


def incomplete() -> Report:
    """A run that was narrowed with -k, so that most of it did not run, and nothing failed."""
    report = qualified()
    why = "deselected by -k 'blocks'"
    for check in report["checks"]:
        if "test_blocks" not in check["check"]:
            check |= {"outcome": "not run", "reason": why, "duration_s": None, "largest_difference": None, "ranks": []}
            check |= dict.fromkeys(("comparisons", "exact", "elements", "bytes"), 0)
            check["check"] = check["check"].removeprefix("tests/gloo/")  # never collected: the manifest's name
            item = {key: check[key] for key in ("check", "world", "mode")} | {"why": why}
            report["coverage"]["missing"].append(item)
    missing = len(report["coverage"]["missing"])
    report["coverage"] |= {"passed": report["coverage"]["required"] - missing, "not_run": missing}
    for control in report["controls"]["list"]:
        control |= {"caught": None, "how": why}
    report["controls"]["caught"] = 0
    report["run"]["command"] = "python -m pytest -m gloo -k blocks --report-dir=report"
    first = report["coverage"]["missing"][0]["check"]
    reason = f"{missing} of {report['coverage']['required']} required checks did not run (first: {first}: {why})"
    report["verdict"]["narrowed"] = ["-k 'blocks' (command line)"]
    _settle(report, "incomplete", "INCOMPLETE", 10, [reason])
    return report


def in_progress() -> Report:
    """What a run begins with: everything is required, nothing has run."""
    report = incomplete()
    why = "never ran"
    report["coverage"] |= {"passed": 0, "not_run": report["coverage"]["required"], "missing": []}
    for check in report["checks"]:
        check |= {"outcome": "not run", "reason": why, "duration_s": None, "largest_difference": None, "ranks": []}
        check |= dict.fromkeys(("comparisons", "exact", "elements", "bytes"), 0)
        # As the manifest writes it: no folder, the mode always, the variant last.
        function = check["check"].partition("[")[0].removeprefix("tests/gloo/")
        check["check"] = f"{function}[{'-'.join(filter(None, (_world(check), check['mode'], _variant(check))))}]"
        item = {key: check[key] for key in ("check", "world", "mode")} | {"why": why}
        report["coverage"]["missing"].append(item)
    report["run"] |= {
        "state": "in progress",
        "id": "00000000000040008000000000000001",
        "duration_s": 0.2,
        "pytest_exit_status": None,
        "command": "python -m pytest -m gloo --report-dir=report",
    }
    report["verdict"]["narrowed"] = []
    report["presence"], report["tables"] = [], []
    _settle(report, "incomplete", "INCOMPLETE", 10, ["in progress, or killed before it ended"])
    return report


def gpu_box() -> Report:
    """A reduced NCCL run on eight GPUs: PASSED, and less than a qualification."""
    report = qualified()
    uuids = [f"GPU-5f3c0{index}aa-1111-2222-3333-44445555666{index}" for index in range(8)]
    report["run"] |= {"tier": "nccl", "command": "python -m pytest -m nccl --mode=ulysses", "host": "h200-node-3"}
    report["machine"] |= {"torch": "2.13.0+cu130", "torch_cuda": "13.0", "driver": "580.95.05", "nccl": "2.28.9"}
    report["machine"]["gpus"] = [
        {"index": i, "name": "NVIDIA H200", "uuid": uuid, "memory_bytes": 150_754_820_096, "compute_capability": "9.0"}
        for i, uuid in enumerate(uuids)
    ]
    for rank in report["presence"]:
        number = rank["rank"]
        rank |= {
            "backend": "nccl",
            "device": f"cuda:{number}",
            "device_uuid": uuids[number],
            "device_name": "NVIDIA H200",
        }
    word = "PASSED, REDUCED: mode ulysses"
    report["verdict"] |= {"outcome": "passed", "word": word, "line": f"{word}; worlds 1, 2, 4, 6, 8; mode ulysses"}
    return report


def unit_run() -> Report:
    """A run without a tier: no qualification, and no verdict."""
    report = qualified()
    report["run"] |= {"tier": None, "command": "python -m pytest tests/unit"}
    report["verdict"] |= {"outcome": None, "word": "NO VERDICT", "line": "NO VERDICT: not a qualification"}
    report["coverage"] = {"required": 0, "passed": 0, "failed": 0, "not_run": 0, "missing": []}
    report["controls"] = {"required": 0, "caught": 0, "list": []}
    for check in report["checks"]:
        check |= {"required": False, "owed": None}
    report["presence"] = []
    return report


SAMPLES = {
    "qualified": qualified,
    "not qualified": not_qualified,
    "incomplete": incomplete,
    "in progress": in_progress,
    "gpu box": gpu_box,
    "unit run": unit_run,
}


def _fail(report: Report, nodes: dict[str, list[int]], **said: str) -> None:
    for nodeid, ranks in nodes.items():
        check = next(check for check in report["checks"] if check["check"] == nodeid)
        check["outcome"] = "failed"
        report["failures"].append(
            {"check": nodeid, "world": check["world"], "mode": check["mode"], "ranks": ranks}
            | said
            | {
                "reproduce": f"python -m pytest '{nodeid}' --world={check['world']}",
                "details": f"RankError: rank {ranks or 2} of {check['world']}\n"
                '  File "h3core/qualify/checks/compare.py", line 66, in compare\n    raise ComparisonError(...)\n'
                f"h3core.qualify.checks.compare.ComparisonError: {said['problem']}",
            }
        )
    report["coverage"]["failed"] += len(nodes)
    report["coverage"]["passed"] -= len(nodes)


def _settle(report: Report, outcome: str, word: str, code: int, reasons: list[str]) -> None:
    coverage = report["coverage"]
    line = f"{word}: {reasons[0]}; {coverage['passed']} of {coverage['required']} required checks"
    report["verdict"] |= {"outcome": outcome, "word": word, "exit_code": code, "line": line, "reasons": reasons}


def _world(check: Report) -> str:
    return f"world={check['world']}"


def _variant(check: Report) -> str:
    inside = check["check"].partition("[")[2].removesuffix("]")
    words = [word for word in inside.split("-") if word not in (_world(check), check["mode"])]
    return "-".join(words)


def edited(report: Report, **changes: Any) -> Report:
    """A copy with `run__tier="nccl"` and the like."""
    copied = copy.deepcopy(report)
    for path, value in changes.items():
        *inner, last = path.split("__")
        place = copied
        for key in inner:
            place = place[key]
        place[last] = value
    return copied
