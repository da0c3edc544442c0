#!/usr/bin/env python3
"""What need not be copied, on a real card: the kernel against a hash computed in another way, its speed, and hand-overs of memory that is zero, or has not changed.
`kernel` needs the driver alone; `swap` needs PyTorch and `dist/` (cargo dist-local). Rows go to $OUT/rows.jsonl as they come. Exit code 1 if a word or a hash is wrong."""
import ctypes as c, re, statistics
from harness import *

FAILED = []
PIECE, P = 2 << 20, 2**130 - 5


def keys(random):
    """The factors of the hash (libnvshare/client/src/content.rs)."""
    def key(b):
        words = [int.from_bytes(b[4 * i:4 * i + 4], "little") & 0x0FFFFFFC for i in range(4)]
        words[0] |= b[0] & 3
        return sum(word << 32 * i for i, word in enumerate(words))
    k = [key(random[16 * i:16 * i + 16]) for i in range(11)]
    return k[0], k[1:10], k[10]


def packed(random):
    """The same as the kernel takes them."""
    word, bits, last = keys(random)
    return b"".join(k.to_bytes(16, "little") for k in [word, *bits, last])


def look(piece, random):
    """The hash of a piece, with numbers of any length."""
    word, bits, last = keys(random)
    sums = [0] * 512
    for i in range(len(piece) // 16):
        sums[i % 512] = (sums[i % 512] * word + int.from_bytes(piece[16 * i:16 * i + 16], "little")) % P
    total = 0
    for thread, value in enumerate(sums):
        for bit in range(9):
            if thread >> bit & 1:
                value = value * bits[bit] % P
        total += value
    return total * last % P % 2**128


class Seen(c.Structure):
    _fields_ = [("low", c.c_uint64), ("high", c.c_uint64), ("state", c.c_uint32), ("unused", c.c_uint32)]


def kernel(gib=8):
    cuda = c.CDLL("libcuda.so.1")

    def call(name, *arguments):
        if rc := getattr(cuda, name)(*arguments):
            raise SystemExit(f"{name}: {rc}")

    context, module, function = c.c_void_p(), c.c_void_p(), c.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", c.byref(context), 0)
    call("cuCtxSetCurrent", context)
    ptx = (ROOT / "libnvshare/src/memory/backing/swap/content/kernel.ptx").read_bytes() + b"\0"
    t = time.time()
    call("cuModuleLoadData", c.byref(module), ptx)
    call("cuModuleGetFunction", c.byref(function), module, b"nvshare_content")
    row(scenario="kernel", what="compiled and loaded", ms=round((time.time() - t) * 1e3, 1))
    count = gib * GIB // PIECE
    memory, host = c.c_uint64(), c.c_void_p()
    call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(count * PIECE))
    call("cuMemHostAlloc", c.byref(host), c.c_size_t(count * 32), 0)
    pieces = (c.c_uint64 * count).from_address(host.value)
    seen = (Seen * count).from_address(host.value + 8 * count)
    pieces[:] = [memory.value + i * PIECE for i in range(count)]
    random = os.urandom(176)
    secret = c.create_string_buffer(packed(random), 176)

    def run(hashes, of=None):
        c.memset(c.addressof(seen), 0, c.sizeof(seen))
        parameters = [c.c_uint64(host.value), c.c_uint64(c.addressof(seen)), c.c_uint32(PIECE // 16), c.c_uint32(hashes), secret]
        places = (c.c_void_p * 5)(*[c.addressof(p) for p in parameters])
        t = time.time()
        call("cuLaunchKernel", function, of or count, 1, 1, 512, 1, 1, 0, None, places, None)
        call("cuCtxSynchronize")
        return time.time() - t

    def fill(i, data):
        call("cuMemcpyHtoD_v2", c.c_uint64(memory.value + i * PIECE), data, c.c_size_t(PIECE))

    # Words that differ, and every limb full: carries.
    samples = {0: bytes(PIECE), 1: b"\xff" * PIECE, 2: b"\x01" + bytes(PIECE - 1), 3: bytes(PIECE - 1) + b"\x80", 4: (b"\xfb" + b"\xff" * 15) * (PIECE // 16), **{i: os.urandom(PIECE) for i in range(5, 12)}}
    call("cuMemsetD8_v2", memory, 7, c.c_size_t(count * PIECE))
    for i, data in samples.items():
        fill(i, data)
    run(1)
    wrong = sum(s.state != (2 if i else 1) for i, s in enumerate(seen))
    for i, data in list(samples.items())[1:] + [(12, b"\7" * PIECE)]:
        got, expected = seen[i].low | seen[i].high << 64, look(data, random)
        if got != expected:
            wrong += 1
            FAILED.append(f"piece {i}: {got:x} is not {expected:x}")
    row(scenario="kernel", what="pieces held against the hash computed otherwise", pieces=len(samples), wrong=wrong)
    before = [(s.low, s.high) for s in seen]
    run(1)
    changed = sum((s.low, s.high) != b for s, b in zip(seen, before))
    FAILED.extend([f"{changed} hashes differ between two looks"] if changed else [])
    for what, value, hashes in (("hashes of data", 7, 1), ("hashes of zeros", 0, 1), ("zeros alone, of data", 7, 0), ("zeros alone, of zeros", 0, 0)):
        call("cuMemsetD8_v2", memory, value, c.c_size_t(count * PIECE))
        run(hashes)
        best = min(run(hashes) for _ in range(10))
        row(scenario="kernel", what=what, gib=gib, ms=round(best * 1e3, 3), tb_s=round(count * PIECE / best / 1e12, 2))
    small = min(run(1, 16) for _ in range(10))
    row(scenario="kernel", what="hashes of 32 MiB", ms=round(small * 1e3, 3))


def moves(log):
    """Seconds, GiB/s and MiB left out of each eviction, and of each restore, as the library's log says."""
    text = open(log).read()
    found = {}
    for what in ("evicted", "restored"):
        found[what] = [(int(mib), float(s)) for mib, s in re.findall(rf"{what} (\d+) MiB in ([\d.]+) s", text)]
    left_out = [(int(zeros), int(same)) for zeros, same in re.findall(r"not copied: (\d+) MiB of zeros, (\d+) MiB that had not changed", text)]
    return found, left_out, text.count("was not what it seemed")


def swap(gib=8, seconds=20):
    """Two jobs of which one fits: all that one has moves at each hand-over."""
    os.environ["NVSHARE_MEMORY"] = "swap"
    for how, arguments, content in (("all changes", [], "hashes"), ("90 % zeros", ["--zeros", 0.9], "hashes"), ("90 % unchanged", ["--still", 0.9], "hashes"), ("90 % unchanged", ["--still", 0.9], "off"), ("45 % of each", ["--zeros", 0.45, "--still", 0.45], "check")):
        with Scheduler("--gpu-memory", f"{gib + 2}GiB", "--tq", "2", log="info") as s:
            make = lambda go: [Job("content_job.py", f"{how.replace(' ', '-')}-{content}-{i}", "--gib", gib, "--seconds", seconds, *arguments, scheduler=s, go=go, env={"NVSHARE_CONTENT": content}) for i in range(2)]
            jobs, _ = start_together(make)
        for job in jobs:
            (found, left_out, lies), wrong = moves(job.log), job.result.get("wrong", "?")
            # The first ones find nothing on the host yet.
            rate = lambda all_moves: round(statistics.median(mib / 1024 / s for mib, s in all_moves[1:]), 1) if len(all_moves) > 1 else "?"
            took = lambda all_moves: round(statistics.median(s for _, s in all_moves[1:]), 3) if len(all_moves) > 1 else "?"
            row(scenario="swap", how=how, content=content, wrong=wrong, lies=lies, **{k: v for k, v in job.counted().items() if k in ("gated", "passed_by", "hand_overs", "evicted_gib", "restored_gib")}, out_s=took(found["evicted"]), out_gib_s=rate(found["evicted"]), in_s=took(found["restored"]), in_gib_s=rate(found["restored"]), zeros_gib=round(sum(z for z, _ in left_out) / 1024, 1), unchanged_gib=round(sum(u for _, u in left_out) / 1024, 1))
            if wrong != 0 or lies:
                FAILED.append(f"{job.name}: {wrong} wrong words, {lies} pieces that were not what they seemed")


def many(least=500, gib=1.5, seconds=150):
    """Short turns of two jobs of which one fits, in the mode that compares every piece: at least so many hand-overs, no wrong word, no piece that was not what it seemed."""
    os.environ["NVSHARE_MEMORY"] = "swap"
    with Scheduler("--gpu-memory", f"{round((gib + 1.7) * 1024)}MiB", "--tq", "0.05", log="info") as s:
        make = lambda go: [Job("content_job.py", f"many-{i}", "--gib", gib, "--seconds", seconds, "--zeros", 0.25, "--still", 0.25, scheduler=s, go=go, env={"NVSHARE_CONTENT": "check"}) for i in range(2)]
        jobs, _ = start_together(make)
    made = 0
    for job in jobs:
        (_, left_out, lies), wrong, counted = moves(job.log), job.result.get("wrong", "?"), job.counted()
        made += counted["hand_overs"]
        row(scenario="many", job=job.name, words=job.result.get("words"), wrong=wrong, lies=lies, **{k: counted[k] for k in ("gated", "passed_by", "hand_overs", "evicted_gib", "restored_gib")}, zeros_gib=round(sum(z for z, _ in left_out) / 1024, 1), unchanged_gib=round(sum(u for _, u in left_out) / 1024, 1))
        if wrong != 0 or lies:
            FAILED.append(f"{job.name}: {wrong} wrong words, {lies} pieces that were not what they seemed")
    if made < least:
        FAILED.append(f"{made} hand-overs instead of {least}")


if __name__ == "__main__":
    run_scenarios([kernel, swap, many], FAILED)
