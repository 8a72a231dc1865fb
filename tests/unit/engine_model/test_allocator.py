"""Memory that conversions leave behind while a model is loaded."""

import subprocess
import sys

SCRIPT = """
import torch
from tidegate_engine.allocator import freed_at_once

def resident():
    lines = open('/proc/self/status').read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith('VmRSS:'))

torch.ones(1 << 20).mul(2)
before = resident()
with freed_at_once():
    kept = []
    for _ in range(30):
        large = torch.ones(1 << 20)
        kept.append(torch.ones(1 << 10))
        del large
    held = torch.ones(1 << 22)
print(resident() - before)
print(held.sum().item() + sum(each.sum().item() for each in kept))
"""


def test_what_is_freed_while_loading_goes_back_to_the_system_and_what_is_kept_stays() -> None:
    output = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True).stdout.split()
    assert int(output[0]) < 18 << 10
    assert float(output[1]) == (1 << 22) + 30 * 1024
