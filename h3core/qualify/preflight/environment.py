"""Environment variables that a report may hold: an allow-list, and never a credential or a prompt.

The whole environment of a pod holds keys (RUNPOD_API_KEY, HF_TOKEN, ...), and reports are passed around.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final

NAMES: Final = frozenset(
    {
        "NVIDIA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "PYTEST_ADDOPTS",
        # torchrun's
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
PREFIXES: Final = ("NCCL_", "TORCH_NCCL_", "TORCHELASTIC_", "CUDA_", "MKL_", "GLOO_", "H3_")

SECRET: Final = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
"""A name with one of these is left out, whatever its prefix."""

MASK: Final = "***"
_USER_IN_URL: Final = re.compile(r"(?<=://)[^/\s]+(?=@)")
_WORD: Final = r"[\w-]*(?:key|token|secret|password|passwd|credential|signature)[\w-]*"
# Not after a colon: LD_LIBRARY_PATH=/opt/keyring/lib:/usr/lib is no secret.
_ASSIGNED: Final = re.compile(rf"((?:--{_WORD}[= ]|{_WORD}=)\s*)[^\s&;,]+", re.IGNORECASE)
_KNOWN_FORMS: Final = re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|rpa_|AKIA)[\w-]{8,}")


def environment_facts(environ: Mapping[str, str]) -> dict[str, str]:
    """What `environ` holds of the allow-list, sorted by name, each value as `shown` gives it."""
    return {name: shown(name, environ[name]) for name in sorted(environ) if allowed(name)}


def allowed(name: str) -> bool:
    """Whether a report may hold a variable of this name."""
    return (name in NAMES or name.startswith(PREFIXES)) and not SECRET.search(name)


def shown(name: str, value: str) -> str:
    """`value` without what looks like a credential; of a prompt, its digest alone; "***" where `name` may not be shown.

    The last is for NCCL's configuration files, which can set any variable.
    """
    if not allowed(name):
        return MASK
    if "PROMPT" in name.upper():
        return f"sha256:{hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()}"
    return masked(value)


def masked(text: str) -> str:
    """`text` without what looks like a credential: users in addresses, assigned keys, tokens of known forms."""
    text = _USER_IN_URL.sub(MASK, text)
    text = _ASSIGNED.sub(rf"\1{MASK}", text)
    return _KNOWN_FORMS.sub(MASK, text)
