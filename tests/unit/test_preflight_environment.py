"""What a report may hold of the environment: an allow-list, without credentials and prompts.

A pass means: a report can be handed on. Run: pytest tests/unit/test_preflight_environment.py
"""

from __future__ import annotations

import hashlib

import pytest

from h3core.qualify.preflight import environment_facts
from h3core.qualify.preflight.environment import shown


def test_only_what_is_on_the_list_is_held() -> None:
    kept = {
        "NCCL_P2P_DISABLE": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "OMP_NUM_THREADS": "4",
        "MKL_CBWR": "AVX2,STRICT",
        "GLOO_SOCKET_IFNAME": "lo",
        "H3_WORLD_SIZE": "2,4",
        "LD_PRELOAD": "/opt/lib.so",
        "LD_LIBRARY_PATH": "/opt/keyring/lib:/usr/lib",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTEST_ADDOPTS": "-k blocks",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "7",
    }
    left_out = {
        "HOME": "/home/user",
        "PATH": "/usr/bin",
        "RUNPOD_POD_ID": "abc",
        "PYTHONPATH": "/src",
        "OMP_PROC_BIND": "true",
        "XNCCL_DEBUG": "INFO",
        "SSH_CONNECTION": "10.0.0.1",
    }
    assert environment_facts(kept | left_out) == kept


@pytest.mark.parametrize(
    "name",
    ["RUNPOD_API_KEY", "HF_TOKEN", "H3_API_KEY", "NCCL_SECRET", "CUDA_TOKEN", "H3_PASSWORD", "H3_passwd", "NCCL_Key"],
)
def test_names_of_credentials_are_never_held(name: str) -> None:
    assert environment_facts({name: "hunter2"}) == {}


@pytest.mark.parametrize("name", ["H3_PROMPT", "H3_NEGATIVE_PROMPT", "H3_prompt_text"])
def test_of_a_prompt_only_the_digest_is_held(name: str) -> None:
    prompt = "a private idea"
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    assert environment_facts({name: prompt}) == {name: f"sha256:{digest}"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("https://user:hunter2@host/model", "https://***@host/model"),
        ("https://user:hun@ter2@host/model", "https://***@host/model"),
        ("s3://AKIAABCDEFGHIJKLMNOP@bucket/x", "s3://***@bucket/x"),
        ("https://host/model?token=hunter2&x=1", "https://host/model?token=***&x=1"),
        ("https://host/m?X-Amz-Signature=abc123;y", "https://host/m?X-Amz-Signature=***;y"),
        ("--hf-token hunter2 -q", "--hf-token *** -q"),
        ("--api_key=hunter2", "--api_key=***"),
        ("password=hunter2,rest", "password=***,rest"),
        ("/models/hf_abcdefghijklmnop/x", "/models/***/x"),
        ("/data/monkey:/usr/lib", "/data/monkey:/usr/lib"),
        ("=eth0", "=eth0"),
        ("tokens", "tokens"),
    ],
)
def test_values_that_look_like_credentials_are_masked(value: str, expected: str) -> None:
    assert shown("H3_MODEL_PATH", value) == expected


def test_a_setting_that_is_not_on_the_list_has_no_value() -> None:
    assert shown("AWS_REGION", "eu") == "***"
