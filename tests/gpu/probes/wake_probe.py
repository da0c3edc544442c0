#!/usr/bin/env python3
"""PyTorch goes off the card and is woken by whatever call of the driver comes next (wake_probe.c): which one, how long, is every result right.

usage: wake_probe.py        needs gcc, nm, PyTorch, x86-64, CUDA 12.8 or later; without nvshare. One line for each operation.
"""
import ctypes, os, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))


def build(folder):
    """The library with a thunk for each function that the driver exports. Returns its path."""
    ctypes.CDLL("libcuda.so.1")
    driver = next(line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line)
    lines = subprocess.run(["nm", "-D", "--defined-only", driver], capture_output=True, text=True).stdout.split("\n")
    names = sorted({l.split()[-1].split("@")[0] for l in lines if " T " in l and l.split()[-1].startswith("cu")})
    keep = ["rdi", "rsi", "rdx", "rcx", "r8", "r9", "rax"]
    save = "".join(f"mov [rsp+{8 * i}],{r}\n" for i, r in enumerate(keep)) + "".join(f"movups [rsp+{64 + 16 * i}],xmm{i}\n" for i in range(8))
    load = "".join(f"mov {r},[rsp+{8 * i}]\n" for i, r in enumerate(keep)) + "".join(f"movups xmm{i},[rsp+{64 + 16 * i}]\n" for i in range(8))
    text = f".intel_syntax noprefix\n.text\nslow:\npush rbp\nmov rbp,rsp\nsub rsp,192\n{save}mov rdi,r11\ncall arrive@PLT\nmov r11,rax\n{load}leave\njmp r11\n"
    for i, name in enumerate(names):
        text += f".globl {name}\n{name}:\nmov r11,[rip+thunk_reals+{8 * i}]\ntest r11,r11\njz 2f\ncmp dword ptr [rip+door],0\njne 2f\njmp r11\n2: mov r11,{i}\njmp slow\n"
    text += ".data\n.globl thunk_reals,thunk_places,thunk_names,thunk_count\n.hidden thunk_reals,door\nthunk_reals: .zero " + str(8 * len(names)) + "\nthunk_places:\n" + "".join(f".quad {n}\n" for n in names)
    text += "thunk_names:\n" + "".join(f".quad s{i}\n" for i in range(len(names))) + f"thunk_count: .long {len(names)}\n" + "".join(f's{i}: .asciz "{n}"\n' for i, n in enumerate(names))
    open(f"{folder}/thunks.s", "w").write(text + '.section .note.GNU-stack,"",@progbits\n')
    path = f"{folder}/wake.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-z,notext", "-o", path, f"{HERE}/wake_probe.c", f"{folder}/thunks.s", "-ldl", "-lpthread"], check=True)
    return path


def used():
    return int(subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True).stdout.split()[0])


def program(path):
    import torch
    library = ctypes.CDLL(path)
    text, number = lambda name: ctypes.c_char_p.in_dll(library, name).value.decode(), lambda name: ctypes.c_double.in_dll(library, name).value
    words = torch.arange(1 << 24, dtype=torch.int64, device="cuda")
    total, square = int(words.sum()), torch.randn(1024, 1024, device="cuda")
    product = float((square @ square).sum())
    state, graph, event, stream = torch.zeros(1024, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Event(), torch.cuda.Stream()
    state.add_(1), event.record(), torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        state.add_(1)
    count = [1]

    def replay():
        graph.replay()
        count[0] += 1
    operations = dict(
        add=lambda: square.add_(0), info=torch.cuda.mem_get_info, event=event.query, stream=stream.query, synchronize=torch.cuda.synchronize, item=lambda: words[5].item(),
        record=event.record, wait=stream.synchronize, replay=replay, product=lambda: square @ square, allocate=lambda: torch.empty(1 << 28, device="cuda"), elapsed=event.synchronize,
        free=torch.cuda.empty_cache, new=lambda: square.cosh(), copy=lambda: square.cpu(), to=lambda: torch.ones(1 << 20).cuda(), pinned=lambda: torch.empty(1 << 20, pin_memory=True),
        streams=lambda: torch.cuda.Stream(priority=-1).synchronize(), device=lambda: torch.cuda.set_device(0), properties=lambda: torch.cuda.get_device_properties(0))
    for name, operation in list(operations.items()) * 2:
        torch.cuda.synchronize()
        before = used()
        answer = library.go_to_sleep()
        asleep = used()
        time.sleep(0.05)
        begin = time.perf_counter()
        operation()
        took, by, was = time.perf_counter() - begin, text("woken_by"), bool(library.is_away())
        right = int(words.sum()) == total and float((square @ square).sum()) == product and float(state[7]) == count[0]
        print(f"{name}: answer {answer}, {before} MiB, asleep {asleep}, out {number('slept_s'):.2f} s, {'still asleep after it, then ' if was else ''}woken by {text('woken_by') if was else by}, "
              f"in {number('woke_s'):.2f} s, the call {took:.2f} s, right {right}", flush=True)
        if not right:
            sys.exit(1)


if sys.argv[1:2] == ["--program"]:
    program(sys.argv[2])
else:
    path = build(tempfile.mkdtemp())
    ended = subprocess.run([sys.executable, __file__, "--program", path], env=dict(os.environ, LD_PRELOAD=path))
    print("ended", ended.returncode)
