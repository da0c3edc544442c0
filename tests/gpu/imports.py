#!/usr/bin/env python3
"""What `import torch` takes, plain and with the library preloaded, in interleaved pairs. Needs PyTorch and no GPU.

usage: imports.py LIBRARY [PYTHON] [PAIRS]
"""

import os
import statistics
import subprocess
import sys
import time


def import_takes(python, preload):
    environment = os.environ | ({"LD_PRELOAD": preload} if preload else {})
    begin = time.monotonic()
    subprocess.run([python, "-c", "import torch"], env=environment, check=True)
    return time.monotonic() - begin


def main():
    library, python, pairs = (sys.argv[1:] + [sys.executable, "7"][len(sys.argv) - 2 :])[:3]
    # The first of each reads files that the others find in memory.
    for preload in ("", library):
        import_takes(python, preload)
    times = [(import_takes(python, ""), import_takes(python, library)) for _ in range(int(pairs))]
    for name, column in (("plain", 0), ("preloaded", 1)):
        column = [pair[column] for pair in times]
        print(f"{name:10} median {statistics.median(column):.3f} s, {min(column):.3f} to {max(column):.3f}")
    ratios = [under / plain for plain, under in times]
    print(f"ratio      median {statistics.median(ratios):.4f}, {min(ratios):.4f} to {max(ratios):.4f}")


main()
