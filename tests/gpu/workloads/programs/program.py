"""What the programs of this folder share: when to skip, how time is taken, exact checksums, and the line that ends each.

No program may be named like a package that another one imports: this folder comes first in their search path."""
import contextlib, hashlib, importlib, json, os, sys, time
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
TIMES = {}

def skip(reason):
    print(json.dumps(dict(skipped=reason)), flush=True)
    sys.exit(0)

def need(*packages):
    """Imports what the program needs. Only a package that is not there is a reason to skip: one that fails to load is a failure."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            skip(f"no package {error.name}")
    TIMES["imported"] = time.time()

def steps(n):
    """WORK scales all programs: contended runs need longer ones."""
    return max(2, round(n * float(os.environ.get("WORK", 1))))

@contextlib.contextmanager
def work(wait):
    """Times the block from nothing in flight to nothing in flight; what came since the imports is set-up."""
    wait()
    begin = time.time()
    yield
    wait()
    TIMES.update(setup_s=round(begin - TIMES["imported"], 3), total_s=round(time.time() - begin, 3))

def digest(*arrays):
    """Of every byte and its place, since memory that moves could come back in the wrong place."""
    sha = hashlib.sha256()
    for a in arrays:
        if hasattr(a, "detach"): a = a.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
        elif hasattr(a, "get"): a = a.get()
        sha.update(a.tobytes())
    return sha.hexdigest()[:16]

def tell(check, ok=True, **more):
    print(json.dumps(dict(ok=bool(ok), check=check, total_s=TIMES["total_s"], setup_s=TIMES["setup_s"], **more)), flush=True)
    sys.exit(not ok)

def torch_once():
    """The same bits in every run on the same card."""
    import torch
    torch.manual_seed(1); torch.use_deterministic_algorithms(True); torch.utils.deterministic.fill_uninitialized_memory = False
    return torch

def mlp(width=4096, depth=8):
    """512 MiB of weights by default; 2 GiB with gradients and what Adam keeps."""
    nn = sys.modules["torch"].nn
    return nn.Sequential(*[l for _ in range(depth) for l in (nn.Linear(width, width, device="cuda"), nn.GELU())], nn.LayerNorm(width, device="cuda"))
