#!/usr/bin/env python3
"""On a card that plain ballast fills: how fast memory that one program's managed memory gave up comes to another program.

One process has 8 GiB of managed memory on the card, gives it up in one of several ways, and another process asks for 6 GiB in one of several ways, twice.
Only one process has managed memory, and never more than is free. `full_probe.py` (about two minutes); one line for each pair of ways."""
import os, subprocess, sys, threading, time
from ctypes import CDLL, byref, c_int, c_size_t, c_uint64, c_void_p

MIB, GIB = 1 << 20, 1 << 30
MANAGED, ASKED, LEFT = 8 * GIB, 6 * GIB, 10 * GIB
HOST, CARD = -1, 0
driver = CDLL("libcuda.so.1")
ON_CARD = (c_int * 8)(1, 0, 1, 0)


def call(name, *arguments):
    return getattr(driver, name)(*arguments)


def must(name, *arguments):
    if answer := call(name, *arguments):
        raise SystemExit(f"{name}: {answer}")


def start():
    context = c_void_p()
    must("cuInit", 0)
    must("cuDevicePrimaryCtxRetain", byref(context), 0)
    must("cuCtxSetCurrent", context)
    return context


def free():
    left, total = c_size_t(), c_size_t()
    must("cuMemGetInfo_v2", byref(left), byref(total))
    return left.value


def timed(work):
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def create(bytes_, piece):
    """Physical memory in pieces, until there is no more; returns the handles."""
    handles = []
    for _ in range(bytes_ // piece):
        handle = c_uint64()
        if call("cuMemCreate", byref(handle), c_size_t(piece), ON_CARD, c_uint64(0)):
            break
        handles.append(handle)
    return handles


def release(handles):
    for handle in handles:
        must("cuMemRelease", handle)


class Giver:
    """The process with managed memory."""

    def __init__(self):
        start()
        self.place = c_uint64()
        must("cuMemAllocManaged", byref(self.place), c_size_t(MANAGED), 1)
        self.prefetch(CARD)
        must("cuMemsetD32_v2", self.place, 5, c_size_t(MANAGED // 4))
        must("cuCtxSynchronize")

    def prefetch(self, to):
        must("cuMemPrefetchAsync", self.place, c_size_t(MANAGED), to, None)
        must("cuCtxSynchronize")

    def nothing(self):
        pass

    def prefetches(self):
        self.prefetch(HOST)

    def frees(self):
        must("cuMemFree_v2", self.place)

    def trims(self):
        """Prefetches to the host, and takes as much physical memory itself for a moment."""
        self.prefetch(HOST)
        took = timed(lambda: release(create(ASKED, 512 * MIB)))
        print(f"trimmed in {took:.3f} s", flush=True)


def take(bytes_, piece, threads):
    parts = [[] for _ in range(threads)]
    workers = [threading.Thread(target=lambda i=i: parts[i].extend(create(bytes_ // threads, piece))) for i in range(threads)]
    took = timed(lambda: [w.start() for w in workers] + [w.join() for w in workers])
    handles = sum(parts, [])
    return took, handles, len(handles) * piece


class Asker:
    """The process that asks."""

    def __init__(self):
        self.context = start()

    def ask(self, how):
        got = 0
        if how == "cuMemAlloc":
            place = c_uint64()
            took = timed(lambda: call("cuMemAlloc_v2", byref(place), c_size_t(ASKED)))
            if place.value:
                got = ASKED
                must("cuMemFree_v2", place)
        else:
            piece, threads = how
            took, handles, got = take(ASKED, piece * MIB, threads)
            release(handles)
        return took, got


def serve(role):
    """A process that does what it reads, line by line, and says how long it took."""
    part = Giver() if role == "giver" else Asker()
    print("ready", flush=True)
    for line in sys.stdin:
        word = line.strip()
        if role == "giver":
            took = timed(getattr(part, word))
            print(f"{took:.3f} {free() / GIB:.2f}", flush=True)
        else:
            took, got = part.ask(eval(word))
            print(f"{took:.3f} {got / GIB:.2f} {free() / GIB:.2f}", flush=True)
    os._exit(0)


class Process:
    def __init__(self, role):
        self.process = subprocess.Popen([sys.executable, __file__, role], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.said = []
        self.line()

    def line(self):
        while (line := self.process.stdout.readline().strip()) and not (line == "ready" or line[0].isdigit()):
            self.said.append(line)
        return line

    def tell(self, word):
        print(word, file=self.process.stdin, flush=True)
        return self.line()

    def end(self):
        self.process.stdin.close()
        self.process.wait(30)


def main():
    start()
    ballast, held = c_uint64(), []
    # In pieces, so that what is left is what was meant.
    while (left := free()) > LEFT + 64 * MIB:
        place = c_uint64()
        if call("cuMemAlloc_v2", byref(place), c_size_t(min(left - LEFT, 8 * GIB))):
            break
        held.append(place)
    print(f"ballast leaves {free() / GIB:.2f} GiB; {MANAGED / GIB:.0f} GiB managed, {ASKED / GIB:.0f} GiB asked for", flush=True)
    gives = sys.argv[1].split(",") if len(sys.argv) > 1 else ["nothing", "prefetches", "frees", "trims"]
    for gives_up in gives:
        for how in ((32, 1), (512, 1), (2048, 1), (32, 4), "cuMemAlloc"):
            # The asker is there first: its context takes no time of the card then.
            asker = Process("asker")
            giver = Process("giver")
            gave, left = giver.tell(gives_up).split()
            first, second = asker.tell(repr(how)), asker.tell(repr(how))
            name = how if how == "cuMemAlloc" else f"cuMemCreate of {how[0]} MiB by {how[1]}"
            print(f"{gives_up:12} took {gave} s, free {left} | {name:24} | first: {first} (s, GiB got, free) | again: {second} {' '.join(giver.said)}", flush=True)
            giver.end(), asker.end()
    # A context beside managed memory that was given up.
    for gives_up in gives:
        giver = Process("giver")
        giver.tell(gives_up)
        print(f"{gives_up:12} a new context of another process: {timed(lambda: Process('asker').end()):.3f} s", flush=True)
        giver.end()


if __name__ == "__main__":
    serve(sys.argv[1]) if sys.argv[1:2] in (["giver"], ["asker"]) else main()
