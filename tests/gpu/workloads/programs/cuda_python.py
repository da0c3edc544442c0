#!/usr/bin/env python3
"""cuda-python: the driver API and NVRTC called from Python; 512 MiB of words, a kernel, events, fills, pinned copies, and memory from the stream's pool."""
import ctypes, program
program.need("cuda.bindings.driver", "cuda.bindings.nvrtc")
from cuda.bindings import driver, nvrtc
def call(answer):
    if int(answer[0]): raise SystemExit(f"{answer[0]!r}")
    return answer[1] if len(answer) == 2 else answer[1:]
call(driver.cuInit(0))
device = call(driver.cuDeviceGet(0))
call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(device))))
major, minor = (call(driver.cuDeviceGetAttribute(getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{m}"), device)) for m in ("MAJOR", "MINOR"))
source = b'extern "C" __global__ void mix(unsigned* x, unsigned salt) { size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; unsigned w = x[i]; for (int r = 0; r < 32; r++) w = w * 1664525u + salt; x[i] = w; }'
compiled = call(nvrtc.nvrtcCreateProgram(source, b"mix.cu", 0, None, None))
call(nvrtc.nvrtcCompileProgram(compiled, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
image = bytearray(call(nvrtc.nvrtcGetCUBINSize(compiled)))
call(nvrtc.nvrtcGetCUBIN(compiled, image))
mix = call(driver.cuModuleGetFunction(call(driver.cuModuleLoadData(bytes(image))), b"mix"))
stream = call(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
event = call(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
N = 1 << 27
words, page = call(driver.cuMemAlloc(4 * N)), call(driver.cuMemHostAlloc(1 << 20, 0))
call(driver.cuMemsetD32Async(words, 7, N, stream))
pointer, salt = ctypes.c_uint64(int(words)), ctypes.c_uint32()
arguments = (ctypes.c_void_p * 2)(ctypes.addressof(pointer), ctypes.addressof(salt))
seen = 0
def step(i):
    global seen
    salt.value = 1013904223 + 2 * i
    call(driver.cuLaunchKernel(mix, N // 256, 1, 1, 256, 1, 1, 0, stream, ctypes.addressof(arguments), 0))
    if i % 100 == 0:
        some = call(driver.cuMemAllocAsync(1 << 20, stream)) # by way of a second buffer: words to it, from it to the host
        call(driver.cuMemcpyDtoDAsync(some, driver.CUdeviceptr(int(words) + (i << 10)), 1 << 20, stream))
        call(driver.cuMemcpyDtoHAsync(page, some, 1 << 20, stream))
        call(driver.cuMemFreeAsync(some, stream))
        call(driver.cuMemsetD32Async(words, i, 1 << 18, stream))
        call(driver.cuEventRecord(event, stream)); call(driver.cuEventSynchronize(event))
        seen = (seen * 31 + int.from_bytes(ctypes.string_at(int(page), 4096), "little")) % (1 << 61)
step(0)
with program.work(lambda: call(driver.cuStreamSynchronize(stream))):
    for i in range(program.steps(9000)): step(i)
host = bytearray(4 * N)
call(driver.cuMemcpyDtoH(ctypes.addressof(ctypes.c_char.from_buffer(host)), words, 4 * N))
program.tell(f"{program.digest(memoryview(host))} {seen}")
