// A call that names an address whose memory is parked: an error, or a wrong graph? Each call x {mapped, reserved but not mapped, mapped
// without cuMemSetAccess} x {no capture, a capture of each mode}. What a capture or a graph took is replayed when the memory is back.
// Each state and mode, and each call that could end its context, is a process of its own.
// c++ -std=c++17 -O2 -I $CUDA/include -o unmapped_probe unmapped_probe.cpp -lcuda
#include <sys/wait.h>
#include <unistd.h>
#include <functional>
#include "swap_probe.h"

static const char *const STATES[] = {"mapped", "reserved", "no access"};
static const char *const MODES[] = {"none", "global", "thread-local", "relaxed"};
static const size_t N = 4 * MIB;

static CUDA_MEMCPY3D copy(CUdeviceptr to, CUdeviceptr from) { CUDA_MEMCPY3D c; memset(&c, 0, sizeof c); c.srcMemoryType = c.dstMemoryType = CU_MEMORYTYPE_DEVICE; c.srcDevice = from; c.dstDevice = to; c.WidthInBytes = N; c.Height = c.Depth = 1; return c; }

struct World {
  Card card; Range range{N}, other{N}, third{N}; unsigned *host; int state;
  explicit World(int s) : state(s) { other.map(); third.map(); D(cuMemHostAlloc((void **)&host, N, 0)); park(); }
  void park() { if (range.mapped) range.unmap(); if (state == 0) range.map(); if (state == 2) range.map(false); }
  // The memory is back, with this value in each word; the other one has another value.
  void back() { if (range.mapped) range.unmap(); range.map(); D(cuMemsetD32(range.at, 1000, N / 4)); D(cuMemsetD32(other.at, 7, N / 4)); for (size_t i = 0; i < N / 4; i++) host[i] = 500; D(cuCtxSynchronize()); }
  // Whether all words of the memory, of the other one, and of the host are these; zero: not looked at.
  std::string holds(unsigned r, unsigned o, unsigned h) {
    std::string wrong; std::vector<unsigned> v(N / 4);
    auto look = [&](const char *what, unsigned want) { for (auto x : v) if (x != want) { wrong += std::string(" ") + what + " has " + std::to_string(x) + " for " + std::to_string(want); return; } };
    if (r) { D(cuMemcpyDtoH(v.data(), range.at, N)); look("memory", r); }
    if (o) { D(cuMemcpyDtoH(v.data(), other.at, N)); look("other", o); }
    if (h) { v.assign(host, host + N / 4); look("host", h); }
    return wrong.empty() ? "right" : "WRONG:" + wrong;
  }
};

// Stream-ordered calls, and what holds after them.
struct Ordered { const char *what; std::function<CUresult(World &, CUstream)> call; unsigned r, o, h; };
static const std::vector<Ordered> ORDERED = {
  {"cuMemcpyDtoHAsync from it", [](World &w, CUstream s) { return cuMemcpyDtoHAsync(w.host, w.range.at, N, s); }, 1000, 0, 1000},
  {"cuMemcpyHtoDAsync to it", [](World &w, CUstream s) { return cuMemcpyHtoDAsync(w.range.at, w.host, N, s); }, 500, 0, 0},
  {"cuMemcpyDtoDAsync from it", [](World &w, CUstream s) { return cuMemcpyDtoDAsync(w.other.at, w.range.at, N, s); }, 1000, 1000, 0},
  {"cuMemcpyDtoDAsync to it", [](World &w, CUstream s) { return cuMemcpyDtoDAsync(w.range.at, w.other.at, N, s); }, 7, 7, 0},
  {"cuMemcpyAsync from it to the host", [](World &w, CUstream s) { return cuMemcpyAsync((CUdeviceptr)w.host, w.range.at, N, s); }, 1000, 0, 1000},
  {"cuMemcpy3DAsync from it", [](World &w, CUstream s) { CUDA_MEMCPY3D c = copy(w.other.at, w.range.at); return cuMemcpy3DAsync(&c, s); }, 1000, 1000, 0},
  {"cuMemcpy2DAsync to it", [](World &w, CUstream s) { CUDA_MEMCPY2D c; memset(&c, 0, sizeof c); c.srcMemoryType = c.dstMemoryType = CU_MEMORYTYPE_DEVICE; c.srcDevice = w.other.at; c.dstDevice = w.range.at; c.srcPitch = c.dstPitch = 4096; c.WidthInBytes = 4096; c.Height = N / 4096; return cuMemcpy2DAsync(&c, s); }, 7, 7, 0},
  {"cuMemsetD32Async", [](World &w, CUstream s) { return cuMemsetD32Async(w.range.at, 42, N / 4, s); }, 42, 0, 0},
  {"cuMemsetD2D32Async", [](World &w, CUstream s) { return cuMemsetD2D32Async(w.range.at, 4096, 42, 1024, N / 4096, s); }, 42, 0, 0},
  {"kernel launch", [](World &w, CUstream s) { return w.card.run_add(w.range.at, N / 4, s); }, 1001, 0, 0},
  {"cuStreamWriteValue32", [](World &w, CUstream s) { return cuStreamWriteValue32(s, w.range.at, 1000, 0); }, 1000, 0, 0},
};

static void say(const World &w, int mode, const char *what, const std::string &answer) { printf("{\"state\":\"%s\",\"capture\":\"%s\",\"call\":\"%s\",\"answer\":\"%s\"}\n", STATES[w.state], MODES[mode], what, answer.c_str()); fflush(stdout); }

static std::string replay(World &w, CUgraph g, const Ordered &c) {
  CUgraphExec x; CUresult early = cuGraphInstantiate(&x, g, 0); std::string text = "; instantiated while parked " + name(early);
  if (early) { w.back(); CUresult late = cuGraphInstantiate(&x, g, 0); text += ", when back " + name(late); if (late) return text; } else w.back();
  CUresult l = cuGraphLaunch(x, w.card.stream), s = cuStreamSynchronize(w.card.stream); text += "; replay " + name(l) + " " + name(s);
  if (!l && !s) text += " " + w.holds(c.r, c.o, c.h);
  cuGraphExecDestroy(x); return text;
}

static void captured(World &w, int mode, const Ordered &c) {
  w.park(); CUstream s = w.card.stream; D(cuStreamBeginCapture(s, (CUstreamCaptureMode)(mode - 1))); CUresult r = c.call(w, s); CUgraph g = nullptr; CUresult e = cuStreamEndCapture(s, &g);
  std::string text = name(r) + "; capture ends " + name(e); if (!r && !e && g) text += replay(w, g, c); if (g) cuGraphDestroy(g); say(w, mode, c.what, text);
}

// Not in a capture: while the memory is parked. An error may end the context.
static void alone(World &w, const Ordered &c) {
  w.park(); if (w.state == 0) w.back(); CUresult r = c.call(w, w.card.stream), s = cuStreamSynchronize(w.card.stream); say(w, 0, c.what, name(r) + "; stream " + name(s) + (r || s || w.state ? "" : " " + w.holds(c.r, c.o, c.h)));
}

// Calls that ask, and calls that build graphs, alone or beside the thread's own capture.
static void others(World &w, int mode) {
  auto with = [&](const char *what, const std::function<std::string()> &call) { w.park(); CUgraph cap = nullptr; CUstream s; D(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING)); if (mode) { D(cuStreamBeginCapture(s, (CUstreamCaptureMode)(mode - 1))); D(w.card.run_spin(0, s)); } std::string text = call(); if (mode) { CUresult e = cuStreamEndCapture(s, &cap); text += "; capture ends " + name(e); if (cap) cuGraphDestroy(cap); } D(cuStreamDestroy(s)); say(w, mode, what, text); };
  with("cuPointerGetAttribute", [&] { std::string t; struct { const char *n; CUpointer_attribute a; } all[] = {{"CONTEXT", CU_POINTER_ATTRIBUTE_CONTEXT}, {"MEMORY_TYPE", CU_POINTER_ATTRIBUTE_MEMORY_TYPE}, {"DEVICE_POINTER", CU_POINTER_ATTRIBUTE_DEVICE_POINTER}, {"HOST_POINTER", CU_POINTER_ATTRIBUTE_HOST_POINTER}, {"P2P_TOKENS", CU_POINTER_ATTRIBUTE_P2P_TOKENS}, {"SYNC_MEMOPS", CU_POINTER_ATTRIBUTE_SYNC_MEMOPS}, {"BUFFER_ID", CU_POINTER_ATTRIBUTE_BUFFER_ID}, {"IS_MANAGED", CU_POINTER_ATTRIBUTE_IS_MANAGED}, {"DEVICE_ORDINAL", CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL}, {"IS_LEGACY_CUDA_IPC_CAPABLE", CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE}, {"RANGE_START_ADDR", CU_POINTER_ATTRIBUTE_RANGE_START_ADDR}, {"RANGE_SIZE", CU_POINTER_ATTRIBUTE_RANGE_SIZE}, {"MAPPED", CU_POINTER_ATTRIBUTE_MAPPED}, {"ALLOWED_HANDLE_TYPES", CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES}, {"IS_GPU_DIRECT_RDMA_CAPABLE", CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE}, {"ACCESS_FLAGS", CU_POINTER_ATTRIBUTE_ACCESS_FLAGS}, {"MEMPOOL_HANDLE", CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE}, {"MAPPING_SIZE", CU_POINTER_ATTRIBUTE_MAPPING_SIZE}, {"MAPPING_BASE_ADDR", CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR}, {"MEMORY_BLOCK_ID", CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID}};
    for (auto &a : all) { unsigned long long v[8] = {}; CUresult r = cuPointerGetAttribute(v, a.a, w.range.at + 4096); char b[96]; snprintf(b, sizeof b, "%s %s=%#llx, ", a.n, name(r).c_str(), v[0]); t += b; } return t; });
  with("cuPointerGetAttributes", [&] { CUpointer_attribute a[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_IS_MANAGED}; unsigned long long v[3] = {9, 9, 9}; void *p[] = {&v[0], &v[1], &v[2]}; CUresult r = cuPointerGetAttributes(3, a, p, w.range.at); char b[96]; snprintf(b, sizeof b, "%s %#llx %#llx %#llx", name(r).c_str(), v[0], v[1], v[2]); return std::string(b); });
  with("cuMemGetAddressRange", [&] { CUdeviceptr b = 0; size_t n = 0; CUresult r = cuMemGetAddressRange(&b, &n, w.range.at + 4096); return name(r) + (b == w.range.at ? " base" : " other base") + " " + std::to_string(n); });
  with("cuMemGetAccess", [&] { CUmemLocation l = read_write().location; unsigned long long f = 9; CUresult r = cuMemGetAccess(&f, &l, w.range.at); return name(r) + " " + std::to_string(f); });
  with("cuMemRangeGetAttribute", [&] { int v = 9; CUresult r = cuMemRangeGetAttribute(&v, sizeof v, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, w.range.at, N); return name(r) + " " + std::to_string(v); });
  with("cuMemGetHandleForAddressRange dma-buf", [&] { int fd = -1; CUresult r = cuMemGetHandleForAddressRange(&fd, w.range.at, N, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0); if (fd >= 0) close(fd); return name(r); });
  with("cuMemRetainAllocationHandle", [&] { CUmemGenericAllocationHandle h; CUresult r = cuMemRetainAllocationHandle(&h, (void *)w.range.at); if (!r) cuMemRelease(h); return name(r); });
  with("cuIpcGetMemHandle", [&] { CUipcMemHandle h; return name(cuIpcGetMemHandle(&h, w.range.at)); });
  with("cuPointerSetAttribute SYNC_MEMOPS", [&] { int on = 1; CUresult r = cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, w.range.at); return name(r); });
  with("cuTexObjectCreate linear", [&] { CUDA_RESOURCE_DESC d; memset(&d, 0, sizeof d); d.resType = CU_RESOURCE_TYPE_LINEAR; d.res.linear.devPtr = w.range.at; d.res.linear.format = CU_AD_FORMAT_UNSIGNED_INT32; d.res.linear.numChannels = 1; d.res.linear.sizeInBytes = 65536; CUDA_TEXTURE_DESC t; memset(&t, 0, sizeof t); t.flags = CU_TRSF_READ_AS_INTEGER; CUtexObject o; CUresult r = cuTexObjectCreate(&o, &d, &t, nullptr); if (!r) cuTexObjectDestroy(o); return name(r); });
  with("cuTensorMapEncodeTiled", [&] { alignas(64) CUtensorMap m; cuuint64_t dims[1] = {1024}; cuuint32_t box[1] = {64}, strides[1] = {1}; return name(cuTensorMapEncodeTiled(&m, CU_TENSOR_MAP_DATA_TYPE_UINT32, 1, (void *)w.range.at, dims, nullptr, box, strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)); });
  const Ordered from = {"", nullptr, 1000, 1000, 0}, set = {"", nullptr, 42, 0, 0}, kernel = {"", nullptr, 1001, 0, 0};
  // The replay needs the thread to be out of its capture.
  auto built = [&](const char *what, const Ordered &o, const std::function<CUresult(CUgraph)> &add) { CUgraph g; D(cuGraphCreate(&g, 0)); CUresult r; with(what, [&] { r = add(g); return name(r); }); if (!r) say(w, mode, what, "then" + replay(w, g, o)); cuGraphDestroy(g); };
  built("cuGraphAddMemcpyNode", from, [&](CUgraph g) { CUgraphNode n; CUDA_MEMCPY3D c = copy(w.other.at, w.range.at); return cuGraphAddMemcpyNode(&n, g, nullptr, 0, &c, w.card.context); });
  built("cuGraphAddMemsetNode", set, [&](CUgraph g) { CUgraphNode n; CUDA_MEMSET_NODE_PARAMS p; memset(&p, 0, sizeof p); p.dst = w.range.at; p.value = 42; p.elementSize = 4; p.width = N / 4; p.height = 1; return cuGraphAddMemsetNode(&n, g, nullptr, 0, &p, w.card.context); });
  built("cuGraphAddKernelNode", kernel, [&](CUgraph g) { CUgraphNode n; CUDA_KERNEL_NODE_PARAMS p; memset(&p, 0, sizeof p); unsigned long long words = N / 4; void *a[] = {&w.range.at, &words}; p.func = w.card.add; p.gridDimX = 64; p.blockDimX = 256; p.gridDimY = p.gridDimZ = p.blockDimY = p.blockDimZ = 1; p.kernelParams = a; return cuGraphAddKernelNode(&n, g, nullptr, 0, &p); });
  { CUgraph g; CUgraphNode n; CUgraphExec x; D(cuGraphCreate(&g, 0)); CUDA_MEMCPY3D c = copy(w.other.at, w.third.at); D(cuGraphAddMemcpyNode(&n, g, nullptr, 0, &c, w.card.context)); D(cuGraphInstantiate(&x, g, 0)); CUresult r; with("cuGraphExecMemcpyNodeSetParams", [&] { CUDA_MEMCPY3D d = copy(w.other.at, w.range.at); r = cuGraphExecMemcpyNodeSetParams(x, n, &d, w.card.context); return name(r); });
    if (!r) { w.back(); CUresult l = cuGraphLaunch(x, w.card.stream), s = cuStreamSynchronize(w.card.stream); say(w, mode, "cuGraphExecMemcpyNodeSetParams", "then replay " + name(l) + " " + name(s) + " " + w.holds(1000, 1000, 0)); } cuGraphExecDestroy(x); cuGraphDestroy(g); }
  { CUgraph g; CUgraphNode n; CUgraphExec x; D(cuGraphCreate(&g, 0)); CUDA_MEMSET_NODE_PARAMS p; memset(&p, 0, sizeof p); p.dst = w.third.at; p.value = 42; p.elementSize = 4; p.width = N / 4; p.height = 1; D(cuGraphAddMemsetNode(&n, g, nullptr, 0, &p, w.card.context)); D(cuGraphInstantiate(&x, g, 0)); CUresult r; with("cuGraphExecMemsetNodeSetParams", [&] { CUDA_MEMSET_NODE_PARAMS q = p; q.dst = w.range.at; r = cuGraphExecMemsetNodeSetParams(x, n, &q, w.card.context); return name(r); });
    if (!r) { w.back(); CUresult l = cuGraphLaunch(x, w.card.stream), s = cuStreamSynchronize(w.card.stream); say(w, mode, "cuGraphExecMemsetNodeSetParams", "then replay " + name(l) + " " + name(s) + " " + w.holds(42, 0, 0)); } cuGraphExecDestroy(x); cuGraphDestroy(g); }
}

// Runs this program again with these arguments.
static void child(const char *self, int state, int mode, int call) {
  fflush(stdout); pid_t pid = fork();
  if (!pid) { std::string a = std::to_string(state), b = std::to_string(mode), c = std::to_string(call); alarm(10); execl("/proc/self/exe", self, a.c_str(), b.c_str(), c.c_str(), (char *)nullptr); _exit(127); }
  int status; waitpid(pid, &status, 0); if (status) printf("{\"state\":\"%s\",\"capture\":\"%s\",\"call\":\"%s\",\"answer\":\"process ended with status %#x\"}\n", STATES[state], MODES[mode], call < 0 ? "all" : ORDERED[call].what, status);
}

int main(int argc, char **argv) {
  if (argc > 3) {
    int state = atoi(argv[1]), mode = atoi(argv[2]), call = atoi(argv[3]); World w(state);
    if (call >= 0) { alone(w, ORDERED[call]); fflush(stdout); _exit(0); }
    if (mode) for (auto &c : ORDERED) captured(w, mode, c);
    others(w, mode); fflush(stdout); _exit(0);
  }
  double begin = now();
  for (int mode = 0; mode < 4; mode++) for (int state = 0; state < 3; state++) { if (now() - begin > 15) { printf("out of time at %s, %s\n", STATES[state], MODES[mode]); return 0; } child(argv[0], state, mode, -1); }
  for (int state = 1; state < 3; state++) for (size_t c = 0; c < ORDERED.size(); c++) { if (now() - begin > 22) { printf("out of time at %s, %s alone\n", STATES[state], ORDERED[c].what); return 0; } child(argv[0], state, 0, (int)c); }
  printf("done in %.1f s\n", now() - begin);
}
