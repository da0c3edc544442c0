#!/usr/bin/env python3
"""Calls that may infer a context or a device from an address, natively and under the library with both kinds of memory: the answers have to be the same.

Each row is one call on one kind of memory, with no context named, the one in which the memory was allocated, or another of the card; where a call takes
no context, one of these is current. Needs a card and `dist/` (cargo dist-local). Every row goes to $OUT/inferred.txt. What differs and is not known
is printed, and the exit code is 1; a known difference that is gone is printed as well."""
import ctypes, os, pathlib, struct, subprocess, sys, tempfile
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = os.environ.get("LIBRARY", ROOT / "dist/lib/nvshare/libnvshare.so")
OUT = pathlib.Path(os.environ.get("OUT", tempfile.mkdtemp()))
# Words that each call fills or copies.
WORDS = 64
MEMORIES = ["allocated 1 KiB", "allocated 4 MiB", "allocated with a pitch", "allocated in stream order", "managed by the program", "created and mapped"]
# Where the answer is another one, by the beginning of the call: the reason.
MANAGED = "the memory is managed, and the driver takes what it takes for such"
KNOWN = {
    ("managed", "cuPointerGetAttribute(SYNC_MEMOPS)"): MANAGED,
    ("swap", "cuPointerGetAttribute(SYNC_MEMOPS)"): "memory in stream order is of a managed pool",
    ("managed", "cuStreamWriteValue32_v2"): "stream memory operations refuse managed memory (docs/reference.md)",
    ("managed", "cuStreamWaitValue32_v2"): "stream memory operations refuse managed memory (docs/reference.md)",
    ("managed", "cuStreamAttachMemAsync"): MANAGED,
    ("managed", "cuMemPrefetch"): MANAGED,
    ("managed", "cuMemAdvise"): MANAGED,
    ("swap", "cuMemPrefetch"): "memory in stream order is of a managed pool",
    ("swap", "cuMemAdvise"): "memory in stream order is of a managed pool",
}
MODES = {"natively": {}, "managed": {"NVSHARE_MEMORY": "managed"}, "swap": {"NVSHARE_MEMORY": "swap"}}


class Card:
    """The driver, two contexts of the first card, and one kind of memory that belongs to the first of them."""

    def __init__(self, memory):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.must("cuInit", 0)
        own, other, stream = c_void_p(), c_void_p(), c_void_p()
        self.must("cuDevicePrimaryCtxRetain", byref(own), 0)
        self.must("cuCtxCreate_v2", byref(other), 0, 0)
        self.contexts = {"none": c_void_p(), "its own": own, "another": other}
        self.use("its own")
        self.must("cuStreamCreate", byref(stream), 1)
        self.stream = stream
        self.at, self.from_ = (self.allocate(memory) for _ in range(2))

    def call(self, name, *arguments):
        try:
            return getattr(self.driver, name)(*arguments)
        except AttributeError:
            return "absent"

    def must(self, name, *arguments):
        if answer := self.call(name, *arguments):
            raise SystemExit(f"{name}: {answer}")

    def use(self, context):
        self.must("cuCtxSetCurrent", self.contexts[context])

    def allocate(self, memory):
        place, pitch, handle = c_uint64(), c_size_t(), c_uint64()
        card, access = (c_int * 8)(1, 0, 1, 0), (c_int * 3)(1, 0, 3)
        if memory == "allocated 1 KiB":
            self.must("cuMemAlloc_v2", byref(place), c_size_t(1 << 10))
        elif memory == "allocated 4 MiB":
            self.must("cuMemAlloc_v2", byref(place), c_size_t(4 << 20))
        elif memory == "allocated with a pitch":
            self.must("cuMemAllocPitch_v2", byref(place), byref(pitch), c_size_t(1000), c_size_t(64), 4)
        elif memory == "allocated in stream order":
            self.must("cuMemAllocAsync", byref(place), c_size_t(1 << 20), self.stream)
        elif memory == "managed by the program":
            self.must("cuMemAllocManaged", byref(place), c_size_t(1 << 20), 1)
        else:
            self.must("cuMemAddressReserve", byref(place), c_size_t(4 << 20), c_size_t(0), c_uint64(0), c_uint64(0))
            self.must("cuMemCreate", byref(handle), c_size_t(4 << 20), card, c_uint64(0))
            self.must("cuMemMap", place, c_size_t(4 << 20), c_size_t(0), handle, c_uint64(0))
            self.must("cuMemSetAccess", place, c_size_t(4 << 20), access, c_size_t(1))
        self.must("cuStreamSynchronize", self.stream)
        return place

    def begin(self):
        """The words before each row: 5 where it works, 6 where it copies from."""
        self.use("its own")
        self.must("cuMemsetD32_v2", self.at, 5, c_size_t(WORDS))
        self.must("cuMemsetD32_v2", self.from_, 6, c_size_t(WORDS))
        self.must("cuCtxSynchronize")

    def words(self):
        """What the words are after all work, or the error that ended it."""
        for context in ("another", "its own"):
            self.use(context)
            self.call("cuCtxSynchronize")
        words = (c_uint * WORDS)()
        for name, arguments in (("cuCtxSynchronize", ()), ("cuMemcpyDtoH_v2", (words, self.at, c_size_t(4 * WORDS)))):
            if answer := self.call(name, *arguments):
                return f"error {answer}"
        return " ".join(map(str, sorted(set(words))))

    def name_of(self, context):
        return next((name for name, known in self.contexts.items() if (known.value or 0) == context), "unknown")


def fill(at, value):
    """`CUDA_MEMSET_NODE_PARAMS`"""
    return struct.pack("=QQIIQQ", at.value, 4 * WORDS, value, 4, WORDS, 1)


def copy(to, from_):
    """`CUDA_MEMCPY3D`, from one address to another."""
    end = lambda at: struct.pack("=QQQQQQQQQQQ", 0, 0, 0, 0, 2, 0, at.value, 0, 0, 4 * WORDS, 1)
    return end(from_) + end(to) + struct.pack("=QQQ", 4 * WORDS, 1, 1)


def node(kind, body):
    """`CUgraphNodeParams`"""
    return ctypes.create_string_buffer(struct.pack("=iiii", kind, 0, 0, 0) + body.ljust(240, b"\0"), 256)


COPY, FILL = 1, 2
fill_node = lambda card, context, value: node(FILL, fill(card.at, value) + struct.pack("=Q", context.value or 0))
copy_node = lambda card, context: node(COPY, struct.pack("=iiQ", 0, 0, context.value or 0) + copy(card.at, card.from_))


class Graph:
    """A graph of one node, and the answers so far."""

    def __init__(self, card):
        self.card, self.graph, self.node, self.exec = card, c_void_p(), c_void_p(), c_void_p()
        self.answers = []
        self.say("cuGraphCreate", byref(self.graph), 0)

    def say(self, name, *arguments):
        self.answers.append(self.card.call(name, *arguments))
        return self

    def add_fill(self, context):
        return self.say("cuGraphAddMemsetNode", byref(self.node), self.graph, None, c_size_t(0), fill(self.card.at, 7), context)

    def add_copy(self, context):
        return self.say("cuGraphAddMemcpyNode", byref(self.node), self.graph, None, c_size_t(0), copy(self.card.at, self.card.from_), context)

    def add(self, params):
        return self.say("cuGraphAddNode", byref(self.node), self.graph, None, c_size_t(0), params)

    def instantiate(self):
        return self.say("cuGraphInstantiateWithFlags", byref(self.exec), self.graph, c_uint64(0))

    def run(self):
        """All answers, and the words after the graph has run."""
        if not any(self.answers) and not self.exec:
            self.instantiate()
        if not any(self.answers):
            self.say("cuGraphLaunch", self.exec, self.card.stream)
        return *self.answers, self.card.words()


def attribute(card, which, size):
    place = (ctypes.c_ubyte * size)()
    answer = card.call("cuPointerGetAttribute", place, which, card.at)
    value = int.from_bytes(place, "little")
    return answer, (card.name_of(value) if which == 1 else value) if answer == 0 else None


def attributes(card):
    context, ordinal, kind = c_uint64(), c_int(-1), c_uint()
    places = (c_void_p * 3)(*(ctypes.cast(byref(p), c_void_p) for p in (context, ordinal, kind)))
    answer = card.call("cuPointerGetAttributes", 3, (c_int * 3)(1, 9, 2), places, card.at)
    return answer, card.name_of(context.value), ordinal.value, kind.value


def batch(card, name, *failed):
    to, from_, sizes = (c_uint64 * 1)(card.at.value), (c_uint64 * 1)(card.from_.value), (c_size_t * 1)(4 * WORDS)
    here = (c_int * 6)(1, 1, 0, 1, 0, 0)
    return card.call(name, to, from_, sizes, c_size_t(1), here, (c_size_t * 1)(0), c_size_t(1), *failed, card.stream), card.words()


def prefetch_batch(card):
    return card.call("cuMemPrefetchBatchAsync", (c_uint64 * 1)(card.at.value), (c_size_t * 1)(4 * WORDS), c_size_t(1), (c_int * 2)(1, 0), (c_size_t * 1)(0), c_size_t(1), c_uint64(0), card.stream), card.words()


def texture(card):
    """A linear texture of 32-bit words."""
    resource = ctypes.create_string_buffer(struct.pack("=iiQiIQ", 2, 0, card.at.value, 0x03, 1, 4 * WORDS), 144)
    sampling, place = ctypes.create_string_buffer(104), c_uint64()
    answer = card.call("cuTexObjectCreate", byref(place), resource, sampling, None)
    return answer, card.call("cuTexObjectDestroy", place) if answer == 0 else None


# `CUmemLocation`, which is handed over as one word: the type is 1, the card is the first.
THIS_CARD = c_uint64(1)
work = lambda name, *arguments: lambda card: (card.call(name, *(a(card) if callable(a) else a for a in arguments)), card.words())
at, from_, stream, bytes_ = (lambda card: card.at), (lambda card: card.from_), (lambda card: card.stream), c_size_t(4 * WORDS)

# A call that names a context, or none.
NAMING = {
    "cuGraphAddMemsetNode": lambda card, context: Graph(card).add_fill(context).run(),
    "cuGraphAddMemcpyNode": lambda card, context: Graph(card).add_copy(context).run(),
    "cuGraphAddNode, a fill": lambda card, context: Graph(card).add(fill_node(card, context, 8)).run(),
    "cuGraphAddNode, a copy": lambda card, context: Graph(card).add(copy_node(card, context)).run(),
    "cuGraphNodeSetParams, a fill": lambda card, context: (lambda g: g.say("cuGraphNodeSetParams", g.node, fill_node(card, context, 9)).run())(Graph(card).add_fill(card.contexts["its own"])),
    "cuGraphNodeSetParams, a copy": lambda card, context: (lambda g: g.say("cuGraphNodeSetParams", g.node, copy_node(card, context)).run())(Graph(card).add_copy(card.contexts["its own"])),
    "cuGraphExecMemsetNodeSetParams": lambda card, context: (lambda g: g.say("cuGraphExecMemsetNodeSetParams", g.exec, g.node, fill(card.at, 10), context).run())(Graph(card).add_fill(card.contexts["its own"]).instantiate()),
    "cuGraphExecMemcpyNodeSetParams": lambda card, context: (lambda g: g.say("cuGraphExecMemcpyNodeSetParams", g.exec, g.node, copy(card.at, card.from_), context).run())(Graph(card).add_copy(card.contexts["its own"]).instantiate()),
    "cuGraphExecNodeSetParams, a fill": lambda card, context: (lambda g: g.say("cuGraphExecNodeSetParams", g.exec, g.node, fill_node(card, context, 11)).run())(Graph(card).add_fill(card.contexts["its own"]).instantiate()),
    "cuGraphExecNodeSetParams, a copy": lambda card, context: (lambda g: g.say("cuGraphExecNodeSetParams", g.exec, g.node, copy_node(card, context)).run())(Graph(card).add_copy(card.contexts["its own"]).instantiate()),
    "cuMemcpyPeer": lambda card, context: (card.call("cuMemcpyPeer", card.at, context, card.from_, context, bytes_), card.words()),
    "cuMemcpyPeerAsync": lambda card, context: (card.call("cuMemcpyPeerAsync", card.at, context, card.from_, card.contexts["its own"], bytes_, card.stream), card.words()),
}
# A call that names none; the context is current.
CURRENT = {
    "cuGraphMemsetNodeSetParams": lambda card: (lambda g: g.say("cuGraphMemsetNodeSetParams", g.node, fill(card.at, 12)).run())(Graph(card).add_fill(card.contexts["its own"])),
    "cuGraphMemcpyNodeSetParams": lambda card: (lambda g: g.say("cuGraphMemcpyNodeSetParams", g.node, copy(card.at, card.from_)).run())(Graph(card).add_copy(card.contexts["its own"])),
    "cuPointerGetAttribute(CONTEXT)": lambda card: attribute(card, 1, 8),
    "cuPointerGetAttribute(MEMORY_TYPE)": lambda card: attribute(card, 2, 4),
    "cuPointerGetAttribute(DEVICE_ORDINAL)": lambda card: attribute(card, 9, 4),
    "cuPointerGetAttribute(IS_MANAGED)": lambda card: attribute(card, 8, 4),
    "cuPointerGetAttribute(SYNC_MEMOPS)": lambda card: attribute(card, 6, 4),
    "cuPointerGetAttributes": attributes,
    "cuMemsetD32_v2": work("cuMemsetD32_v2", at, 13, c_size_t(WORDS)),
    "cuMemsetD32Async": work("cuMemsetD32Async", at, 14, c_size_t(WORDS), None),
    "cuMemcpyDtoD_v2": work("cuMemcpyDtoD_v2", at, from_, bytes_),
    "cuMemcpyDtoDAsync_v2": work("cuMemcpyDtoDAsync_v2", at, from_, bytes_, None),
    "cuMemcpy": work("cuMemcpy", at, from_, bytes_),
    "cuMemcpyAsync": work("cuMemcpyAsync", at, from_, bytes_, None),
    "cuMemcpyAsync in its own stream": work("cuMemcpyAsync", at, from_, bytes_, stream),
    "cuMemcpyBatchAsync": lambda card: batch(card, "cuMemcpyBatchAsync", byref(c_size_t())),
    "cuMemcpyBatchAsync_v2": lambda card: batch(card, "cuMemcpyBatchAsync_v2"),
    "cuMemcpy3D_v2": lambda card: (card.call("cuMemcpy3D_v2", copy(card.at, card.from_)), card.words()),
    "cuStreamWriteValue32_v2": work("cuStreamWriteValue32_v2", stream, at, 15, 0),
    "cuStreamWaitValue32_v2": work("cuStreamWaitValue32_v2", stream, at, 5, 1),
    "cuMemPrefetchAsync": work("cuMemPrefetchAsync", at, bytes_, 0, stream),
    "cuMemPrefetchAsync_v2": work("cuMemPrefetchAsync_v2", at, bytes_, THIS_CARD, 0, stream),
    "cuMemPrefetchBatchAsync": prefetch_batch,
    "cuMemAdvise": work("cuMemAdvise", at, bytes_, 3, 0),
    "cuMemAdvise_v2": work("cuMemAdvise_v2", at, bytes_, 3, THIS_CARD),
    "cuStreamAttachMemAsync": work("cuStreamAttachMemAsync", stream, at, c_size_t(0), 1),
    "cuTexObjectCreate, linear": texture,
}


def run(memory):
    """Prints a row for each call, as they come: one that ends the process leaves those before it."""
    card = Card(memory)
    for context in card.contexts:
        for name, call in NAMING.items():
            card.begin()
            print(f"{name} | {context} named | {call(card, card.contexts[context])}", flush=True)
        for name, call in CURRENT.items():
            card.begin()
            card.use(context)
            print(f"{name} | {context} current | {call(card)}", flush=True)
    sys.stdout.flush()
    os._exit(0)


def rows(memory, mode):
    environment = dict(os.environ, **MODES[mode], NVSHARE_LOG="warn", NVSHARE_SOCKET="/nonexistent")
    if mode != "natively":
        environment["LD_PRELOAD"] = str(LIBRARY)
    done = subprocess.run([sys.executable, __file__, "--only", memory], env=environment, capture_output=True, text=True, timeout=120)
    split = (line.rpartition(" | ") for line in done.stdout.splitlines())
    return {key: answer for key, _, answer in split}, done


def known(mode, call):
    return next((key for key in KNOWN if key[0] == mode and call.startswith(key[1])), None)


def main():
    different, count, met = 0, 0, set()
    with open(OUT / "inferred.txt", "w") as out:
        for memory in MEMORIES:
            answers = {mode: rows(memory, mode) for mode in MODES}
            for mode, (_, done) in answers.items():
                if done.returncode:
                    different += 1
                    print(f"{memory}, {mode}: ended with {done.returncode}: {done.stderr[-600:]}", flush=True)
            natively = answers.pop("natively")[0]
            for call, native in natively.items():
                each = {mode: answers[mode][0].get(call, "not reached") for mode in answers}
                count += 1
                print(f"{memory} | {call} | {native} | {each}", file=out, flush=True)
                for mode, answer in each.items():
                    key = known(mode, call)
                    if answer != native and key:
                        met.add(key)
                    elif answer != native:
                        different += 1
                        print(f"{memory} | {call} | natively {native} | {mode} {answer}", flush=True)
    for mode, call in sorted(set(KNOWN) - met):
        print(f"{call}, {mode}: the known difference is gone: {KNOWN[mode, call]}")
    print(f"{count} calls, each natively and with both kinds of memory; {len(met)} known differences; {different} others with another answer than the driver's")
    sys.exit(different > 0)


if __name__ == "__main__":
    run(sys.argv[2]) if sys.argv[1:2] == ["--only"] else main()
