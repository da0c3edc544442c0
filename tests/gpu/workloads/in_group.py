#!/usr/bin/env python3
"""Runs exchange_job.py in the control group $GROUP, if there is one: in_group.py NAME ARGUMENTS of exchange_job.py"""
import os, pathlib, sys
if group := os.environ.get("GROUP"): pathlib.Path(group, "cgroup.procs").write_text(str(os.getpid()))
os.execv(sys.executable, [sys.executable, str(pathlib.Path(__file__).with_name("exchange_job.py")), *sys.argv[1:]])
