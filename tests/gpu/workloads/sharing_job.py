#!/usr/bin/env python3
"""Programs of PyTorch, CuPy and RMM whose processes share memory, for sharing.py. Each checks every word that it reads.

sharing_job.py spawn|forkserver|parameters|allreduce|cupy|rmm [--seconds S] [--least N] [--stop FILE] [--gib GIB]: rounds until S seconds are over or FILE is
there, but at least N. GIB: memory of each process that is not shared, changed in each round, and has to be right at the end.
One line of JSON at the end: answers, which do not depend on how many rounds there were, and counts. A process that takes too long is ended by its alarm.
"""
import argparse, ctypes, gc, json, multiprocessing, os, signal, sys, time, traceback

ANSWERS, COUNTS = {}, {}
WAIT = 60  # seconds that a process waits for another one
RANKS = 4


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("program")
    p.add_argument("--seconds", type=float, default=2)
    p.add_argument("--least", type=int, default=2)
    p.add_argument("--stop")
    p.add_argument("--gib", type=float, default=1.25)
    return p.parse_args()


def guard(child=True):
    """No process outlives its program by much, whatever it waits for; a child goes with its parent."""
    signal.alarm(150)
    if child:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def rounds(a):
    """Counts the rounds. More than `--least` come while there is time; 45 s are the end in any case."""
    begun, n = time.time(), 0
    while n < a.least or time.time() - begun < a.seconds and not (a.stop and os.path.exists(a.stop)):
        if n and time.time() - begun > 45:
            break
        yield n
        n += 1
    COUNTS.update(rounds=n, seconds=round(time.time() - begun, 2))


def finish(program, *more):
    """Runs a program and tells its answers. After a failure nothing is waited for: queues and pipes may never empty."""
    guard(child=False)
    failed = False
    try:
        program(*more)
    except BaseException as error:
        failed = True
        traceback.print_exc()
        ANSWERS["failed"] = repr(error)[:300]
    print(json.dumps(dict(answers=ANSWERS, counts=COUNTS)), flush=True)
    if failed:
        for child in multiprocessing.active_children():
            child.kill()
        sys.stderr.flush()
        os._exit(1)


def hear(pipe, wait=WAIT):
    if not pipe.poll(wait):
        raise TimeoutError(f"no answer in {wait} s")
    heard = pipe.recv()
    if isinstance(heard, tuple) and heard and isinstance(heard[0], str) and heard[0] == "error":
        raise RuntimeError(f"in a child: {heard[1]}")
    return heard


def take(queue, wait=WAIT):
    taken = queue.get(timeout=wait)
    if isinstance(taken[0], str) and taken[0] == "error":
        raise RuntimeError(f"in a child: {taken[1]}")
    return taken


class Ballast:
    """Memory that is not shared: parts of 64 MiB in which each word depends on its place, its part and the rounds."""

    def __init__(self, gib):
        import torch
        self.torch, self.added = torch, 0
        self.base = torch.arange(1 << 24, dtype=torch.int32, device="cuda")
        self.parts = [self.base + i for i in range(int(gib * 16))]
        torch.cuda.synchronize()

    def change(self):
        for part in self.parts:
            part.add_(1)
        self.added += 1

    def right(self):
        return all(self.torch.equal(part, self.base + (i + self.added)) for i, part in enumerate(self.parts))


# Queues of tensors.
def tensor(i, plus=0):
    """The i-th tensor: of four types, of 256 to 2 million words, small ones in blocks with others; each fourth is a view of every second word."""
    import torch
    kind = (torch.int32, torch.int64, torch.float32, torch.uint8)[i // 4 % 4]
    whole = ((torch.arange(1 << (8 + i % 14), device="cuda") * 3 + i) % 61).to(kind) + plus
    return whole[::2] if i % 4 == 3 else whole


def queue_worker(k, gib, given, made):
    guard()
    try:
        import torch
        ballast = Ballast(gib)
        made.put(("ready", k))
        while (got := given.get(timeout=WAIT)) is not None:
            i, t = got
            right = torch.equal(t, tensor(i))
            answer = t * 2 + 1
            t.add_(1)
            torch.cuda.synchronize()
            made.put((i, right, answer))
            del got, t, answer
            ballast.change()
        gc.collect()
        torch.cuda.ipc_collect()
        made.put(("end", k, ballast.right()))
    except BaseException as error:
        traceback.print_exc()
        made.put(("error", f"worker {k}: {error!r}"[:300]))
        raise


def queues(a):
    """Eight tensors a round go to two workers through one queue. Each is changed in place, and answered by one that is made there."""
    import torch
    import torch.multiprocessing
    context = torch.multiprocessing.get_context(a.program)
    given, made = context.Queue(), context.Queue()
    workers = [context.Process(target=queue_worker, args=(k, a.gib, given, made), daemon=True) for k in range(2)]
    for worker in workers:
        worker.start()
    ballast = Ballast(a.gib)
    ANSWERS["workers ready"] = sorted(take(made, 90) for _ in workers)
    wrong = dict(there=0, back=0, changed=0)
    for n in rounds(a):
        kept = {}
        for i in range(n * 8, n * 8 + 8):
            kept[i] = tensor(i)
            if n % 2:
                torch.cuda.synchronize()  # In the other rounds, the order comes from the event that PyTorch sends along.
            given.put((i, kept[i]))
        for _ in range(8):
            i, right, answer = take(made)
            wrong["there"] += not right
            wrong["back"] += not torch.equal(answer, tensor(i) * 2 + 1)
            wrong["changed"] += not torch.equal(kept[i], tensor(i, 1))
            del answer
        ballast.change()
    COUNTS["tensors"] = 16 * COUNTS["rounds"]
    kept.clear()
    gc.collect()
    torch.cuda.ipc_collect()
    for _ in workers:
        given.put(None)
    ANSWERS["tensors that are wrong"] = wrong
    ANSWERS["the workers' other memory is right"] = sorted(take(made) for _ in workers)
    for worker in workers:
        worker.join(WAIT)
    ANSWERS["the workers end"] = [worker.exitcode for worker in workers]
    ANSWERS["other memory is right"] = ballast.right()


# Parameters.
def network():
    """Layers whose weights are whole numbers, and whose gradients do not depend on them: sums are exact in any order."""
    import torch
    layers = torch.nn.ModuleList([torch.nn.Linear(256, width, device="cuda") for width in (4096, 16, 2048, 8, 4096, 1024)])
    with torch.no_grad():
        for i, p in enumerate(layers.parameters()):
            p.copy_((torch.arange(p.numel(), device="cuda") * (i + 1) % 7 - 3).reshape(p.shape))
    return layers


def learn(layers, optimizer, step):
    import torch
    x = ((torch.arange(64 * 256, device="cuda") * (step + 1)) % 5 - 2).float().reshape(64, 256)
    optimizer.zero_grad()
    sum(((i % 3 + 1) * layer(x)).sum() for i, layer in enumerate(layers)).backward()
    optimizer.step()
    torch.cuda.synchronize()


def learner(k, gib, pipe, layers):
    guard()
    try:
        import torch
        ballast, optimizer = Ballast(gib), torch.optim.SGD(layers.parameters(), lr=1.0)
        pipe.send(("ready", k))
        while (step := hear(pipe)) is not None:
            learn(layers, optimizer, step)
            ballast.change()
            pipe.send(("done", step))
        del optimizer, layers
        gc.collect()
        torch.cuda.ipc_collect()
        pipe.send(("end", ballast.right()))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("error", repr(error)[:300]))
        raise


def parameters(a):
    """Two processes and their parent train one model in turns, each with its own optimizer. After each step the parent compares each weight with a model of its own."""
    import torch
    import torch.multiprocessing
    context = torch.multiprocessing.get_context("spawn")
    ballast, shared, own = Ballast(a.gib), network(), network()
    shared.share_memory()
    ends = [context.Pipe() for _ in range(2)]
    learners = [context.Process(target=learner, args=(k, a.gib, there, shared), daemon=True) for k, (_, there) in enumerate(ends)]
    for one in learners:
        one.start()
    pipes = [here for here, _ in ends]
    ANSWERS["learners ready"] = [hear(pipe, 90) for pipe in pipes]
    ours, theirs, wrong = torch.optim.SGD(own.parameters(), lr=1.0), torch.optim.SGD(shared.parameters(), lr=1.0), 0
    for step in rounds(a):
        if step % 3 < 2:
            pipes[step % 3].send(step)
            if hear(pipes[step % 3]) != ("done", step):
                raise RuntimeError("a learner answers to another step")
        else:
            learn(shared, theirs, step)
        learn(own, ours, step)
        wrong += not all(torch.equal(p, q) for p, q in zip(shared.parameters(), own.parameters()))
        ballast.change()
    ANSWERS["steps after which a weight is wrong"] = wrong
    for pipe in pipes:
        pipe.send(None)
    ANSWERS["the learners' other memory is right"] = [hear(pipe) for pipe in pipes]
    for one in learners:
        one.join(WAIT)
    ANSWERS["the learners end"] = [one.exitcode for one in learners]
    ANSWERS["other memory is right"] = ballast.right()


# An all-reduce: each rank maps the others' buffers.
def rank(r, gib, inboxes, barrier, going, results, numbers):
    """`numbers`: the rounds, in rank 0, which decides for all. Sums by halves: each rank reads its partner's half, then quarter, and collects the sums the same way back.
    Between the steps all ranks meet: at a barrier after all work is complete, or, in even rounds, by events that they record and wait for on the GPU."""
    import torch
    ballast, size, wrong, met = Ballast(gib), 1 << 20, 0, 0
    words = torch.arange(size, dtype=torch.int32, device="cuda") % 1000
    mine, events = torch.zeros(size, dtype=torch.int32, device="cuda"), [torch.cuda.Event(interprocess=True) for _ in range(2)]
    for event in events:
        event.record()
    torch.cuda.synchronize()
    others = [other for other in range(RANKS) if other != r]
    for other in others:
        inboxes[other].put((r, mine, [event.ipc_handle() for event in events]))
    theirs, signals = {}, {}
    for _ in others:
        other, buffer, handles = inboxes[r].get(timeout=90)
        theirs[other], signals[other] = buffer, [torch.cuda.Event.from_ipc_handle(torch.device("cuda:0"), handle) for handle in handles]
        del buffer

    def meet(n):
        nonlocal met
        if n % 2:
            torch.cuda.synchronize()
            barrier.wait(WAIT)
            return
        met += 1  # Two events in turns: a rank may record the next while another still has to wait for this one.
        events[met % 2].record()
        barrier.wait(WAIT)
        for other in others:
            torch.cuda.current_stream().wait_event(signals[other][met % 2])

    def reduce(n):
        nonlocal wrong
        torch.add(words, n * (r + 1), out=mine)
        begin, end = 0, size
        for distance in (2, 1):
            middle = (begin + end) // 2
            begin, end = (middle, end) if r & distance else (begin, middle)
            meet(n)
            mine[begin:end] += theirs[r ^ distance][begin:end]
        for distance in (1, 2):
            length = end - begin
            other = begin - length if r & distance else end
            meet(n)
            mine[other:other + length] = theirs[r ^ distance][other:other + length]
            begin, end = min(begin, other), max(end, other + length)
        meet(n)
        wrong += not torch.equal(mine, words * RANKS + n * (RANKS * (RANKS + 1) // 2))
        ballast.change()

    for n in numbers or iter(int, 1):  # The others go on until they are told.
        if numbers:
            going.value = n + 1
        barrier.wait(90)
        if not going.value:
            break
        reduce(going.value - 1)
    if numbers:
        going.value = 0
        barrier.wait(90)
    torch.cuda.synchronize()
    right = ballast.right()
    theirs.clear(), signals.clear()
    gc.collect()
    torch.cuda.ipc_collect()
    barrier.wait(WAIT)
    results.put((r, wrong, right))


def other_rank(r, gib, inboxes, barrier, going, results):
    guard()
    try:
        rank(r, gib, inboxes, barrier, going, results, None)
    except BaseException as error:
        traceback.print_exc()
        barrier.abort()
        results.put(("error", f"rank {r}: {error!r}"[:300]))
        raise


def allreduce(a):
    import torch.multiprocessing
    context = torch.multiprocessing.get_context("spawn")
    barrier, going, inboxes, results = context.Barrier(RANKS), context.Value("i", 0, lock=False), [context.Queue() for _ in range(RANKS)], context.Queue()
    others = [context.Process(target=other_rank, args=(r, a.gib, inboxes, barrier, going, results), daemon=True) for r in range(1, RANKS)]
    for one in others:
        one.start()
    try:
        rank(0, a.gib, inboxes, barrier, going, results, rounds(a))
    except BaseException:
        barrier.abort()
        raise
    ANSWERS["ranks: wrong sums, other memory is right"] = sorted(take(results) for _ in range(RANKS))
    for one in others:
        one.join(WAIT)
    ANSWERS["the ranks end"] = [one.exitcode for one in others]


# CuPy's arrays, by the runtime's handles; RMM's memory in the same way.
def allocator(program):
    """From here on CuPy's arrays are RMM's, of a pool; what came before moves apart from that pool."""
    if program == "rmm":
        import cupy, rmm
        from rmm.allocators.cupy import rmm_cupy_allocator
        rmm.reinitialize(pool_allocator=True, initial_pool_size=1 << 26)
        cupy.cuda.set_allocator(rmm_cupy_allocator)


def base_of(pointer):
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    if result := ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer)):
        raise RuntimeError(f"cuMemGetAddressRange: {result}")
    return base.value


def described(array):
    """What another process needs: the handle of the allocation, and where the array is in it, since pools give parts of allocations."""
    import cupy
    return bytes(cupy.cuda.runtime.ipcGetMemHandle(array.data.ptr)), array.data.ptr - base_of(array.data.ptr), array.size


class Opened:
    def __init__(self, handle, offset, size):
        import cupy
        self.base = cupy.cuda.runtime.ipcOpenMemHandle(handle)
        self.array = cupy.ndarray(size, cupy.int32, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(self.base + offset, size * 4, self), 0))

    def close(self):
        import cupy
        del self.array
        cupy.cuda.runtime.deviceSynchronize()
        cupy.cuda.runtime.ipcCloseMemHandle(self.base)


class Arrays:
    """The same as `Ballast`, of CuPy."""

    def __init__(self, gib):
        import cupy
        self.cupy, self.added = cupy, 0
        self.base = cupy.arange(1 << 24, dtype=cupy.int32)
        self.parts = [self.base + i for i in range(int(gib * 16))]

    def change(self):
        for part in self.parts:
            part += 1
        self.added += 1

    def right(self):
        return all(bool((part == self.base + (i + self.added)).all()) for i, part in enumerate(self.parts))


def values(i, size, plus=0):
    import cupy
    return ((cupy.arange(size, dtype=cupy.int32) * 5 + i) % 100003 + plus).astype(cupy.int32, copy=False)


def size_of(i):
    return 1 << (8 + i * 5 % 14)


def opener(program, gib, pipe):
    """Checks what the parent shares, changes it, and answers with an array of its own."""
    guard()
    try:
        import cupy
        runtime, ballast, kept = cupy.cuda.runtime, Arrays(gib), None
        allocator(program)
        pipe.send("ready")
        recorded = runtime.ipcOpenEventHandle(hear(pipe))
        while (told := hear(pipe)) is not None:
            i, *where = told
            runtime.streamWaitEvent(0, recorded, 0)
            opened = Opened(*where)
            again = Opened(*where)
            right = bool((opened.array == values(i, opened.array.size)).all())
            same = again.base == opened.base
            opened.array += 1
            kept = values(i + 1, size_of(i))
            runtime.deviceSynchronize()
            again.close()
            opened.close()
            pipe.send((right, same, described(kept)))
            ballast.change()
        del kept
        runtime.eventDestroy(recorded)
        pipe.send(("end", ballast.right()))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("error", repr(error)[:300]))
        raise


def handles(a):
    try:
        import cupy
        if a.program == "rmm":
            import rmm
    except ModuleNotFoundError as error:
        ANSWERS["skipped"] = f"no package {error.name}"
        return
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    other = context.Process(target=opener, args=(a.program, a.gib, there), daemon=True)
    other.start()
    runtime, ballast = cupy.cuda.runtime, Arrays(a.gib)
    allocator(a.program)
    event = cupy.cuda.Event(disable_timing=True, interprocess=True)
    event.record()
    ANSWERS["the other process is ready"] = hear(here, 90)
    here.send(bytes(runtime.ipcGetEventHandle(event.ptr)))
    wrong, spacers = dict(there=0, changed=0, back=0, address=0), []
    for i in rounds(a):
        spacers = [*spacers[-3:], cupy.zeros(256 * (i % 7 + 1), cupy.int32)]  # So that arrays are not at the begin of the pool's memory.
        shared = values(i, size_of(i))
        event.record()  # Nothing is waited for here: the other process waits for the event on the GPU.
        here.send((i, *described(shared)))
        right, same, where = hear(here)
        wrong["there"] += not right
        wrong["address"] += not same
        wrong["changed"] += not bool((shared == values(i, shared.size, 1)).all())
        answer = Opened(*where)
        wrong["back"] += not bool((answer.array == values(i + 1, size_of(i))).all())
        answer.close()
        ballast.change()
    here.send(None)
    ANSWERS["arrays that are wrong"] = wrong
    ANSWERS["the other process's memory is right"] = hear(here)
    other.join(WAIT)
    ANSWERS["the other process ends"] = other.exitcode
    ANSWERS["other memory is right"] = ballast.right()


PROGRAMS = dict(spawn=queues, forkserver=queues, parameters=parameters, allreduce=allreduce, cupy=handles, rmm=handles)
if __name__ == "__main__":
    asked = arguments()
    finish(PROGRAMS[asked.program], asked)
