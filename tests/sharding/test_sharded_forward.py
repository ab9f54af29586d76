"""Tensor-parallel forward on four fake CPU devices, in a child process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_b81_tensor_parallel_forward_equals_single_device():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(ROOT),
    }
    child = subprocess.run(
        [sys.executable, "-m", "tests.sharding.sharded_forward"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.count("sharded equals single") == 2
