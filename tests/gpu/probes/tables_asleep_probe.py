#!/usr/bin/env python3
"""Which functions of the driver's private tables (cuGetExportTable) the CUDA runtime calls, awake and while its process is off the card.

usage: tables_asleep_probe.py [OPERATION...]      one process and one line for each. Needs PyTorch, x86-64, CUDA 12.8 or later; without nvshare.
Each entry of the tables is replaced by code that notes its number and jumps on. `awake` and `asleep` are the notes of one operation of PyTorch.
"""
import ctypes as C, mmap, os, struct, subprocess, sys, threading

TABLES = dict(cudart="6bd5fb6c5bf4e74a8987d93912fd9df9", storage="c693336e1121df11a8c368f355d89593", tls="42d85a8123f6cb478298f6e78a3aecdc",
              hooks="a094798c2e742e7493f20800200c0a66", heap="195bcbf4d67d024aacc51d29cea631ae", device="b10541e1f7c7c74a9f64f223be99f1e2", bypass="0ca50b8c1004929a89a7d0df10e77286")
D, P, NOTES = C.CDLL("libcuda.so.1"), C.c_void_p, "/tmp/notes-of-tables"


def step(name, word=0):
    return getattr(D, "cuCheckpointProcess" + name)(os.getpid(), (C.c_uint64 * 8)(word))


def watch(notes):
    """Replaces the entries of all tables. Returns their names by number."""
    at = C.addressof(C.c_char.from_buffer(notes))
    global code  # it outlives this function
    code = mmap.mmap(-1, 1 << 16, prot=7)
    begin = C.addressof(C.c_char.from_buffer(code))
    ranges = [tuple(int(x, 16) for x in l.split()[0].split("-")) for l in open("/proc/self/maps") if "libcuda.so" in l and "x" in l.split()[1]]
    names = []
    for name, uuid in TABLES.items():
        table = P()
        if D.cuGetExportTable(C.byref(table), bytes.fromhex(uuid)) or not table.value:
            continue
        words = (C.c_uint64 * 64).from_address(table.value)
        count = words[0] // 8 if words[0] < 512 else 4
        C.CDLL(None).mprotect(P(table.value & ~4095), 8192, 3)
        for i in range(count):
            if not any(a <= words[i] < b for a, b in ranges):
                continue
            p = struct.pack
            text = b"\x49\xbb" + p("<Q", at) + b"\x41\xba\1\0\0\0\xf0\x4d\x0f\xc1\x13\x49\x81\xe2\xff\x3f\0\0\x49\xbb" + p("<Q", at + 8)
            text += b"\x66\x43\xc7\x04\x53" + p("<H", len(names)) + b"\x49\xbb" + p("<Q", words[i]) + b"\x41\xff\xe3"
            code.seek(64 * len(names)), code.write(text)
            words[i] = begin + 64 * len(names)
            names.append(f"{name}{i}")
    return names


def child(operation):
    import torch
    notes = mmap.mmap(os.open(NOTES, os.O_RDWR), 1 << 16)
    x, e, s, g = torch.ones(1024, device="cuda"), torch.cuda.Event(), torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    x.add_(1), e.record(), torch.cuda.synchronize()
    with torch.cuda.graph(g):
        x.add_(1)
    g.replay(), x.sum().item(), torch.cuda.mem_get_info()
    do = dict(add=lambda: x.add_(1), info=torch.cuda.mem_get_info, event=e.query, stream=s.query, sync=torch.cuda.synchronize, item=lambda: x[0].item(), record=e.record, new=x.cosh,
              replay=g.replay, allocate=lambda: torch.empty(1 << 28, device="cuda"), streams=lambda: torch.cuda.Stream(), wait=s.synchronize, device=lambda: torch.cuda.set_device(0))[operation]
    names = watch(notes)
    seen = lambda: [names[n] for n in struct.unpack(f"<{struct.unpack('<Q', notes[:8])[0]}H", notes[8:8 + 2 * struct.unpack('<Q', notes[:8])[0]])]
    if operation != "new":
        do()
        torch.cuda.synchronize()
    notes[:8] = bytes(8)
    if operation != "new":
        do()
    print(operation, "awake", seen(), end=" ", flush=True)
    torch.cuda.synchronize()
    print("lock, checkpoint", step("Lock", 9000), step("Checkpoint"), end=" ", flush=True)
    notes[:8] = bytes(8)
    said = []

    def work():
        try:
            said.append(str(do())[:40])
        except Exception as error:
            said.append(str(error)[:60])
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(1.5)
    print("asleep", seen(), said or "waits", end=" ", flush=True)
    print("restore, unlock", step("Restore"), step("Unlock"), end=" ", flush=True)
    thread.join(5)
    print("then", said, float(x[1]), flush=True)
    os._exit(0)


if sys.argv[1:2] == ["--child"]:
    child(sys.argv[2])
for operation in sys.argv[1:] or ["add", "info", "event", "stream", "sync", "item", "record", "new", "replay", "allocate", "streams", "wait", "device"]:
    open(NOTES, "wb").write(bytes(1 << 16))
    ran = subprocess.run([sys.executable, __file__, "--child", operation], stdout=subprocess.PIPE, text=True, timeout=90)
    count = struct.unpack("<Q", open(NOTES, "rb").read(8))[0]
    print(ran.stdout.strip(), "" if ran.returncode == 0 else f"ENDED {ran.returncode} after {count} notes", flush=True)
