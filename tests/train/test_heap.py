import platform
import subprocess
import sys

import pytest

CODE = """
import resource, torch
from pico_train.heap import keep_freed_memory
keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**25)  # 128 MB, more than malloc keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults(), min(faults() for _ in range(8)))  # a small object may take the beginning of the hole once
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told to keep what is freed")
def test_a_freed_buffer_is_taken_again_without_fetching_its_pages() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    first, second = map(int, done.stdout.split())
    assert first > 1000
    assert second < first / 100
