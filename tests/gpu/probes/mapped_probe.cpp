// What memory that is mapped by an explicit swap can do that cuMemAlloc can: SYNC_MEMOPS, GPUDirect RDMA, IPC; and what it costs to make each
// chunk exportable or RDMA-capable. Beside it the attributes of memory of cuMemAlloc, which a program expects.
// c++ -std=c++17 -O2 -I $CUDA/include -o mapped_probe mapped_probe.cpp -lcuda
#include <unistd.h>
#include "swap_probe.h"

static void attributes(const char *what, CUdeviceptr p) {
  struct { const char *n; CUpointer_attribute a; } all[] = {{"CONTEXT", CU_POINTER_ATTRIBUTE_CONTEXT}, {"MEMORY_TYPE", CU_POINTER_ATTRIBUTE_MEMORY_TYPE}, {"DEVICE_POINTER", CU_POINTER_ATTRIBUTE_DEVICE_POINTER}, {"HOST_POINTER", CU_POINTER_ATTRIBUTE_HOST_POINTER}, {"P2P_TOKENS", CU_POINTER_ATTRIBUTE_P2P_TOKENS}, {"SYNC_MEMOPS", CU_POINTER_ATTRIBUTE_SYNC_MEMOPS}, {"BUFFER_ID", CU_POINTER_ATTRIBUTE_BUFFER_ID}, {"IS_MANAGED", CU_POINTER_ATTRIBUTE_IS_MANAGED}, {"DEVICE_ORDINAL", CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL}, {"IS_LEGACY_CUDA_IPC_CAPABLE", CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE}, {"RANGE_START_ADDR", CU_POINTER_ATTRIBUTE_RANGE_START_ADDR}, {"RANGE_SIZE", CU_POINTER_ATTRIBUTE_RANGE_SIZE}, {"MAPPED", CU_POINTER_ATTRIBUTE_MAPPED}, {"ALLOWED_HANDLE_TYPES", CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES}, {"IS_GPU_DIRECT_RDMA_CAPABLE", CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE}, {"ACCESS_FLAGS", CU_POINTER_ATTRIBUTE_ACCESS_FLAGS}, {"MEMPOOL_HANDLE", CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE}, {"MAPPING_SIZE", CU_POINTER_ATTRIBUTE_MAPPING_SIZE}, {"MAPPING_BASE_ADDR", CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR}, {"MEMORY_BLOCK_ID", CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID}, {"IS_HW_DECOMPRESS_CAPABLE", (CUpointer_attribute)21}};
  printf("%s, at %#llx:", what, (unsigned long long)p);
  for (auto &a : all) { unsigned long long v[8] = {}; CUresult r = cuPointerGetAttribute(v, a.a, p); printf(" %s %s=%#llx,", a.n, name(r).c_str(), v[0]); }
  CUdeviceptr b; size_t n; CUresult r = cuMemGetAddressRange(&b, &n, p); printf(" address range %s base%+lld size %zu", name(r).c_str(), (long long)(b - p), n);
  CUmemLocation l = read_write().location; unsigned long long f = 9; r = cuMemGetAccess(&f, &l, p); printf(", access %s %llu", name(r).c_str(), f);
  int v = 9; r = cuMemRangeGetAttribute(&v, sizeof v, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, p & ~(2 * MIB - 1), 2 * MIB); printf(", range attribute %s %d", name(r).c_str(), v);
  CUmemGenericAllocationHandle h; r = cuMemRetainAllocationHandle(&h, (void *)p); if (!r) cuMemRelease(h); printf(", retain handle %s", name(r).c_str());
  CUipcMemHandle ipc; r = cuIpcGetMemHandle(&ipc, p); printf(", ipc handle %s", name(r).c_str());
  int fd = -1; r = cuMemGetHandleForAddressRange(&fd, p & ~(2 * MIB - 1), 2 * MIB, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0); if (fd >= 0) close(fd); printf(", dma-buf %s", name(r).c_str());
  int on = 1; r = cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p); int got = 9; CUresult q = cuPointerGetAttribute(&got, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p); printf(", SYNC_MEMOPS set %s then %s %d\n", name(r).c_str(), name(q).c_str(), got);
}

static void cost(const char *what, int handles, bool rdma, size_t bytes) {
  const size_t count = 2 * GIB / bytes; CUmemAllocationProp p = on_card(); CUmemAccessDesc a = read_write(); p.requestedHandleTypes = (CUmemAllocationHandleType)handles; p.allocFlags.gpuDirectRDMACapable = rdma;
  CUdeviceptr va; D(cuMemAddressReserve(&va, count * bytes, 0, 0, 0)); std::vector<CUmemGenericAllocationHandle> h(count); double best[5] = {1e9, 1e9, 1e9, 1e9, 1e9};
  for (int round = 0; round < 3; round++) {
    double t = now(); for (auto &x : h) { CUresult r = cuMemCreate(&x, bytes, &p, 0); if (r) { printf("%-28s %4zu MiB: create %s\n", what, bytes / MIB, name(r).c_str()); return; } } best[0] = std::min(best[0], now() - t);
    t = now(); for (size_t i = 0; i < count; i++) D(cuMemMap(va + i * bytes, bytes, 0, h[i], 0)); best[1] = std::min(best[1], now() - t);
    t = now(); D(cuMemSetAccess(va, count * bytes, &a, 1)); best[2] = std::min(best[2], now() - t);
    t = now(); D(cuMemUnmap(va, count * bytes)); best[3] = std::min(best[3], now() - t); t = now(); for (auto x : h) D(cuMemRelease(x)); best[4] = std::min(best[4], now() - t);
  }
  printf("%-28s %4zu MiB: create %.1f map %.1f release %.1f us each; one setAccess %.2f, one unmap %.2f ms for 2 GiB\n", what, bytes / MIB, best[0] / count * 1e6, best[1] / count * 1e6, best[4] / count * 1e6, best[2] * 1e3, best[3] * 1e3); fflush(stdout);
  D(cuMemAddressFree(va, count * bytes));
}

int main() {
  Card card; setvbuf(stdout, nullptr, _IOLBF, 0); alarm(24);
  int fd = 0, rdma = 0, rdma_vmm = 0, dmabuf = 0, vmm = 0; cuDeviceGetAttribute(&vmm, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0); cuDeviceGetAttribute(&fd, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 0); cuDeviceGetAttribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, 0); cuDeviceGetAttribute(&rdma_vmm, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 0); cuDeviceGetAttribute(&dmabuf, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 0);
  CUmemAllocationProp p = on_card(); size_t least = 0, best = 0; D(cuMemGetAllocationGranularity(&least, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM)); D(cuMemGetAllocationGranularity(&best, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  printf("card: vmm %d, posix fd %d, rdma %d, rdma with vmm %d, dma-buf %d, granularity %zu, recommended %zu\n", vmm, fd, rdma, rdma_vmm, dmabuf, least, best);
  CUdeviceptr plain, small, tiny[3]; D(cuMemAlloc(&plain, 4 * MIB + 100)); D(cuMemAlloc(&small, 70000)); for (auto &t : tiny) D(cuMemAlloc(&t, 100));
  attributes("cuMemAlloc of 4 MiB + 100 bytes", plain + 4096); attributes("cuMemAlloc of 70000 bytes", small); printf("cuMemAlloc of 100 bytes, three: %#llx %+lld %+lld\n", (unsigned long long)tiny[0], (long long)(tiny[1] - tiny[0]), (long long)(tiny[2] - tiny[0]));
  for (int kind = 0; kind < 3; kind++) {
    p = on_card(); if (kind == 1) p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; if (kind == 2) p.allocFlags.gpuDirectRDMACapable = 1;
    CUmemAccessDesc a = read_write(); CUdeviceptr va; CUmemGenericAllocationHandle h; D(cuMemAddressReserve(&va, 4 * MIB, 0, 0, 0)); CUresult r = cuMemCreate(&h, 4 * MIB, &p, 0); const char *what = kind == 0 ? "mapped" : kind == 1 ? "mapped, exportable" : "mapped, RDMA-capable"; if (r) { printf("%s: create %s\n", what, name(r).c_str()); continue; }
    D(cuMemMap(va, 4 * MIB, 0, h, 0)); D(cuMemSetAccess(va, 4 * MIB, &a, 1)); attributes(what, va + 4096); printf("  cuMemFree of it: %s\n", name(cuMemFree(va)).c_str());
  }
  // Two chunks behind one range: what does the driver call an allocation?
  { CUmemAllocationProp q = on_card(); CUmemAccessDesc a = read_write(); CUdeviceptr va; CUmemGenericAllocationHandle h[2]; D(cuMemAddressReserve(&va, 8 * MIB, 0, 0, 0)); for (int i = 0; i < 2; i++) { D(cuMemCreate(&h[i], 4 * MIB, &q, 0)); D(cuMemMap(va + i * 4 * MIB, 4 * MIB, 0, h[i], 0)); } D(cuMemSetAccess(va, 8 * MIB, &a, 1)); attributes("two chunks, address in the second", va + 5 * MIB); void *host; D(cuMemHostAlloc(&host, 8 * MIB, 0)); printf("  one copy across both: %s, fill %s\n", name(cuMemcpyDtoH(host, va, 8 * MIB)).c_str(), name(cuMemsetD8(va, 1, 8 * MIB)).c_str());
    CUresult u = cuMemUnmap(va + MIB * 4, 2 * MIB); printf("  unmap of half a mapping: %s;", name(u).c_str()); u = cuMemUnmap(va, 8 * MIB); printf(" of both at once: %s\n", name(u).c_str()); }
  { double t = now(); for (int i = 0; i < 500; i++) { CUdeviceptr q; D(cuMemAddressReserve(&q, 32 * MIB, 0, 0, 0)); D(cuMemAddressFree(q, 32 * MIB)); } printf("reserve + address free: %.1f us\n", (now() - t) / 500 * 1e6); }
  for (size_t bytes : {2 * MIB, 20 * MIB, 128 * MIB}) { cost("plain", 0, false, bytes); cost("exportable (posix fd)", CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, false, bytes); cost("RDMA-capable", 0, true, bytes); cost("exportable and RDMA-capable", CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, true, bytes); }
  printf("done\n");
}
