#!/usr/bin/env python3
"""Memory that one process makes (a sealed memfd) and another, not root, page-locks: does the driver take it, how fast, who is charged,
when does the kernel let its maker take it back, and does any of it hold up a third process's kernels?

    registered_segment.py [--segment MIB] [--count N] [--limit MIB] [--rows FILE]

The maker has no CUDA. It makes N segments, touches them with several threads, seals them as the scheduler does (growing) and, in a second
round, as nobody can undo (shrinking, growing, seals), and passes their descriptors over a socket. The user sets its user to nobody and its
memlock limit to 64 KiB, joins a control group whose memory.max is --limit (where one can be made), registers the segments, copies both
ways, and leaves in different ways. Each row is printed, and appended to FILE as one line of JSON, as soon as it is known.

On an H200, driver 580.159.04, with 8 segments of 256 MiB: made at 1.8 GiB/s by one thread, 4.6 by four, 4.0 by eight; registered at 9.3 to 11.5,
copied at 51.3 out and 51.4 back, unregistered at 55; the client's group was charged for 30 MiB at most; sealing against writing was refused
while a segment was registered, though it was mapped nowhere, for as long as was looked (15 s), at 0.18 s a call; all 8 were free 0.15 to 0.23 s
after they were unregistered, their context or their process had ended. The other process's kernels were not held up: worst 116 us.
"""
import argparse
import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

MIB = 1 << 20
ADD_SEALS, GET_SEALS = 1033, 1034
SEAL, SHRINK, GROW, WRITE = 1, 2, 4, 8
POPULATE_WRITE, HUGEPAGE, DONTFORK = 23, 14, 10
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
SPIN = (b".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry spin(.param .u64 n){.reg .u64 a,b,c;.reg .pred p;ld.param.u64 c,[n];"
        b"mov.u64 a,%globaltimer;L:mov.u64 b,%globaltimer;sub.u64 b,b,a;setp.lt.u64 p,b,c;@p bra L;ret;}\n")
OPTIONS = None
TOTAL_DEADLINE = 300


def row(what, **facts):
    print(f"{what:58}", "  ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    if OPTIONS.rows:
        with open(OPTIONS.rows, "a") as file:
            file.write(json.dumps({"what": what, **facts}) + "\n")


def rate(size, seconds):
    return f"{size / seconds / (1 << 30):.1f} GiB/s"


def map_at_multiple(file, size):
    """Maps a file at a multiple of 2 MiB, as the library does."""
    raw = LIBC.mmap(None, size + 2 * MIB, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    at = (raw + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
    mapped = LIBC.mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | 0x10, file, 0)
    if mapped != at:
        raise OSError(ctypes.get_errno(), "mmap of a segment")
    LIBC.madvise(at, size, HUGEPAGE)
    LIBC.madvise(at, size, DONTFORK)
    return at


def touch(at, size, threads):
    """Has the kernel find all pages; returns how."""
    share, how = size // threads, []

    def part(begin):
        if LIBC.madvise(begin, share, POPULATE_WRITE) == 0:
            how.append("MADV_POPULATE_WRITE")
        else:
            ctypes.memset(begin, 0, share)
            how.append("memset")

    running = [threading.Thread(target=part, args=(at + i * share,)) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return how[0]


def make(size, threads, seals):
    file = os.memfd_create("nvshare-probe", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    fcntl.fcntl(file, ADD_SEALS, seals)
    at = LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    LIBC.madvise(at, size, HUGEPAGE)
    begin = time.monotonic()
    how = touch(at, size, threads)
    seconds = time.monotonic() - begin
    LIBC.munmap(at, size)
    return file, seconds, how


def seal_error(file):
    """What sealing against writing says: it is how the scheduler knows that nobody uses a segment."""
    begin = time.monotonic()
    try:
        fcntl.fcntl(file, ADD_SEALS, WRITE)
        said = "sealed"
    except OSError as error:
        said = errno.errorcode.get(error.errno, str(error.errno))
    return said, f"{(time.monotonic() - begin) * 1e3:.1f} ms"


def charged(pid="self"):
    """Bytes charged to a process's control group, and its locked and resident memory, as far as the kernel shows them."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.split(":")[0] in ("VmLck", "VmPin", "RssShmem"):
            found[line.split(":")[0]] = f"{int(line.split()[1]) // 1024} MiB"
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version_1 = "memory" in controllers.split(",")
        usage = Path("/sys/fs/cgroup" + ("/memory" if version_1 else "") + path) / ("memory.usage_in_bytes" if version_1 else "memory.current")
        if usage.exists():
            found["cgroup"] = f"{int(usage.read_text()) // MIB} MiB"
    return found


class Card:
    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.must("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.must("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.must("cuCtxSetCurrent", self.context)
        self.stream = ctypes.c_void_p()
        self.must("cuStreamCreate", ctypes.byref(self.stream), 1)

    def call(self, name, *arguments):
        return getattr(self.driver, name)(*arguments)

    def must(self, name, *arguments):
        result = self.call(name, *arguments)
        if result:
            raise RuntimeError(f"{name}: {self.name(result)}")

    def name(self, result):
        text = ctypes.c_char_p()
        self.driver.cuGetErrorName(result, ctypes.byref(text))
        return f"{result} {(text.value or b'?').decode().removeprefix('CUDA_')}"

    def wait(self):
        self.must("cuStreamSynchronize", self.stream)


def loops():
    """A process that launches a kernel of 20 us and waits for it, over and over. For each line that it reads: what the rounds since the last one took."""
    card = Card()
    small = ctypes.c_uint64()
    card.must("cuMemAlloc_v2", ctypes.byref(small), ctypes.c_size_t(2 * MIB))
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    if not OPTIONS.fill:
        card.must("cuModuleLoadData", ctypes.byref(module), SPIN)
        card.must("cuModuleGetFunction", ctypes.byref(function), module, b"spin")
    length = ctypes.c_uint64(20000)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(length))
    waits, asked, done = [], [], threading.Event()

    def listen():
        for line in sys.stdin:
            asked.append(line.strip())
        done.set()

    threading.Thread(target=listen, daemon=True).start()
    print("ready", flush=True)
    while not done.is_set():
        begin = time.monotonic()
        if OPTIONS.fill:
            card.must("cuMemsetD8Async", small, 0, ctypes.c_size_t(2 * MIB), card.stream)
        else:
            card.must("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, card.stream, arguments, None)
        card.wait()
        waits.append((time.monotonic() - begin) * 1e6)
        if asked:
            asked.pop()
            waits.sort()
            facts = {"rounds": len(waits), "median": f"{statistics.median(waits):.0f} us", "p99": f"{waits[len(waits) * 99 // 100]:.0f} us",
                     "worst": f"{waits[-1]:.0f} us", "sum of those above 1 ms": f"{sum(x for x in waits if x > 1000) / 1e3:.1f} ms"}
            print(json.dumps(facts), flush=True)
            waits = []


def uses(size, count, copies, leaves, group):
    """The client. It says what it has done, one line of JSON each, and goes on when it is told."""
    place = socket.socket(fileno=int(os.environ["PROBE_SOCKET"]))
    _, files, _, _ = socket.recv_fds(place, 1, count)
    if group:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    card = Card()

    def say(**facts):
        place.send((json.dumps(facts) + "\n").encode())
        place.recv(1)

    on_card = ctypes.c_uint64()
    card.must("cuMemAlloc_v2", ctypes.byref(on_card), ctypes.c_size_t(size))
    card.must("cuMemsetD8_v2", on_card, 3, ctypes.c_size_t(size))
    places = [map_at_multiple(file, size) for file in files]
    for file in files:
        os.close(file)
    say(did="mapped", **charged())
    begin, results, first = time.monotonic(), [], None
    for at in places:
        results.append(card.call("cuMemHostRegister_v2", ctypes.c_void_p(at), ctypes.c_size_t(size), 1))
        first = first or time.monotonic() - begin
    seconds = time.monotonic() - begin
    said = sorted({card.name(result) for result in results})
    say(did="cuMemHostRegister", said=said, first=f"{first * 1e3:.1f} ms", all=rate(size * count, seconds), **charged())
    if any(results):
        return
    for n in range(copies):
        out, back = [], []
        for name, times, pair in (("cuMemcpyDtoHAsync_v2", out, lambda at: (ctypes.c_void_p(at), on_card)),
                                  ("cuMemcpyHtoDAsync_v2", back, lambda at: (on_card, ctypes.c_void_p(at)))):
            begin = time.monotonic()
            for at in places:
                card.must(name, *pair(at), ctypes.c_size_t(size), card.stream)
            card.wait()
            times.append(time.monotonic() - begin)
        right = all(ctypes.string_at(at + size - 1, 1) == b"\3" and ctypes.string_at(at, 1) == b"\3" for at in places)
        say(did=f"copies, round {n + 1}", out=rate(size * count, out[0]), back=rate(size * count, back[0]), data="right" if right else "WRONG",
            **charged())
    if leaves == "unregisters":
        begin = time.monotonic()
        said = sorted({card.name(card.call("cuMemHostUnregister", ctypes.c_void_p(at))) for at in places})
        say(did="cuMemHostUnregister", said=said, all=rate(size * count, time.monotonic() - begin))
        for at in places:
            LIBC.munmap(at, size)
        say(did="unregistered and unmapped")
    elif leaves == "unmaps":
        for at in places:
            LIBC.munmap(at, size)
        say(did="unmapped while registered")
        said = sorted({card.name(card.call("cuMemHostUnregister", ctypes.c_void_p(at))) for at in places})
        say(did="unregistered after that", said=said)
    elif leaves == "ends its context":
        said = card.name(card.call("cuDevicePrimaryCtxReset_v2", 0))
        say(did="context reset", said=said)
        for at in places:
            LIBC.munmap(at, size)
        say(did="unmapped after its context had ended")
    else:
        time.sleep(60)


class User:
    """A client process, and what it says."""

    def __init__(self, files, copies, leaves, group):
        self.mine, theirs = socket.socketpair()
        self.mine.settimeout(60)
        command = [sys.executable, __file__, "--role", "uses", "--segment", str(OPTIONS.segment), "--count", str(len(files)),
                   "--copies", str(copies), "--leaves", leaves, "--group", group or ""]
        environment = {**os.environ, "PROBE_SOCKET": str(theirs.fileno())}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        socket.send_fds(self.mine, [b"x"], files)
        self.lines = self.mine.makefile("r")

    def next(self):
        line = self.lines.readline()
        return json.loads(line) if line else None

    def go(self):
        self.mine.send(b"g")

    def end(self):
        self.process.kill()
        self.process.wait(30)


def limited_group():
    """A control group with a limit, or none and why."""
    root, limit = Path("/sys/fs/cgroup"), "memory.max"
    if not (root / "cgroup.controllers").exists():
        root, limit = root / "memory", "memory.limit_in_bytes"
    path = root / f"nvshare-probe-{os.getpid()}"
    try:
        path.mkdir()
        if not (path / limit).exists():
            path.rmdir()
            return None, f"{root} has no controller of memory for groups below it"
        (path / limit).write_text(str(OPTIONS.limit * MIB))
        return str(path), "made"
    except OSError as error:
        return None, str(error)


def taken_back(files, what):
    """How long until the kernel says that nobody uses the segments, and whether they can be emptied."""
    begin = time.monotonic()
    pending, said, tries, longest = list(files), "", 0, 0.0
    while pending and time.monotonic() - begin < 15:
        one = time.monotonic()
        said, _ = seal_error(pending[0])
        longest = max(longest, time.monotonic() - one)
        tries += 1
        if said == "sealed":
            os.ftruncate(pending[0], 0)
            pending.pop(0)
        else:
            time.sleep(0.01)
    row(f"taken back after: {what}", left=len(pending), after=f"{(time.monotonic() - begin) * 1e3:.0f} ms", tries=tries,
        longest_call=f"{longest * 1e3:.0f} ms", last=said)


def main():
    size, count = OPTIONS.segment * MIB, OPTIONS.count
    shmem = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    row("machine", kernel=os.uname().release, shmem_enabled=shmem.read_text().strip() if shmem.exists() else "-", uid=os.getuid(),
        processors=os.cpu_count(), memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK))
    for threads in (1, 4, 8):
        file, seconds, how = make(size, threads, GROW)
        row(f"segment of {OPTIONS.segment} MiB made by {threads} threads", rate=rate(size, seconds), by=how)
        os.close(file)
    group, why = limited_group()
    row("control group for the client", memory_max=f"{OPTIONS.limit} MiB", group=why, segments=f"{size * count // MIB} MiB in sum")
    loop = subprocess.Popen([sys.executable, __file__, "--role", "loops", *(["--fill"] if OPTIONS.fill else [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if loop.stdout.readline().strip() != "ready":
        raise SystemExit("the process that launches kernels has ended")

    def loop_row(what):
        loop.stdin.write("?\n")
        loop.stdin.flush()
        row(f"  kernels of another process: {what}", **json.loads(loop.stdout.readline()))

    time.sleep(1)
    loop_row("alone")
    for seals, sealed in ((GROW, "growing"), (GROW | SHRINK | SEAL, "growing, shrinking, seals")):
        begin, files = time.monotonic(), []
        for _ in range(count):
            files.append(make(size, 8, seals)[0])
        row(f"{count} segments, sealed against {sealed}", rate=rate(size * count, time.monotonic() - begin), maker=charged())
        loop_row("while segments are made")
        # Segments that nobody can seal any more cannot be taken back by that; the question for them is whether the driver takes them.
        ways = ("unregisters", "unmaps", "ends its context", "is killed") if seals == GROW else ("unregisters",)
        for way in ways:
            if way != ways[0]:
                files = [make(size, 8, seals)[0] for _ in range(count)]
                loop_row("while segments are made")
            user = User(files, 2 if way == ways[0] else 1, way, group)
            while (facts := user.next()) is not None:
                did = facts.pop("did")
                row(f"client that {way}: {did}", **facts)
                if seals == GROW:
                    said, took = seal_error(files[-1]) if "unmapped" not in did else ("not tried", "-")
                    row("  the maker seals one against writing then", said=said, took=took)
                loop_row(did)
                if "unmapped" in did and way != "is killed" and seals == GROW:
                    taken_back(files, f"{way}: {did}")
                    files = [] if "after" in did or way == "unregisters" else files
                user.go()
                if way == "is killed" and did.startswith("copies"):
                    break
            if way == "is killed":
                user.process.send_signal(signal.SIGKILL)
            else:
                try:
                    user.process.wait(10)
                except subprocess.TimeoutExpired:
                    pass
            user.end()
            row(f"client that {way}: ended", status=user.process.returncode)
            if files and seals == GROW:
                taken_back([f for f in files if os.fstat(f).st_size], f"its end ({way})")
            for file in files:
                os.close(file)
            loop_row("its end")
    loop.stdin.close()
    loop.wait(30)
    if group:
        said = {name: (Path(group) / name).read_text().split() for name in ("memory.peak", "memory.events", "memory.max_usage_in_bytes")
                if (Path(group) / name).exists()}
        row("control group of the clients", **{name: " ".join(words) for name, words in said.items()})
        os.rmdir(group)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--segment", type=int, default=256, help="MiB of one segment")
parser.add_argument("--count", type=int, default=8, help="segments")
parser.add_argument("--limit", type=int, default=1024, help="memory.max of the client, in MiB")
parser.add_argument("--rows", help="a file to which each row is appended")
parser.add_argument("--fill", action="store_true", help="the other process fills memory and launches no kernel (the simulated driver has no PTX)")
parser.add_argument("--role", default="main", help=argparse.SUPPRESS)
parser.add_argument("--copies", type=int, default=1, help=argparse.SUPPRESS)
parser.add_argument("--leaves", default="", help=argparse.SUPPRESS)
parser.add_argument("--group", default="", help=argparse.SUPPRESS)
OPTIONS = parser.parse_args()
signal.alarm(TOTAL_DEADLINE)
if OPTIONS.role == "loops":
    loops()
elif OPTIONS.role == "uses":
    uses(OPTIONS.segment * MIB, OPTIONS.count, OPTIONS.copies, OPTIONS.leaves, OPTIONS.group)
else:
    main()
