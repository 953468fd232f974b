"""Make the project's virtual environment around the torch that this Python already has.

`python tools/make_venv.py DIR`. A cloud image ships a torch built for its driver, and that stack is what
is being qualified: it is made visible in DIR, not replaced. Where there is no torch, 2.13.0 is installed.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

MINIMUM = (2, 9)
FALLBACK = "torch==2.13.0"
FIND_TORCH = "import torch; print(torch.__version__); print(torch.__file__)"


def main() -> int:
    """Create the environment; 0 on success."""
    if len(sys.argv) != 2:
        print("usage: python tools/make_venv.py DIR", file=sys.stderr)
        return 2
    if sys.version_info < (3, 11):  # noqa: UP036 - a newcomer's Python may be older than the package's floor
        print(f"h3core needs Python 3.11 or newer, this is {sys.version.split()[0]}: make PYTHON=...", file=sys.stderr)
        return 2
    target = Path(sys.argv[1])
    found = subprocess.run([sys.executable, "-c", FIND_TORCH], capture_output=True, text=True, check=False)
    venv.EnvBuilder(with_pip=True, clear=True).create(target)
    python = target / "bin" / "python"
    if found.returncode == 0:
        version, file = found.stdout.split("\n")[:2]
        if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM:
            print(f"torch {version} is older than 2.9: upgrade it, or use a Python without torch", file=sys.stderr)
            return 2
        # A .pth file puts the folder behind the environment's own packages: torch and its CUDA libraries are
        # found there, everything that is pinned is not.
        (site,) = (target / "lib").glob("python*/site-packages")
        (site / "outer-torch.pth").write_text(f"{Path(file).parents[1]}\n")
        print(f"using torch {version} of {sys.executable}")
        return 0
    print(f"this Python has no torch: installing {FALLBACK}")
    return subprocess.run([python, "-m", "pip", "install", "--quiet", FALLBACK], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
