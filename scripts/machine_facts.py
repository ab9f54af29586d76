"""What a benchmark's figures need to be judged: machine, versions, date, commit.

python scripts/machine_facts.py     # prints them as one JSON object
"""

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path

import jax


def machine_facts() -> dict:
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x.partition(":")[2] for x in info.read_text().split("\n") if "model name" in x]
        cpu = names[0].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """None where there is no git, or no repository."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return None
    return found or None


if __name__ == "__main__":
    print(json.dumps(machine_facts()))
