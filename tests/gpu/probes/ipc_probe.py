#!/usr/bin/env python3
"""What the driver answers about memory that processes share: CUDA IPC natively, and mapped memory that is exported by a descriptor.

Each line names a question and the answer: 0 is success, else the driver's number. Times are in ms. `peers` needs two cards.

On two H100s, driver 580.159.04:
- A handle is the same for each address of an allocation, and each time. Opening it gives the base; opening again gives the same
  address, and as many closes are needed (one more is 1). The exporter itself gets 201; flags other than 1, memory that was opened,
  and a handle of zeros get 1. Another user may open it. The driver does not look at all 64 bytes.
- The exporter's free keeps the memory while an importer has it. So does its death; the handle then opens no more (400).
- Memory that was not made for it cannot be exported (1). An imported handle cannot be exported again (1). A mapped address has no
  IPC handle (1), exportable or not. A descriptor keeps the memory alive and can be imported by anybody, another user too.
- 1 GiB was replaced at its address by exportable memory in 1.5 ms, contents right. Export, import and map of 1 GiB took 1.0 ms in
  one piece, 3.5 ms in pieces of 32 MiB, 90 ms in pieces of 2 MiB; 8 GiB in pieces of 64 MiB 11 ms.
- Exporter and importer can both unmap, and map what was made anew at their old addresses. An importer's death harms nobody.
- Over NVLink an importer on the other card reads and writes 1 GiB in 2.7 ms.
"""
import os
import pickle
import signal
import socket
import struct
import sys
import time
from ctypes import CDLL, Structure, byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p, create_string_buffer

DRIVER, MIB, GIB = CDLL("libcuda.so.1"), 1 << 20, 1 << 30


class Handle(Structure):
    """64 bytes that are passed by value."""
    _fields_ = [("bytes", c_char * 64)]


def call(name, *arguments):
    return getattr(DRIVER, name)(*arguments)


def properties(device=0, exported=True):
    return (c_int * 8)(1, 1 if exported else 0, 1, device, 0, 0, 0, 0)


class Side:
    """One process: its context, and what it is asked to do. Results are plain values."""

    def __init__(self):
        self.kept = {}

    def start(self, device=0):
        context = c_void_p()
        result = [call("cuInit", 0), call("cuDevicePrimaryCtxRetain", byref(context), device), call("cuCtxSetCurrent", context)]
        return result

    # Plain memory and CUDA IPC.
    def allocate(self, size):
        at = c_uint64()
        return call("cuMemAlloc_v2", byref(at), c_size_t(size)), at.value

    def free(self, at):
        return call("cuMemFree_v2", c_uint64(at))

    def fill(self, at, size, byte):
        return call("cuMemsetD8_v2", c_uint64(at), c_char(bytes([byte])), c_size_t(size)), call("cuCtxSynchronize")

    def look(self, at):
        word = (c_char * 1)()
        return call("cuMemcpyDtoH_v2", word, c_uint64(at), c_size_t(1)), word.raw[0]

    def give(self, at):
        handle = Handle()
        return call("cuIpcGetMemHandle", byref(handle), c_uint64(at)), bytes(bytearray(handle))

    def open(self, raw, flags=1):
        handle, at = Handle.from_buffer_copy(raw), c_uint64()
        begun = time.perf_counter()
        DRIVER.cuIpcOpenMemHandle_v2.argtypes = [c_void_p, Handle, c_uint]
        result = DRIVER.cuIpcOpenMemHandle_v2(byref(at), handle, flags)
        return result, at.value, (time.perf_counter() - begun) * 1e3

    def close(self, at):
        return call("cuIpcCloseMemHandle", c_uint64(at))

    def attributes(self, at):
        found = {}
        for attribute in list(range(1, 22)):
            value = (c_uint64 * 8)()
            result = call("cuPointerGetAttribute", value, attribute, c_uint64(at))
            found[attribute] = hex(value[0]) if result == 0 else f"({result})"
        base, size = c_uint64(), c_size_t()
        found["range"] = (call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(at)), hex(base.value), size.value // MIB)
        return found

    def free_memory(self):
        free, total = c_size_t(), c_size_t()
        call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value // MIB

    # Mapped memory.
    def reserve(self, size):
        at = c_uint64()
        return call("cuMemAddressReserve", byref(at), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0)), at.value

    def create(self, size, exported=True, device=0):
        handle = c_uint64()
        result = call("cuMemCreate", byref(handle), c_size_t(size), properties(device, exported), c_uint64(0))
        return result, handle.value

    def export(self, handle):
        descriptor = c_int(-1)
        return call("cuMemExportToShareableHandle", byref(descriptor), c_uint64(handle), 1, c_uint64(0)), descriptor.value

    def take_in(self, descriptor):
        handle = c_uint64()
        return call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), 1), handle.value

    def map(self, at, size, handle, devices=(0,)):
        result = [call("cuMemMap", c_uint64(at), c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))]
        access = (c_int * (3 * len(devices)))(*[word for device in devices for word in (1, device, 3)])
        return result + [call("cuMemSetAccess", c_uint64(at), c_size_t(size), access, c_size_t(len(devices)))]

    def unmap(self, at, size):
        return call("cuMemUnmap", c_uint64(at), c_size_t(size))

    def release(self, handle):
        return call("cuMemRelease", c_uint64(handle))

    def copy(self, to, source, size):
        begun = time.perf_counter()
        result = call("cuMemcpyDtoD_v2", c_uint64(to), c_uint64(source), c_size_t(size)), call("cuCtxSynchronize")
        return result, (time.perf_counter() - begun) * 1e3

    # Memory in pieces, as the library has it.
    def make_pieces(self, size, piece, device=0):
        """Reserves, creates, maps and exports. Times for each part."""
        result, at = self.reserve(size)
        times, handles, descriptors = [0.0] * 3, [], []
        for offset in range(0, size, piece):
            begun = time.perf_counter()
            made, handle = self.create(piece, device=device)
            created = time.perf_counter()
            mapped = self.map(at + offset, piece, handle, (device,))
            done = time.perf_counter()
            exported, descriptor = self.export(handle)
            end = time.perf_counter()
            if made or any(mapped) or exported:
                return f"create {made} map {mapped} export {exported}"
            handles.append(handle)
            descriptors.append(descriptor)
            times = [sum(pair) for pair in zip(times, (created - begun, done - created, end - done))]
        self.kept["pieces"] = (at, size, piece, handles)
        return at, [round(part * 1e3, 2) for part in times], descriptors

    def take_pieces(self, size, piece, descriptors, at=0, device=0, close=True):
        """Imports and maps. Times for each part."""
        result, at = (0, at) if at else self.reserve(size)
        times, handles = [0.0] * 3, []
        for offset, descriptor in zip(range(0, size, piece), descriptors):
            begun = time.perf_counter()
            made, handle = self.take_in(descriptor)
            imported = time.perf_counter()
            mapped = self.map(at + offset, piece, handle, (device,))
            done = time.perf_counter()
            if close:
                os.close(descriptor)
            end = time.perf_counter()
            if made or any(mapped):
                return f"import {made} map {mapped}"
            handles.append(handle)
            times = [sum(pair) for pair in zip(times, (imported - begun, done - imported, end - done))]
        self.kept["pieces"] = (at, size, piece, handles)
        return at, [round(part * 1e3, 2) for part in times]

    def drop_pieces(self, keep_addresses=False):
        at, size, piece, handles = self.kept.pop("pieces")
        begun = time.perf_counter()
        results = {self.unmap(at + offset, piece) for offset in range(0, size, piece)}
        unmapped = time.perf_counter()
        results |= {self.release(handle) for handle in handles}
        released = time.perf_counter()
        if not keep_addresses:
            results.add(call("cuMemAddressFree", c_uint64(at), c_size_t(size)))
        return results, [round((unmapped - begun) * 1e3, 2), round((released - unmapped) * 1e3, 2)]

    def close_all(self, descriptors):
        for descriptor in descriptors:
            os.close(descriptor)

    def also(self, device, peers=True):
        """Makes a context of one more device current; with peer access both ways, unless it says otherwise."""
        before, context = c_void_p(), c_void_p()
        result = [call("cuCtxGetCurrent", byref(before)), call("cuDevicePrimaryCtxRetain", byref(context), device)]
        if peers:
            result += [call("cuCtxEnablePeerAccess", context, 0), call("cuCtxSetCurrent", context), call("cuCtxEnablePeerAccess", before, 0)]
        return result + [call("cuCtxSetCurrent", context)]

    def no_peer(self, device):
        """The current context may not reach the memory of a device's primary context any more."""
        context = c_void_p()
        return [call("cuDevicePrimaryCtxRetain", byref(context), device), call("cuCtxDisablePeerAccess", context)]

    def peer(self, other):
        can, context = c_int(), c_void_p()
        call("cuDeviceCanAccessPeer", byref(can), 0, other)
        return can.value


class Remote:
    """The same in a process of its own. Descriptors among the arguments or results travel beside them."""

    def __init__(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket = ours
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            serve(theirs)
            os._exit(0)
        theirs.close()

    def __getattr__(self, name):
        def ask(*arguments, descriptors=(), **named):
            tell(self.socket, (name, arguments, named), descriptors)
            return hear(self.socket)[0]
        return ask

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def end(self):
        self.socket.close()
        os.waitpid(self.pid, 0)


def tell(to, what, descriptors=()):
    data = pickle.dumps(what)
    to.sendall(struct.pack("=II", len(data), len(descriptors)) + data)
    for begin in range(0, len(descriptors), 200):
        socket.send_fds(to, [b"d"], descriptors[begin:begin + 200])


def hear(of):
    head = b""
    while len(head) < 8:
        part = of.recv(8 - len(head))
        if not part:
            return None, []
        head += part
    size, count = struct.unpack("=II", head)
    data = b""
    while len(data) < size:
        data += of.recv(size - len(data))
    descriptors = []
    while len(descriptors) < count:
        descriptors += socket.recv_fds(of, 1, 200)[1]
    return pickle.loads(data), descriptors


def serve(at):
    side = Side()
    while True:
        asked, descriptors = hear(at)
        if asked is None:
            return
        name, arguments, named = asked
        if descriptors:
            named["descriptors"] = descriptors
        try:
            result = getattr(side, name)(*arguments, **named)
        except Exception as error:  # The other side prints it.
            result = repr(error)
        tell(at, result)


def say(question, *answers):
    print(f"{question}: {', '.join(str(answer) for answer in answers)}", flush=True)


def native():
    # All processes come before the driver does in this one.
    importer, other, third, giver = Remote(), Remote(), Remote(), Remote()
    exporter = Side()
    say("start", exporter.start(), importer.start(), other.start())
    _, a = exporter.allocate(8 * MIB)
    exporter.fill(a, 8 * MIB, 7)
    result, handle = exporter.give(a)
    say("handle of a base", result)
    result, inner = exporter.give(a + 3 * MIB + 512)
    say("handle within; the same bytes", result, inner == handle)
    say("handle again; the same bytes", exporter.give(a)[1] == handle)
    say("handle of no memory, of address 0", exporter.give(a + (1 << 45))[0], exporter.give(0)[0])
    say("open in the exporter itself", exporter.open(handle)[0])
    result, b, took = importer.open(handle)
    say("open", result, f"{took:.2f} ms", "byte", importer.look(b))
    result, again, took = importer.open(handle)
    say("open twice; the same address", result, again == b, f"{took:.2f} ms")
    result, within, _ = importer.open(inner)
    say("open of the handle within: the base", result, within == b)
    say("flags 0, 2", importer.open(handle, 0)[0], importer.open(handle, 2)[0])
    say("free of opened memory", importer.free(b))
    say("handle of opened memory", importer.give(b)[0])
    say("attributes of the exporter's", exporter.attributes(a))
    say("attributes of the importer's", importer.attributes(b))
    say("close within, close of other memory", importer.close(b + MIB), importer.close(12345 << 20))
    say("close, close, close, close", [importer.close(b) for _ in range(5)])
    say("look after the closes", importer.look(b)[0])
    # The context of `importer` is lost from here on, if looking was an error that stays.
    third.start()
    say("forged handle", third.open(bytes(64))[0], third.open(bytes([255]) * 64)[0], third.open(handle[:-1] + b"\x55")[0])
    result, c, _ = third.open(handle)
    before = exporter.free_memory()
    say("free of shared memory by the exporter", exporter.free(a), "MiB that come back", exporter.free_memory() - before)
    say("look of the importer after that", third.look(c))
    say("open after the exporter's free", third.open(handle)[0], other.open(handle)[0])
    say("close after the exporter's free", third.close(c), "MiB that come back", exporter.free_memory() - before)
    giver.start()
    _, d = giver.allocate(64 * MIB)
    giver.fill(d, 64 * MIB, 9)
    _, shared = giver.give(d)
    result, e, _ = other.open(shared)
    say("open of another's", result)
    giver.kill()
    say("look after the exporter was killed", other.look(e))
    say("open after that by a third", third.open(shared)[0])
    say("close after that", other.close(e))
    for one in (third, other, importer):
        one.end()


def user():
    """Another user opens a handle."""
    exporter, stranger = Side(), Remote()
    exporter.start()
    _, a = exporter.allocate(8 * MIB)
    exporter.fill(a, 8 * MIB, 3)
    _, handle = exporter.give(a)
    stranger.become()
    say("another user: start, open", stranger.start(), stranger.open(handle)[:1])
    stranger.end()


def become(self):
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


Side.become = become


def mapped():
    importer, exporter = Remote(), Side()
    exporter.start()
    importer.start()
    for size, piece in ((64 * MIB, 2 * MIB), (1 * GIB, 2 * MIB), (1 * GIB, 32 * MIB), (1 * GIB, 1 * GIB), (8 * GIB, 64 * MIB), (8 * GIB, 1 * GIB)):
        made = exporter.make_pieces(size, piece)
        if isinstance(made, str):
            say(f"{size // MIB} MiB in {piece // MIB}", made)
            continue
        a, times, descriptors = made
        exporter.fill(a, size, 5)
        taken = importer.take_pieces(size, piece, descriptors=descriptors)
        if isinstance(taken, str):
            say(f"{size // MIB} MiB in {piece // MIB}: import", taken)
            continue
        b, imported = taken
        say(f"{size // MIB} MiB in pieces of {piece // MIB}: create, map, export in ms", times, "import, map, close", imported,
            "first and last byte", importer.look(b), importer.look(b + size - 1))
        before = exporter.free_memory()
        say("  exporter drops: results, unmap, release", *exporter.drop_pieces(), "MiB that come back", exporter.free_memory() - before)
        say("  importer still reads", importer.look(b), "and writes", importer.fill(b, size, 6))
        exporter.close_all(descriptors)
        say("  importer drops", *importer.drop_pieces(), "MiB that come back", exporter.free_memory() - before)


def more():
    """What the library would do: move data to an exportable piece at the same address; export again; import what was not made for it."""
    importer, importer_2, stranger, exporter = Remote(), Remote(), Remote(), Side()
    exporter.start()
    importer.start()
    size = GIB
    _, a = exporter.reserve(size)
    _, plain = exporter.create(size, exported=False)
    exporter.map(a, size, plain)
    exporter.fill(a, size, 8)
    say("export of memory not made for it", exporter.export(plain)[0])
    begun = time.perf_counter()
    _, side = exporter.reserve(size)
    made, handle = exporter.create(size)
    exporter.map(side, size, handle)
    copied = exporter.copy(side, a, size)
    exporter.unmap(a, size)
    exporter.unmap(side, size)
    again = exporter.map(a, size, handle)
    exporter.release(plain)
    say("1 GiB replaced at its address", made, copied, again, f"{(time.perf_counter() - begun) * 1e3:.2f} ms in all", exporter.look(a + size - 1))
    (one, first), (two, second) = exporter.export(handle), exporter.export(handle)
    say("export twice", one, two, first != second)
    _, h1 = exporter.take_in(first)
    say("import in the exporter; the same handle", h1 == handle, exporter.release(h1))
    taken = importer.take_pieces(size, size, descriptors=[first])
    b = taken[0]
    _, retained = retain(exporter, a)
    say("retain gives the handle", retained == handle, exporter.release(retained))
    say("attributes of an imported mapping", importer.attributes(b))
    say("IPC handle of exportable mapped memory", exporter.give(a)[0], "of an imported", importer.give(b)[0])
    say("export of an imported handle", importer.export_kept())
    # Both unmap, in two phases, and map anew what another made.
    kept = importer.drop_pieces(keep_addresses=True)
    exporter.unmap(a, size)
    exporter.release(handle)
    made, fresh = exporter.create(size)
    exporter.map(a, size, fresh)
    exporter.fill(a, size, 4)
    _, descriptor = exporter.export(fresh)
    say("mapped anew at the importer's address", importer.take_pieces(size, size, at=b, descriptors=[descriptor])[0] == b, importer.look(b))
    importer_2.start()
    taken = importer_2.take_pieces(size, size, descriptors=[descriptor])
    importer_2.kill()
    say("exporter and other importer after an importer's kill", exporter.look(a), importer.look(b))
    before = importer.free_memory()
    say("descriptor after the memory's end: exporter drops", exporter.unmap(a, size), exporter.release(fresh), "importer drops", importer.drop_pieces()[0])
    say("  import from the descriptor alone", exporter.take_in(descriptor)[0], "MiB come back", importer.free_memory() - before)
    bad = os.open("/dev/null", os.O_RDONLY)
    say("import of a foreign descriptor, of none", exporter.take_in(bad)[0], exporter.take_in(-1)[0])
    stranger.become()
    stranger.start()
    made, extra = exporter.create(2 * MIB)
    _, descriptor = exporter.export(extra)
    say("import by another user", stranger.take_pieces(2 * MIB, 2 * MIB, descriptors=[descriptor]))


def retain(side, at):
    handle = c_uint64()
    return call("cuMemRetainAllocationHandle", byref(handle), c_uint64(at)), handle.value


def export_kept(self):
    _, _, _, handles = self.kept["pieces"]
    return self.export(handles[0])[0]


Side.export_kept = export_kept


def peers():
    """Two cards: memory of card 0 is opened by a process whose context is on card 1."""
    importer, exporter = Remote(), Side()
    exporter.start(0)
    importer.start(1)
    say("card 0 and 1 reach each other", importer.peer(1))
    _, p = exporter.allocate(256 * MIB)
    exporter.fill(p, 256 * MIB, 2)
    result, q, took = importer.open(exporter.give(p)[1])
    say("CUDA IPC to another card", result, f"{took:.2f} ms", importer.look(q) if not result else "")
    a, times, descriptors = exporter.make_pieces(GIB, 32 * MIB)
    exporter.fill(a, GIB, 1)
    taken = importer.take_pieces(GIB, 32 * MIB, descriptors=descriptors, device=1)
    say("1 GiB in pieces of 32 MiB, imported on card 1: import, map, close", taken)
    if not isinstance(taken, str):
        b = taken[0]
        result, local = importer.allocate(GIB)
        say("copy from the other card: first, again", importer.copy(local, b, GIB), importer.copy(local, b, GIB), importer.look(local + GIB - 1))
        say("and to it", importer.copy(b, local, GIB))


PARTS = {part.__name__: part for part in (native, user, mapped, more, peers)}
if __name__ == "__main__":
    for name in sys.argv[1:] or ("native", "user", "mapped", "more"):
        pid = os.fork()
        if pid == 0:
            print(f"== {name}", flush=True)
            try:
                PARTS[name]()
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status:
            print(f"{name}: status {status}", flush=True)
