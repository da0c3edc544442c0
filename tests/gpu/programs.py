#!/usr/bin/env python3
"""Real programs, natively and under nvshare, side by side: the same results, the time each takes, and what the library counted.

Run on a machine with a GPU, PyTorch and the like, and `dist/` (cargo dist-local). Rows go to $OUT/rows.jsonl as they come, logs
to $OUT/logs. A row counts if both runs are well, their results are the same, launches were gated and none passed by; a program
that is skipped has not passed. Exit code 1 if anything failed."""
import argparse, statistics, types
from harness import *

LIMIT = 60
POOL = 15  # GiB: three quarters of 20, which is what JAX takes of a GPU of 20 GiB (a smaller --gpu-memory would be its GPU's size)


def program(script, contended=None, gated=True, native=None, under=None, **env):
    """`contended`: the GPU's memory (--gpu-memory, and how it is scheduled) and a neighbour's GiB: both do not fit, or may not run together; `env` is for both runs."""
    return types.SimpleNamespace(script=str(HERE / "workloads/programs" / script), contended=contended, gated=gated, native=native or {}, under=under or {}, env=env)


PROGRAMS = {
    "eager": program("torch_eager.py", contended=("5632MiB", 4)),
    "compile": program("torch_compile.py", contended=("5632MiB", 4)),
    "graphs": program("torch_graphs.py", contended=("5632MiB", 4)),
    "expandable": program("torch_alloc.py", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
    "async": program("torch_alloc.py", contended=("5632MiB", 4), PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync"),
    "loader": program("torch_loader.py"),
    "ipc": program("torch_ipc.py", under=dict(NVSHARE_PLAIN="all")),
    "ddp": program("torch_ddp.py"),
    "transformers": program("hf_generate.py", contended=("5632MiB", 4)),
    "triton": program("triton_kernel.py"),
    "jax": program("jax_steps.py", contended=("40GiB --exclusive", 8), native=dict(XLA_PYTHON_CLIENT_MEM_FRACTION="?"), under=dict(NVSHARE_MEM_LIMIT="20GiB"), POOL_GIB=str(POOL)),
    "jax-async": program("jax_steps.py", native=dict(XLA_PYTHON_CLIENT_MEM_FRACTION="?"), under=dict(NVSHARE_MEM_LIMIT="20GiB"), POOL_GIB=str(POOL), XLA_PYTHON_CLIENT_ALLOCATOR="cuda_async"),
    "cupy": program("cupy_arrays.py"),
    "cuda-python": program("cuda_python.py"),
    "nvidia-smi": program("smi.py", gated=False),
    "torch-wide": program("torch_wide.py"),
    "parallel": program("torch_parallel.py", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NCCL_NVLS_ENABLE="0"),
    "jax-wide": program("jax_wide.py", native=dict(XLA_PYTHON_CLIENT_MEM_FRACTION="?"), under=dict(NVSHARE_MEM_LIMIT="20GiB")),
    "cupy-wide": program("cupy_wide.py"),
    "cuda-core": program("cuda_core.py"),
    "numba": program("numba_kernels.py"),
    "tools": program("tools.py", gated=False),
}


def total_mib():
    query = subprocess.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60)
    return int(query.stdout.split()[0])


def run(name, how, work, scheduler=None, others=()):
    """One run, finished. What compilers keep is kept for this run alone, else the second would have less to do than the first."""
    p = PROGRAMS[name]
    caches = tempfile.mkdtemp(prefix="nvshare-caches-")
    env = dict(p.env, WORK=str(work), **{v: f"{caches}/{v}" for v in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")}, **(p.under if scheduler else p.native))
    if env.get("XLA_PYTHON_CLIENT_MEM_FRACTION") == "?":
        env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(round(POOL * 1024 / total_mib(), 4))
    try:
        job = Job(p.script, f"{name}-{how}", scheduler=scheduler, env=env, log=f"program-{name}-{how}.log").finish(LIMIT, every=0.5, others=others)
    finally:
        shutil.rmtree(caches, ignore_errors=True)
    job.ok = job.process.returncode == 0 and job.result.get("ok") is True
    if not job.ok and job.process.returncode == 0 and "skipped" not in job.result:
        print(f"  {job.name} ended well without a result:", open(job.log).read()[-1500:], flush=True)
    return job


def verdict(name, native, under, hand_overs=0, neighbour=None):
    """Passed, or the first reason why not. Where there is nothing to compare with, nobody is said to have passed."""
    if "skipped" in native.result:
        return f"skipped: {native.result['skipped']}"
    if not native.ok:
        return "failed: natively"
    if not under.ok:
        return f"failed: under nvshare alone it is skipped: {under.result['skipped']}" if "skipped" in under.result else "failed: under nvshare"
    if native.result["check"] != under.result["check"]:
        return "failed: another result"
    counted = under.counted(list(under.clients.values()))
    if PROGRAMS[name].gated and not counted["gated"]:
        return "failed: nothing was gated"
    if counted["passed_by"] not in (0, "?"):
        return f"failed: {counted['passed_by']} calls passed by"
    if counted.get("hand_overs", 0) < hand_overs:
        return f"failed: {counted.get('hand_overs', 0)} hand-overs, {hand_overs} are wanted"
    if neighbour and not neighbour.result.get("ok"):
        return "failed: the neighbour"
    return "passed"


def fields(name, native, under):
    """A row but for its verdict. The counters are sums over the program's processes; managed: the most seen at once."""
    n, u = (job.result if job else {} for job in (native, under))
    if not under:
        return dict(program=name, native_ok=native.ok if "skipped" not in n else "-", native_s=n.get("total_s", "-"))
    ratio = round(u["total_s"] / n["total_s"], 4) if u.get("total_s") and n.get("total_s") else "-"
    counted = under.counted(list(under.clients.values()))
    shown = {k: counted[k] for k in ("gated", "passed_by", "hand_overs", "evicted_gib", "restored_gib") if k in counted}
    return dict(program=name, native_ok=native.ok, under_ok=under.ok, native_s=n.get("total_s", "-"), under_s=u.get("total_s", "-"), ratio=ratio, native_setup=n.get("setup_s", "-"), under_setup=u.get("setup_s", "-"),
                same_check="check" in n and n["check"] == u.get("check"), clients=len(under.clients), managed_gib=round(under.managed / GIB, 2), **shown)


def side_by_side(name, pairs, work):
    """By itself, with memory for all."""
    ratios = []
    for i in range(pairs):
        native, under = run(name, f"native{i}", work), None
        if native.ok:
            with Scheduler("--gpu-memory", "100GiB", log="info") as s:
                under = run(name, f"under{i}", work, s)
        row(scenario="programs", **fields(name, native, under), verdict=verdict(name, native, under))
        if not under:
            return
        ratios.append(ROWS[-1]["ratio"])
    if pairs > 1 and "-" not in ratios:
        row(scenario="programs", program=name, ratio=f"median {statistics.median(ratios):.4f} min {min(ratios):.4f} max {max(ratios):.4f}")


def contended(name, pairs, work, tq=0.3):
    """Taking turns with a neighbour that knows what it has written, with room for one of both."""
    for i in range(pairs):
        native, under, neighbour = run(name, f"native-x{work}-{i}", work), None, None
        if native.ok:
            memory, gib = PROGRAMS[name].contended
            with Scheduler("--gpu-memory", *memory.split(), "--tq", str(tq), log="info") as s:
                stop = pathlib.Path(s.dir) / "stop"
                neighbour = Job(str(HERE / "workloads/programs/neighbour.py"), "neighbour", stop, "--gib", gib, scheduler=s, log=f"program-{name}-neighbour{i}.log")
                try:
                    until = time.time() + 30
                    while not os.path.exists(f"{stop}.ready") and neighbour.process.poll() is None and time.time() < until:
                        time.sleep(0.01)
                    under = run(name, f"contended{i}", work, s, others=[neighbour])
                finally:
                    stop.touch()
                    neighbour.finish(20)
        row(scenario="contended", **fields(name, native, under), **(dict(neighbour_wrong=neighbour.result.get("wrong_words", "?"), neighbour_hand_overs=neighbour.counted().get("hand_overs", "?")) if neighbour else {}),
            verdict=verdict(name, native, under, 10, neighbour))
        if not under:
            return


if __name__ == "__main__":
    starred = [name for name, p in PROGRAMS.items() if p.contended]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="programs: " + " ".join(name + "*" * (name in starred) for name in PROGRAMS) + "\n* runs with --contended")
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs to run; all of them by default")
    parser.add_argument("--pairs", type=int, default=1, help="native and under nvshare, so many times, interleaved")
    parser.add_argument("--memory", choices=["managed", "swap", "off"], help="NVSHARE_MEMORY for the runs under nvshare")
    parser.add_argument("--contended", action="store_true", help="the starred programs, taking turns with a second client")
    parser.add_argument("--tq", type=float, default=0.3, help="the turns' length in seconds, with --contended")
    parser.add_argument("--limit", type=float, default=LIMIT, help="a program that takes more seconds is killed, and has failed")
    parser.add_argument("--cold", action="store_true", help="do not touch the host's memory first: the rates are not looked at")
    parser.add_argument("--work", type=float, help="so many times a program's usual work; 1, and 1.5 with --contended, so that hand-overs suffice")
    a = parser.parse_args()
    choose_memory(a.memory)
    LIMIT = a.limit
    if a.memory == "swap":  # memory that a program creates and maps itself moves too
        PROGRAMS["jax"].contended, PROGRAMS["expandable"].contended = ("20GiB", 8), ("5632MiB", 4)
        starred.append("expandable")
    if unknown := [name for name in a.names if name not in PROGRAMS or a.contended and name not in starred]:
        parser.error(f"not among the {'starred ' * a.contended}programs: {' '.join(unknown)}")
    if not shutil.which("nvidia-smi"):
        raise SystemExit("no nvidia-smi: this runs on a machine with a GPU")
    print(card(), flush=True)
    if a.contended and not a.cold:
        warm_host(48)
    for name in a.names or (starred if a.contended else PROGRAMS):
        begin = time.time()
        try:
            work = a.work or (1.5 if a.contended else 1)
            contended(name, a.pairs, work, a.tq) if a.contended else side_by_side(name, a.pairs, work)
        except Exception as error:  # a scheduler that is gone, say: the other programs are still worth their time
            row(scenario="contended" if a.contended else "programs", program=name, verdict=f"failed: {error!r}"[:200])
        print(f"  {name} took {time.time() - begin:.0f} s", flush=True)
    for scenario in dict.fromkeys(r["scenario"] for r in ROWS):
        table(scenario)
    verdicts = [r["verdict"].partition(":")[0] for r in ROWS if "verdict" in r]
    print(f"\n{', '.join(f'{verdicts.count(v)} {v}' for v in ('passed', 'failed', 'skipped'))}\n{card()}")
    sys.exit("failed" in verdicts)
