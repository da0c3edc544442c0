#!/usr/bin/env python3
"""What a driver answers to calls on one card that name another card's memory, without peer access: memory of cuMemAlloc, and mapped memory.

Each question is a process of its own. Needs two GPUs. Two H200s, 580.159.04: plain memory is copied by all calls and filled by none (1);
of mapped memory all calls answer 1 (INVALID_VALUE) but for the copies that name both contexts."""
import ctypes as C, subprocess, sys

cu, N, u64, size_t = C.CDLL("libcuda.so.1"), 8 << 20, C.c_uint64, C.c_size_t
contexts = [C.c_void_p(), C.c_void_p()]
QUESTIONS = "to_host to_host_in_order from_host from_host_in_order here here_in_order there there_in_order within_the_other fill peer peer_in_order".split()


def call(name, *arguments):
    result = getattr(cu, name)(*arguments)
    if result:
        raise SystemExit(f"{name}: {result}")


def current(card):
    call("cuCtxSetCurrent", contexts[card])


def plain(card):
    at = u64()
    call("cuMemAlloc_v2", C.byref(at), size_t(N))
    return at


def mapped(card):
    handle, at = u64(), u64()
    call("cuMemCreate", C.byref(handle), size_t(N), (C.c_int * 8)(1, 0, 1, card), u64(0))
    call("cuMemAddressReserve", C.byref(at), size_t(N), size_t(0), u64(0), u64(0))
    call("cuMemMap", at, size_t(N), size_t(0), handle, u64(0))
    call("cuMemSetAccess", at, size_t(N), (C.c_int * 3)(1, card, 3), size_t(1))
    return at


def ask(allocate, question):
    call("cuInit", 0)
    for card in (0, 1):
        call("cuDevicePrimaryCtxRetain", C.byref(contexts[card]), card)
    places = []
    for card, value in ((0, 5), (1, 6), (1, 7)):
        current(card)
        places.append(allocate(card))
        call("cuMemsetD8_v2", places[-1], value, size_t(N))
        call("cuCtxSynchronize")
    p, q, r = places
    current(0)
    stream, host, n = C.c_void_p(), C.c_void_p(), size_t(N)
    call("cuStreamCreate", C.byref(stream), 0)
    call("cuMemHostAlloc", C.byref(host), n, 0)
    C.memset(host, 8, N)
    a, b = contexts
    # The function and its arguments; where the bytes come to, what they are then, and that memory's card.
    name, arguments, to, value, card = dict(
        to_host=("cuMemcpyDtoH_v2", (host, q, n), host, 6, 0), to_host_in_order=("cuMemcpyDtoHAsync_v2", (host, q, n, stream), host, 6, 0),
        from_host=("cuMemcpyHtoD_v2", (q, host, n), q, 8, 1), from_host_in_order=("cuMemcpyHtoDAsync_v2", (q, host, n, stream), q, 8, 1),
        here=("cuMemcpyDtoD_v2", (p, q, n), p, 6, 0), here_in_order=("cuMemcpyDtoDAsync_v2", (p, q, n, stream), p, 6, 0),
        there=("cuMemcpy", (q, p, n), q, 5, 1), there_in_order=("cuMemcpyAsync", (q, p, n, stream), q, 5, 1),
        within_the_other=("cuMemcpyDtoDAsync_v2", (r, q, n, stream), r, 6, 1), fill=("cuMemsetD8Async", (q, 9, n, stream), q, 9, 1),
        peer=("cuMemcpyPeer", (p, a, q, b, n), p, 6, 0), peer_in_order=("cuMemcpyPeerAsync", (p, a, q, b, n, stream), p, 6, 0))[question]
    answer, after = getattr(cu, name)(*arguments), cu.cuCtxSynchronize()
    got = (C.c_ubyte * N)()
    current(card)
    if to is host:
        C.memmove(got, host, N)
    else:
        call("cuMemcpyDtoH_v2", got, to, n)
    print(f"{allocate.__name__:7} {question:20} answer {answer}, then {after}, bytes right: {bytes(got) == bytes([value]) * N}", flush=True)


def gain(at, other):
    """A card may reach mapped memory of the other from now on."""
    return cu.cuMemSetAccess(at, size_t(N), (C.c_int * 6)(1, other, 3, 1, 1 - other, 3), size_t(2))


def ask_captured(allocate, question):
    """The same copies in a capture (global, thread-local, relaxed), and as nodes of a graph: what is answered, whether the capture lives,
    and what comes of it where access is gained after the refusal."""
    question, mode = question.rsplit("-", 1)
    call("cuInit", 0)
    for card in (0, 1):
        call("cuDevicePrimaryCtxRetain", C.byref(contexts[card]), card)
    places = []
    for card, value in ((0, 5), (1, 6)):
        current(card)
        places.append(allocate(card))
        call("cuMemsetD8_v2", places[-1], value, size_t(N))
        call("cuCtxSynchronize")
    (p, q), n, (a, b) = places, size_t(N), contexts
    current(0)
    stream, host, graph, ready, status = C.c_void_p(), C.c_void_p(), C.c_void_p(), C.c_void_p(), C.c_int(-1)
    call("cuStreamCreate", C.byref(stream), 1)
    call("cuMemHostAlloc", C.byref(host), n, 0)
    said = []
    if mode == "node":
        # CUDA_MEMCPY3D: source, destination, extent.
        copy = (u64 * 25)()
        copy[4], copy[6], copy[15], copy[17] = 2, q.value, 2, p.value
        copy[9], copy[20], copy[22], copy[23], copy[24] = N, N, N, 1, 1
        call("cuGraphCreate", C.byref(graph), 0)
        node = C.c_void_p()
        say = lambda: said.append(("add", cu.cuGraphAddMemcpyNode(C.byref(node), graph, None, size_t(0), copy, a)))
        say()
        if said[-1][1]:
            said.append(("gain", gain(q, 1)))
            say()
    else:
        name, arguments = dict(to_host_in_order=("cuMemcpyDtoHAsync_v2", (host, q, n, stream)), here_in_order=("cuMemcpyDtoDAsync_v2", (p, q, n, stream)), peer_in_order=("cuMemcpyPeerAsync", (p, a, q, b, n, stream)))[question]
        call("cuStreamBeginCapture_v2", stream, dict(all=0, thread=1, relaxed=2)[mode])
        for again in (0, 1):
            said.append((name, getattr(cu, name)(*arguments)))
            cu.cuStreamIsCapturing(stream, C.byref(status))
            said.append(("capturing", status.value))
            if said[-2][1] == 0:
                break
            if not again:
                said.append(("gain", gain(q, 1)))
        said.append(("end", cu.cuStreamEndCapture(stream, C.byref(graph))))
    if said[-1][1] == 0:
        said.append(("instantiate", cu.cuGraphInstantiateWithFlags(C.byref(ready), graph, u64(0))))
    if said[-1] == ("instantiate", 0):
        said.append(("launch", cu.cuGraphLaunch(ready, stream)))
        said.append(("then", cu.cuStreamSynchronize(stream)))
        got = (C.c_ubyte * N)()
        if question == "to_host_in_order":
            C.memmove(got, host, N)
        else:
            call("cuMemcpyDtoH_v2", got, p, n)
        said.append(("bytes right", bytes(got) == bytes([6]) * N))
    print(f"{allocate.__name__:7} {question:20} {mode:8}", *(f"{what} {answer}," for what, answer in said), flush=True)


CAPTURED = [f"{q}-{mode}" for q in ("to_host_in_order", "here_in_order", "peer_in_order") for mode in ("all", "thread", "relaxed")] + ["here_in_order-node"]

if __name__ == "__main__":
    if len(sys.argv) > 2 and "-" in sys.argv[2]:
        ask_captured(dict(plain=plain, mapped=mapped)[sys.argv[1]], sys.argv[2])
    elif len(sys.argv) > 1:
        ask(dict(plain=plain, mapped=mapped)[sys.argv[1]], sys.argv[2])
    else:
        for kind in ("plain", "mapped"):
            for question in QUESTIONS + CAPTURED:
                subprocess.run([sys.executable, __file__, kind, question])
