#!/bin/sh
# Runs a workload in the control group $GROUP, if there is one: in_group.sh NAME ARGUMENTS of exchange_job.py
[ -z "${GROUP:-}" ] || echo $$ >"$GROUP/cgroup.procs" || exit 1
exec "${PYTHON:-python3}" "$(dirname "$0")/exchange_job.py" "$@"
