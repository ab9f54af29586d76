"""Free memory as the files of a made-up machine tell it."""

from pathlib import Path

from engine.platform import _host_memory_bytes

MEMINFO = "MemTotal:  9000 kB\nMemFree: 10 kB\nMemAvailable:  8000 kB\n"
AVAILABLE = 8000 * 1024


def machine(root: Path, files: dict[str, str]) -> list[int]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return list(_host_memory_bytes(root))


def group(where: str, limit, usage: int, cached: int) -> dict[str, str]:
    return {
        f"sys/fs/cgroup/{where}memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{where}memory.current": f"{usage}\n",
        f"sys/fs/cgroup/{where}memory.stat": f"anon 5\ninactive_file {cached}\nactive_file 7\n",
    }


def test_without_control_groups_it_is_the_available_ram(tmp_path):
    assert machine(tmp_path, {"proc/meminfo": MEMINFO}) == [AVAILABLE]
    assert machine(tmp_path / "no files", {}) == []


def test_a_container_has_what_its_limit_leaves(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"}
    found = machine(tmp_path, files | group("", 1_000_000, 700_000, 50_000))
    assert found == [AVAILABLE, 350_000]


def test_every_group_around_the_process_counts(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/pods/engine\n"}
    files |= group("pods/engine/", "max", 700, 0)
    files |= group("pods/", 1_000, 1_200, 100)  # the kernel lets usage pass the limit a little
    files |= group("other/", 5, 5, 0)
    assert machine(tmp_path, files) == [AVAILABLE, 0]


def test_version_1_of_control_groups(tmp_path):
    where = "sys/fs/cgroup/memory/"
    files = {
        "proc/self/cgroup": "4:cpu,memory:/box\n3:pids:/box\n0::/\n",
        where + "memory.limit_in_bytes": f"{2**63 - 4096}\n",  # no limit
        where + "memory.usage_in_bytes": "90\n",
        where + "memory.stat": "cache 1\n",
        where + "box/memory.limit_in_bytes": "1000\n",
        where + "box/memory.usage_in_bytes": "400\n",
        where + "box/memory.stat": "inactive_file 1\ntotal_inactive_file 30\n",
    }
    assert machine(tmp_path, files) == [630, 2**63 - 4096 - 90]
