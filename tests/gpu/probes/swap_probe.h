// What the probes of an explicit swap have in common: physical memory that is mapped at a reserved range, kernels, time.
#pragma once
#include <cuda.h>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static const size_t MIB = 1 << 20, GIB = 1ull << 30;
static inline double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
static inline std::string name(CUresult r) { const char *s = nullptr; cuGetErrorName(r, &s); return s ? (strncmp(s, "CUDA_", 5) ? s : s + 5) : std::to_string(r); }
#define D(x) do { CUresult r_ = (x); if (r_) { printf("FAIL line %d %s -> %s\n", __LINE__, #x, name(r_).c_str()); fflush(stdout); exit(1); } } while (0)

static inline CUmemAllocationProp on_card() { CUmemAllocationProp p; memset(&p, 0, sizeof p); p.type = CU_MEM_ALLOCATION_TYPE_PINNED; p.location.type = CU_MEM_LOCATION_TYPE_DEVICE; p.location.id = 0; return p; }
static inline CUmemAccessDesc read_write() { CUmemAccessDesc a; memset(&a, 0, sizeof a); a.location.type = CU_MEM_LOCATION_TYPE_DEVICE; a.location.id = 0; a.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE; return a; }

// A reserved range with or without memory behind it.
struct Range {
  CUdeviceptr at = 0; size_t bytes; CUmemGenericAllocationHandle handle = 0; bool mapped = false;
  explicit Range(size_t n) : bytes(n) { D(cuMemAddressReserve(&at, n, 0, 0, 0)); }
  void map(bool access = true) { CUmemAllocationProp p = on_card(); CUmemAccessDesc a = read_write(); D(cuMemCreate(&handle, bytes, &p, 0)); D(cuMemMap(at, bytes, 0, handle, 0)); if (access) D(cuMemSetAccess(at, bytes, &a, 1)); mapped = true; }
  void unmap() { D(cuMemUnmap(at, bytes)); D(cuMemRelease(handle)); mapped = false; }
};

// add: adds one to each of n words. spin: runs for so many ns of the card's clock.
static const char *const PTX =
  ".version 7.0\n.target sm_75\n.address_size 64\n"
  ".visible .entry add(.param .u64 p, .param .u64 n){.reg .u64 a,i,e,s,q;.reg .u32 x,y,z,v;.reg .pred c;ld.param.u64 a,[p];cvta.to.global.u64 a,a;ld.param.u64 e,[n];"
  "mov.u32 x,%ctaid.x;mov.u32 y,%ntid.x;mov.u32 z,%tid.x;mad.lo.u32 x,x,y,z;cvt.u64.u32 i,x;mov.u32 z,%nctaid.x;mul.lo.u32 y,y,z;cvt.u64.u32 s,y;"
  "L:setp.ge.u64 c,i,e;@c bra E;shl.b64 q,i,2;add.u64 q,q,a;ld.global.u32 v,[q];add.u32 v,v,1;st.global.u32 [q],v;add.u64 i,i,s;bra L;E:ret;}\n"
  ".visible .entry spin(.param .u64 n){.reg .u64 a,b,c;.reg .pred p;ld.param.u64 c,[n];mov.u64 a,%globaltimer;L:mov.u64 b,%globaltimer;sub.u64 b,b,a;setp.lt.u64 p,b,c;@p bra L;ret;}\n";

struct Card {
  CUdevice device; CUcontext context; CUfunction add, spin; CUstream stream;
  Card() {
    D(cuInit(0)); D(cuDeviceGet(&device, 0)); D(cuDevicePrimaryCtxRetain(&context, device)); D(cuCtxSetCurrent(context));
    CUmodule m; D(cuModuleLoadData(&m, PTX)); D(cuModuleGetFunction(&add, m, "add")); D(cuModuleGetFunction(&spin, m, "spin")); D(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    run_spin(0, stream); D(cuStreamSynchronize(stream));
  }
  CUresult run_add(CUdeviceptr p, size_t words, CUstream s) const { unsigned long long n = words; void *a[] = {&p, &n}; return cuLaunchKernel(add, 64, 1, 1, 256, 1, 1, 0, s, a, nullptr); }
  CUresult run_spin(unsigned long long ns, CUstream s) const { void *a[] = {&ns}; return cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, s, a, nullptr); }
};
