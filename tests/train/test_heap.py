import mmap
import platform
import subprocess
import sys
from pathlib import Path

import pytest

KEEPING = """
import resource, torch
from pico_train.heap import keep_freed_memory
keep_freed_memory(0)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**25)  # 128 MB, more than malloc keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults(), min(faults() for _ in range(8)))  # a small object may take the beginning of the hole once
"""
HUGE_PAGES = """
import torch
from pathlib import Path
from pico_train.heap import keep_freed_memory
def resident(kind):
    [line] = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) // 1024
before = resident("Rss:")
keep_freed_memory(3 * 2**30)
print(resident("Rss:") - before)
x = torch.ones(2**25)  # 128 MB
print(resident("AnonHugePages:"))
"""
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told to keep what is freed"
)


def printed(code: str) -> list[int]:
    """The numbers that a process of its own prints: malloc's settings hold until the end of a process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@needs_glibc
def test_a_freed_buffer_is_taken_again_without_fetching_its_pages() -> None:
    first, second = printed(KEEPING)
    assert first > 1000
    assert second < first / 100


@needs_glibc
@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not SETTING.exists() or "[never]" in SETTING.read_text(),
    reason="this system has no transparent huge pages",
)
def test_room_is_huge_pages_that_are_taken_when_they_are_touched() -> None:
    taken_at_once, huge = printed(HUGE_PAGES)
    assert taken_at_once < 20
    assert huge > 100
