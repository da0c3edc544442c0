#!/usr/bin/env python3
"""How fast managed memory leaves the card, and comes back, where several threads prefetch it: 8 GiB with known words, in pieces, each thread on a stream of its own.

One process, 8 GiB of managed memory on a card that has far more free. One line for each number of threads and size of a piece: GiB/s of five rounds, the
median and the least, both ways; then whether every word is right."""
import ctypes, statistics, threading, time
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

MIB, GIB = 1 << 20, 1 << 30
ALL, HOST, CARD, ROUNDS = 8 * GIB, -1, 0, 5
driver = ctypes.CDLL("libcuda.so.1")


def must(name, *arguments):
    if answer := getattr(driver, name)(*arguments):
        raise SystemExit(f"{name}: {answer}")


def main():
    context, place = c_void_p(), c_uint64()
    must("cuInit", 0)
    must("cuDevicePrimaryCtxRetain", byref(context), 0)
    must("cuCtxSetCurrent", context)
    must("cuMemAllocManaged", byref(place), c_size_t(ALL), 1)
    base = place.value

    def move(threads, piece, to):
        """Seconds until all has moved; threads take the next piece in turn."""
        pieces = iter(range(0, ALL, piece))
        lock, begin = threading.Lock(), threading.Barrier(threads + 1)

        def work():
            stream = c_void_p()
            must("cuCtxSetCurrent", context)
            must("cuStreamCreate", byref(stream), 1)
            begin.wait()
            while True:
                with lock:
                    at = next(pieces, None)
                if at is None:
                    break
                must("cuMemPrefetchAsync", c_uint64(base + at), c_size_t(min(piece, ALL - at)), c_int(to), stream)
            must("cuStreamSynchronize", stream)
            must("cuStreamDestroy_v2", stream)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        begin.wait()
        start = time.perf_counter()
        for worker in workers:
            worker.join()
        return time.perf_counter() - start

    move(1, 64 * MIB, CARD)
    for at in range(0, ALL, 64 * MIB):
        must("cuMemsetD32_v2", c_uint64(base + at), ctypes.c_uint(at // MIB + 1), c_size_t(64 * MIB // 4))
    must("cuCtxSynchronize")
    move(1, 64 * MIB, HOST)
    move(1, 64 * MIB, CARD)
    for threads, piece in [(1, 64), (2, 64), (4, 64), (8, 64), (1, 512), (4, 512), (1, 8192)]:
        out, back = [], []
        for _ in range(ROUNDS):
            out.append(8 / move(threads, piece * MIB, HOST))
            back.append(8 / move(threads, piece * MIB, CARD))
        print(f"{threads} threads, pieces of {piece} MiB: out {statistics.median(out):.1f} (least {min(out):.1f}) GiB/s, back {statistics.median(back):.1f} (least {min(back):.1f})", flush=True)
    wrong, word = 0, ctypes.c_uint()
    for at in range(0, ALL, MIB):
        must("cuMemcpyDtoH_v2", byref(word), c_uint64(base + at), c_size_t(4))
        wrong += word.value != at // (64 * MIB) * 64 + 1
    print(f"{wrong} of {ALL // MIB} words are wrong")


main()
