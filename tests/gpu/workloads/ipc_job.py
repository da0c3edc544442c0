#!/usr/bin/env python3
"""Memory that is shared. ipc_job.py NAME driver|torch|ranges|moments|cards [GIB]: answers of the driver's API about CUDA IPC, PyTorch's multiprocessing, dma-bufs.

Prints one line of JSON: each question with its answer, and times in ms. GIB: memory that is not shared and has to keep its contents.
"""
import json, os, pathlib, sys, time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "probes"))
ANSWERS, TIMES = {}, {}


def tell():
    print(json.dumps(dict(answers=ANSWERS, times=TIMES)), flush=True)


def driver():
    """The questions of `probes/ipc_probe.py`; its docstring has what a card answers natively."""
    from ipc_probe import GIB, MIB, Remote, Side
    importer, other, giver = Remote(), Remote(), Remote()  # all processes come before the driver does in this one
    exporter = Side()
    exporter.start(), importer.start(), other.start()
    say = ANSWERS.__setitem__
    _, a = exporter.allocate(1 * GIB)
    exporter.fill(a, GIB, 7)
    begun = time.perf_counter()
    result, handle = exporter.give(a)
    TIMES["first handle of 1 GiB"] = (time.perf_counter() - begun) * 1e3
    say("handle of a base", result)
    say("contents behind it", [exporter.look(a + at) for at in (0, GIB // 2 + 5, GIB - 1)])
    begun = time.perf_counter()
    result, inner = exporter.give(a + 3 * MIB + 512)
    TIMES["handle again"] = (time.perf_counter() - begun) * 1e3
    say("handle within, the same bytes", [result, inner == handle])
    say("handle of no memory, of address 0", [exporter.give(a + (1 << 45))[0], exporter.give(0)[0]])
    say("open in the exporter itself", exporter.open(handle)[0])
    result, b, TIMES["open of 1 GiB"] = importer.open(handle)
    say("open", [result, importer.look(b), importer.look(b + GIB - 1)])
    result, again, TIMES["open again"] = importer.open(handle)
    say("open twice, the same address", [result, again == b])
    result, within, _ = importer.open(inner)
    say("open of the handle within, the base", [result, within == b])
    say("flags 0, 2", [importer.open(handle, 0)[0], importer.open(handle, 2)[0]])
    say("free, handle of opened memory", [importer.free(b), importer.give(b)[0]])
    say("range of opened memory", importer.attributes(b)["range"][0::2])
    importer.fill(b, GIB, 8)
    say("exporter sees what the importer wrote", [exporter.look(a), exporter.look(a + GIB - 1)])
    exporter.fill(a, GIB, 9)
    say("importer sees what the exporter wrote", [importer.look(b), importer.look(b + GIB - 1)])
    say("close within, of other memory", [importer.close(b + MIB), importer.close(12345 << 20)])
    say("close four times", [importer.close(b) for _ in range(4)])
    say("forged: zeros, ones", [other.open(bytes(64))[0], other.open(bytes([255]) * 64)[0]])
    # Another secret, which the driver does not look at: asked under the library alone.
    if os.environ.get("LD_PRELOAD"):
        TIMES["forged secret answers"] = other.open(handle[:40] + bytes([handle[40] ^ 1]) + handle[41:])[0]
    small = [exporter.allocate(4096)[1] for _ in range(3)]
    for i, at in enumerate(small):
        exporter.fill(at, 4096, 20 + i)
    result, small_handle = exporter.give(small[1])
    say("small: handle, open", [result, (opened := other.open(small_handle))[0]])
    say("small: contents, neighbours", [other.look(opened[1]), exporter.look(small[0]), exporter.look(small[1]), exporter.look(small[2])])
    result, c, TIMES["open of 1 GiB by a process that has opened other memory"] = other.open(handle)
    before = exporter.free_memory()
    say("free of shared memory", exporter.free(a))
    say("importer after that", other.look(c))
    say("open after that by a third", importer.open(handle)[0])
    say("close after that", other.close(c))
    giver.start()
    _, d = giver.allocate(64 * MIB)
    giver.fill(d, 64 * MIB, 9)
    _, shared = giver.give(d)
    result, e, _ = other.open(shared)
    giver.kill()
    say("importer after the exporter's death", [result, other.look(e)])
    say("open after that by another", importer.open(shared)[0])
    say("close after the death", other.close(e))
    opens = []
    _, f = exporter.allocate(2 * MIB)
    _, many = exporter.give(f)
    for _ in range(100):
        begun = time.perf_counter()
        result, at, _ = importer.open(many)
        closed = importer.close(at)
        opens.append((time.perf_counter() - begun) * 1e3)
        if result or closed:
            break
    say("100 times open and close", [len(opens), result, closed])
    TIMES["open and close of 2 MiB, with the pipe"] = sorted(opens)[len(opens) // 2]
    for one in (other, importer):
        one.end()
    tell()


def moments():
    """4 GiB that another process opens for moments. Each of the two finds what the other one has written last."""
    from ipc_probe import GIB, Remote, Side
    importer, exporter, size = Remote(), Side(), 4 * GIB
    exporter.start(), importer.start()
    _, a = exporter.allocate(size)
    exporter.fill(a, size, 1)
    begun = time.perf_counter()
    _, handle = exporter.give(a)
    TIMES["first handle of 4 GiB"] = (time.perf_counter() - begun) * 1e3
    opens, closes, right = [], [], 0
    places = (0, size // 2 + 5, size - 1)
    for value in range(1, 81, 2):
        time.sleep(value % 5 * 0.15)
        result, b, took = importer.open(handle)
        opens.append(took)
        seen = [importer.look(b + at) for at in places]
        importer.fill(b, size, value + 1)
        begun = time.perf_counter()
        importer.close(b)
        closes.append((time.perf_counter() - begun) * 1e3)
        right += result == 0 and all(look[1] == value for look in seen) and all(exporter.look(a + at)[1] == value + 1 for at in places)
        exporter.fill(a, size, value + 2)
    ANSWERS["right, of 40 openings"] = right
    for name, times in (("open of 4 GiB", sorted(opens)), ("close", sorted(closes))):
        TIMES[f"{name}, least"], TIMES[f"{name}, median"], TIMES[f"{name}, most"] = times[0], times[len(times) // 2], times[-1]
    importer.end()
    tell()


def cards():
    """Memory of card 0, opened by processes that use card 1, or both. Each fill is by the context that is current."""
    from ipc_probe import MIB, Remote, Side
    over, both, late = Remote(), Remote(), Remote()
    exporter = Side()
    exporter.start(0), over.start(1), both.start(0), late.start(0)
    say, size = ANSWERS.__setitem__, 64 * MIB
    _, a = exporter.allocate(size)
    exporter.fill(a, size, 7)
    _, handle = exporter.give(a)
    result, b, TIMES["open of 64 MiB on the other card"] = over.open(handle)
    say("open on the other card", [result, over.look(b), over.look(b + size - 1)])
    say("it fills, the exporter looks", [over.fill(b, size, 8), exporter.look(a), exporter.look(a + size - 1)])
    result, c, _ = both.open(handle)
    say("open on its card", [result, both.look(c)])
    say("then a context of the other card", both.also(1))
    say("it fills by that", both.fill(c, size, 9)[0])
    exporter.fill(a, size, 9)
    _, g = both.allocate(MIB)
    say("it copies by that", [both.copy(g, c, MIB)[0], both.look(g), both.copy(c + MIB, g, MIB)[0]])
    say("then no access, and anew", [both.no_peer(0), both.also(0, peers=False)])
    say("it fills by the first", [both.fill(c, size, 10), exporter.look(a)])
    say("contexts of both cards", late.also(1))
    result, d, _ = late.open(handle)
    say("open on the other card where both are peers", [result, late.look(d), late.fill(d, size, 11), exporter.look(a)])
    _, f = exporter.allocate(size)
    exporter.fill(f, size, 5)
    late.also(0, peers=False)
    result, h, _ = late.open(exporter.give(f)[1])
    late.also(1, peers=False)
    say("open on its card where both are peers", [result, late.look(h)])
    say("the other one fills by itself", late.fill(h, size, 6)[0])
    say("it copies", late.copy(d, h, MIB)[0])
    say("the exporter's other card", exporter.also(1))
    say("it fills by that one", [exporter.fill(a, size, 12), over.look(b), both.look(c), late.look(d)])
    _, e = exporter.allocate(size)
    result, other = exporter.give(e)
    say("memory of the other card", [result, exporter.fill(e, size, 13), (opened := both.open(other))[0], both.look(opened[1]), (on_its := over.open(other))[0], over.look(on_its[1])])
    say("closed", [over.close(b), both.close(c), late.close(d), late.close(h), both.close(opened[1]), over.close(on_its[1])])
    # Each one has the sockets of those before it.
    for one in (late, both, over):
        one.end()
    tell()


def child(pipe, given, made):
    import torch
    try:
        whole = pipe.recv()
        event = torch.cuda.Event.from_ipc_handle(torch.device("cuda:0"), pipe.recv())
        torch.cuda.current_stream().wait_event(event)
        whole.add_(1)
        torch.cuda.synchronize()
        pipe.send(int(whole.sum()))
        # 100 tensors from the parent, each answered by one that is made here.
        kept = []
        for i in range(100):
            t = given.get()
            answer = t * 2 + i
            torch.cuda.synchronize()
            kept.append(answer)
            made.put(answer)
            del t
        pipe.recv()
        pipe.send([int(answer[0]) for answer in kept[:3]])
        del whole, kept
        pipe.send("bye")
    except Exception as error:
        pipe.send(f"in the child: {error!r}")
        raise


def torch_job(gib):
    import torch
    import torch.multiprocessing
    context = torch.multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    given, made = context.Queue(), context.Queue()
    other = context.Process(target=child, args=(there, given, made), daemon=True)
    other.start()

    def hear():
        return here.recv() if here.poll(60) else "no answer in 60 s"
    ballast = [torch.full((1 << 28,), i, dtype=torch.int32, device="cuda") for i in range(gib)]
    whole = torch.arange(1 << 22, device="cuda")
    event = torch.cuda.Event(interprocess=True)
    here.send(whole)
    whole.add_(1)
    event.record()
    here.send(event.ipc_handle())
    begun, expected = time.perf_counter(), (1 << 22) * ((1 << 22) - 1) // 2 + 2 * (1 << 22)
    ANSWERS["a tensor, in order of an event, seen by the child"] = hear() == expected
    ANSWERS["and by the parent"] = int(whole.sum()) == expected
    TIMES["first tensor"] = (time.perf_counter() - begun) * 1e3
    begun, right, keep = time.perf_counter(), 0, []
    for i in range(100):
        t = torch.full((1 << (8 + i % 14),), i, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        keep.append(t)
        given.put(t)
        try:
            answer = made.get(timeout=60)
        except Exception as error:
            ANSWERS[f"tensor {i}"] = repr(error)
            break
        right += bool((answer == 3 * i).all()) and bool((t == i).all())
        answer.add_(1)
        for b in ballast:
            b.add_(1)
        torch.cuda.synchronize()
        del answer
    TIMES["100 tensors both ways"] = (time.perf_counter() - begun) * 1e3
    ANSWERS["tensors right, of 100 both ways"] = right
    here.send("look")
    ANSWERS["the child sees what the parent did to its own"] = hear() == [1, 4, 7]
    ANSWERS["the child ends"] = [hear(), other.join(30), other.exitcode]
    ANSWERS["other memory is right"] = all(bool((b == i + 100).all()) for i, b in enumerate(ballast))
    tell()


def ranges(gib):
    """Descriptors of ranges (dma-bufs), then 8 s of rounds in which the memory behind one changes, and GIB of other memory as well."""
    import ctypes, torch
    cuda, descriptors = ctypes.CDLL("libcuda.so.1"), []
    small, large = torch.zeros(1024, dtype=torch.int32, device="cuda"), torch.zeros(1 << 26, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()

    def ask(tensor, offset, size, kind=1, flags=0):
        descriptor = ctypes.c_int(-1)
        begun = time.perf_counter()
        answer = cuda.cuMemGetHandleForAddressRange(ctypes.byref(descriptor), ctypes.c_uint64(tensor.data_ptr() + offset), ctypes.c_size_t(size), kind, ctypes.c_uint64(flags))
        took = (time.perf_counter() - begun) * 1e3
        descriptors.extend([descriptor.value] if answer == 0 else [])
        return answer, took

    ANSWERS["256 MiB"], TIMES["256 MiB"] = ask(large, 0, 1 << 28)
    ANSWERS["again, a part"], TIMES["again, a part"] = ask(large, 1 << 20, 1 << 20)
    ANSWERS["a page of small memory"] = ask(small, 0, 4096)[0]
    ANSWERS["an odd begin, an odd size, no size"] = [ask(large, 512, 4096)[0], ask(large, 0, 512)[0], ask(large, 0, 0)[0]]
    ANSWERS["another kind"] = ask(large, 0, 4096, 2)[0]
    ANSWERS["descriptors are files"] = all(os.readlink(f"/proc/self/fd/{d}") for d in descriptors)
    other = [torch.full((1 << 27,), i, dtype=torch.int64, device="cuda") for i in range(gib)]
    until, rounds = time.time() + 8, 0
    while time.time() < until:
        large.add_(1)
        for t in other:
            t.add_(1)
        torch.cuda.synchronize()
        rounds += 1
    ANSWERS["the words are right"] = [bool((large == rounds).all()), all(bool((t == i + rounds).all()) for i, t in enumerate(other))]
    tell()


if __name__ == "__main__":
    if sys.argv[2] == "driver":
        driver()
    elif sys.argv[2] == "cards":
        cards()
    elif sys.argv[2] == "moments":
        moments()
    elif sys.argv[2] == "ranges":
        ranges(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    else:
        torch_job(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
