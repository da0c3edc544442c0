#!/usr/bin/env python3
"""Processes that share memory by the driver's own calls, without a framework, for sharing.py. Each checks every word that it reads.

sharing_driver.py events|many [--seconds S] [--least N] [--stop FILE] [--gib GIB]: as sharing_job.py.
`events`: a producer and a consumer order their work by events of each other, on the GPU alone.
`many`: 100 producers and 100 consumers, as threads of 4 and 4 processes with a stream each: a context of each of 200 would fill the card.
"""
import json, mmap, multiprocessing, os, pathlib, socket, struct, sys, threading, time, traceback
from ctypes import byref, c_char, c_size_t, c_uint, c_uint64, c_void_p

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "probes"))
from ipc_probe import DRIVER, MIB, Handle
from sharing_job import ANSWERS, COUNTS, WAIT, arguments, finish, guard, hear, rounds

SIDES, THREADS = 4, 25
DRIVER.cuIpcOpenMemHandle_v2.argtypes = [c_void_p, Handle, c_uint]


def ask(name, *arguments):
    return getattr(DRIVER, name)(*arguments)


def do(name, *arguments):
    if result := ask(name, *arguments):
        raise RuntimeError(f"{name}: {result}")


def words(value, size):
    return struct.pack("<I", value & 0xffffffff) * (size // 4)


class Side:
    """A thread's stream, in the context of its process."""

    def __init__(self):
        self.context, self.stream = c_void_p(), c_void_p()
        do("cuInit", 0)
        do("cuDevicePrimaryCtxRetain", byref(self.context), 0)
        do("cuCtxSetCurrent", self.context)
        do("cuStreamCreate", byref(self.stream), 1)
        self.room = bytearray()

    def allocate(self, size):
        at = c_uint64()
        do("cuMemAlloc_v2", byref(at), c_size_t(size))
        return at.value

    def fill(self, at, size, value):
        do("cuMemsetD32Async", c_uint64(at), c_uint(value & 0xffffffff), c_size_t(size // 4), self.stream)

    def wait(self):
        do("cuStreamSynchronize", self.stream)

    def holds(self, at, size, value):
        """Whether all words are the value."""
        if len(self.room) != size:
            self.room = bytearray(size)
        do("cuMemcpyDtoHAsync_v2", (c_char * size).from_buffer(self.room), c_uint64(at), c_size_t(size), self.stream)
        self.wait()
        return self.room == words(value, size)

    def give(self, at):
        handle = Handle()
        do("cuIpcGetMemHandle", byref(handle), c_uint64(at))
        return bytes(bytearray(handle))

    def open(self, raw):
        at = c_uint64()
        return DRIVER.cuIpcOpenMemHandle_v2(byref(at), Handle.from_buffer_copy(raw), 1), at.value


class Ballast:
    """Blocks that are not shared: one of them changes in each round, and all have to be right at the end."""

    def __init__(self, side, gib, mib=64):
        self.side, self.size = side, mib * MIB
        self.blocks = [side.allocate(self.size) for _ in range(max(1, int(gib * 1024 / mib)))]
        self.filled = [0] * len(self.blocks)
        for i in range(len(self.blocks)):
            self.change(i, 0)
        side.wait()

    def change(self, n, plus=1):
        i = n % len(self.blocks)
        self.filled[i] += plus
        self.side.fill(self.blocks[i], self.size, self.value(i))

    def value(self, i):
        return self.filled[i] * 1000003 + i + 1

    def right(self):
        return all([self.side.holds(at, self.size, self.value(i)) for i, at in enumerate(self.blocks)])


def in_a_process(what):
    """Runs it in a child that is forked before the driver is used; returns a pipe to it, and the child."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def child():
        guard()
        here.close()
        try:
            what(there)
        except BaseException as error:
            traceback.print_exc()
            there.send(("error", repr(error)[:300]))
            raise
    process = context.Process(target=child, daemon=True)
    process.start()
    there.close()
    return here, process


# Events.
def event(flags=6):
    """Between processes, without times."""
    made = c_void_p()
    return ask("cuEventCreate", byref(made), flags), made


def event_handle(of):
    handle = Handle()
    return ask("cuIpcGetEventHandle", byref(handle), of), bytes(bytearray(handle))


def opened_event(raw):
    made = c_void_p()
    DRIVER.cuIpcOpenEventHandle.argtypes = [c_void_p, Handle]
    return DRIVER.cuIpcOpenEventHandle(byref(made), Handle.from_buffer_copy(raw)), made


SHARED = 16 * MIB


def consumer(gib, pipe):
    side = Side()
    ballast, copy, wrong = Ballast(side, gib), side.allocate(SHARED), 0
    result, done = event()
    pipe.send((result, *event_handle(done)))
    memory, raw = hear(pipe)
    (opened, at), (opened_too, filled) = side.open(memory), opened_event(raw)
    pipe.send([opened, opened_too, ask("cuEventQuery", filled), ask("cuEventSynchronize", filled)])
    while (n := hear(pipe)) is not None:
        do("cuStreamWaitEvent", side.stream, filled, 0)
        do("cuMemcpyDtoDAsync_v2", c_uint64(copy), c_uint64(at), c_size_t(SHARED), side.stream)
        do("cuEventRecord", done, side.stream)
        pipe.send(n)
        wrong += not side.holds(copy, SHARED, n + 1)
        ballast.change(n)
    side.wait()
    pipe.send([wrong, ballast.right(), ask("cuEventDestroy_v2", filled), ask("cuIpcCloseMemHandle", c_uint64(at))])


def events(a):
    """The producer fills after long work; neither process waits for the GPU before it tells the other one."""
    pipe, other = in_a_process(lambda there: consumer(a.gib, there))
    side = Side()
    ballast, long = Ballast(side, a.gib), side.allocate(256 * MIB)
    at, (made, filled) = side.allocate(SHARED), event()
    result, raw = event_handle(filled)
    ANSWERS["an event, its handle"] = [made, result]
    ANSWERS["handle of an event of this process alone"] = event_handle(event(2)[1])[0]
    ANSWERS["an event between processes, with times"] = event(4)[0]
    made, result, theirs = hear(pipe, 90)
    opened, done = opened_event(theirs)
    ANSWERS["the other's event, its handle, opened"] = [made, result, opened]
    pipe.send((side.give(at), raw))
    ANSWERS["opened by the other: memory, event, its query, waited for"] = hear(pipe)
    for n in rounds(a):
        if n:
            do("cuStreamWaitEvent", side.stream, done, 0)
        side.fill(at, SHARED, 0)
        for _ in range(8):
            side.fill(long, 256 * MIB, n)
        side.fill(at, SHARED, n + 1)
        do("cuEventRecord", filled, side.stream)
        ballast.change(n)
        pipe.send(n)
        if hear(pipe) != n:
            raise RuntimeError("an answer to another round")
    side.wait()
    ANSWERS["both events have happened"] = [ask("cuEventQuery", filled), ask("cuEventSynchronize", done), ask("cuEventQuery", done)]
    pipe.send(None)
    ANSWERS["copies that are wrong, other memory is right, event and memory closed"] = hear(pipe)
    other.join(WAIT)
    ANSWERS["the other process ends"] = other.exitcode
    ANSWERS["other memory is right"] = ballast.right()
    ANSWERS["events destroyed"] = [ask("cuEventDestroy_v2", one) for one in (done, filled)]


# Many producers and consumers.
MESSAGE, ANSWER = struct.Struct("=64sQI"), struct.Struct("=iii")


def receive(of, form):
    data = b""
    while len(data) < form.size:
        part = of.recv(form.size - len(data))
        if not part:
            raise EOFError("the other thread is gone")
        data += part
    return form.unpack(data)


def size_for(pair):
    """A quarter is below 2 MiB and shares its piece with others, the others have 2 to 6 MiB."""
    return (64 << 10) * (pair % 3 + 1) if pair % 4 == 0 else 2 * MIB * (pair % 3 + 1)


def producer_thread(pair, to, going, told):
    side, size, n, wrong = Side(), size_for(pair), 0, dict(opened=0, there=0, changed=0)
    while n < 2 or going[0]:
        at, value = side.allocate(size), pair * 1000 + n * 7 + 1
        side.fill(at, size, value)
        side.wait()
        to.sendall(MESSAGE.pack(side.give(at), size, value))
        opened, closed, right = receive(to, ANSWER)
        wrong["opened"] += bool(opened or closed)
        wrong["there"] += not right
        wrong["changed"] += not side.holds(at, size, value + 1)
        do("cuMemFree_v2", c_uint64(at))
        n += 1
    to.sendall(MESSAGE.pack(bytes(64), 0, 0))
    told.update(rounds=n, **wrong)


def consumer_thread(pair, to, going, told):
    side, n = Side(), 0
    while True:
        raw, size, value = receive(to, MESSAGE)
        if not size:
            break
        opened, at = side.open(raw)
        right = closed = 0
        if not opened:
            right = side.holds(at, size, value)
            side.fill(at, size, value + 1)
            side.wait()
            closed = ask("cuIpcCloseMemHandle", c_uint64(at))
        to.sendall(ANSWER.pack(opened, closed, right))
        n += 1
    told.update(rounds=n)


def crowd(what, k, channels, going, gib, pipe):
    """A process of 25 threads; it says what came out for each."""
    side = Side()
    ballast, told, threads = Ballast(side, gib), [{} for _ in channels], []

    def run(i):
        pair = k * THREADS + i
        try:
            channels[i].settimeout(WAIT)
            what(pair, channels[i], going, told[i])
        except BaseException as error:
            traceback.print_exc()
            told[i]["error"] = f"pair {pair}: {error!r}"[:200]
            channels[i].shutdown(socket.SHUT_RDWR)  # The other side hears of it at once.
    pipe.send("ready")
    if hear(pipe, 90) != "go":
        return
    for i in range(len(channels)):
        threads.append(threading.Thread(target=run, args=(i,), daemon=True))
        threads[-1].start()
    n = 0
    while any(thread.is_alive() for thread in threads):
        ballast.change(n)
        side.wait()
        n += 1
        threads[n % len(threads)].join(0.02)
    pipe.send((told, ballast.right()))


def many(a):
    going = mmap.mmap(-1, 4096)
    going[0] = 1
    pairs = [[socket.socketpair() for _ in range(THREADS)] for _ in range(SIDES)]
    sides = []
    for end, what in enumerate((producer_thread, consumer_thread)):
        for k in range(SIDES):
            channels = [pair[end] for pair in pairs[k]]
            sides.append(in_a_process(lambda there, what=what, k=k, channels=channels: crowd(what, k, channels, going, a.gib, there)))
    ANSWERS["ready"] = [hear(pipe, 90) for pipe, _ in sides]
    for pipe, _ in sides:
        pipe.send("go")
    for _ in rounds(a):
        time.sleep(0.1)
    going[0] = 0
    heard = [hear(pipe, 90) for pipe, _ in sides]
    for _, process in sides:
        process.join(WAIT)
    threads = [told for tolds, _ in heard for told in tolds]
    ANSWERS["errors"] = [told["error"] for told in threads if "error" in told][:5]
    for kind in ("small", "large"):
        of_kind = [told for i, told in enumerate(threads[:SIDES * THREADS]) if (i % 4 == 0) == (kind == "small")]
        ANSWERS[f"{kind} allocations that are wrong"] = {what: sum(told.get(what, 0) for told in of_kind) for what in ("opened", "there", "changed")}
    ANSWERS["threads that had two rounds"] = sum(told.get("rounds", 0) >= 2 for told in threads)
    ANSWERS["other memory is right"] = [right for _, right in heard]
    ANSWERS["the processes end"] = [process.exitcode for _, process in sides]
    COUNTS.update(rounds=sum(told.get("rounds", 0) for told in threads[:SIDES * THREADS]))


if __name__ == "__main__":
    asked = arguments()
    finish(dict(events=events, many=many)[asked.program], asked)
