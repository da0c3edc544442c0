#!/usr/bin/env python3
"""nvidia-smi: its table and a query, two and one time."""
import shutil, subprocess, program
program.need()
if not shutil.which("nvidia-smi"): program.skip("no nvidia-smi")
def smi(*arguments): return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20)
with program.work(lambda: None):
    tables = [smi() for _ in range(2)]
    cards = smi("--query-gpu=index,name,uuid,memory.total", "--format=csv,noheader")
program.tell(cards.stdout.strip(), ok=all(r.returncode == 0 and "Driver Version" in r.stdout for r in tables) and cards.returncode == 0 and cards.stdout)
