//! The list of entry points: each function of the driver once, with its signature and its treatment.
//!
//! Two layers are made from it. [`driver::functions`](crate::driver::functions) has a place for each of the driver's own
//! functions, and [`hooks::table`](crate::hooks::table) a hook for each that is not left alone. Signatures are those of
//! `cuda.h` of CUDA 13.0, and of CUDA 13.5 for newer functions. Structures that the library does not look into are `c_void`. A name
//! behind `and` is the function for per-thread default streams, with the same signature.
//!
//! A row has a class, which `docs/entry-points.md` shows, a place at the gate, the function, and its treatment.
//!
//! The place at the gate:
//!
//! - **on** a stream: the function submits work there, so the hook passes the gate with it.
//! - **addresses**: the function submits nothing, and the driver reads addresses that have to have memory. The hook passes the gate
//!   where the library maps memory.
//! - **handler**: some calls of the function pass the gate, and the handler knows which.
//! - **none**: the function passes no gate. A test lists why ([`hooks::table`](crate::hooks::table)).
//!
//! The treatment:
//!
//! - **unchanged**: the hook calls the driver with the program's arguments.
//! - **prompt**: the same. The driver returns from the function before its work is done, but not for managed memory. So if
//!   the pointers named allow it ([`are_prompt`](crate::hooks::pointers::are_prompt)), the hook calls the stream-ordered
//!   function on the same default stream.
//! - **across**: unchanged, or prompt. The driver refuses some copies because the library maps memory that is another card's.
//!   These are made in another way ([`copies`](crate::hooks::copies)).
//! - **across_in**: the same for a copy of a graph, which runs in the context that is named.
//! - **handled**: the hook passes its arguments and the real function to a handler.
//! - **of_stream**: the same; the handler is told whether a null stream is the thread's own.
//! - **looked_up**: the same as handled; the handler gets the table of hooks too.
//!
//! Functions in `called` have no hook; the library itself calls them. Names in `forwarded` are known and left alone.

/// Expands the list by a macro of this name.
macro_rules! entry_points {
    ($expand:ident) => { $expand! {
hooked {
    // submit
    submit [on NULL] cuLaunch(f: CUfunction) = unchanged();
    submit [on hStream] cuLaunchCooperativeKernel(f: CUfunction, gridDimX: c_uint, gridDimY: c_uint, gridDimZ: c_uint, blockDimX: c_uint, blockDimY: c_uint, blockDimZ: c_uint, sharedMemBytes: c_uint, hStream: CUstream, kernelParams: *mut *mut c_void) and cuLaunchCooperativeKernel_ptsz = unchanged();
    submit [on NULL] cuLaunchCooperativeKernelMultiDevice(launchParamsList: *mut c_void, numDevices: c_uint, flags: c_uint) = unchanged();
    submit [on NULL] cuLaunchGrid(f: CUfunction, grid_width: c_int, grid_height: c_int) = unchanged();
    submit [on hStream] cuLaunchGridAsync(f: CUfunction, grid_width: c_int, grid_height: c_int, hStream: CUstream) = unchanged();
    submit [on hStream] cuLaunchKernel(f: CUfunction, gridDimX: c_uint, gridDimY: c_uint, gridDimZ: c_uint, blockDimX: c_uint, blockDimY: c_uint, blockDimZ: c_uint, sharedMemBytes: c_uint, hStream: CUstream, kernelParams: *mut *mut c_void, extra: *mut *mut c_void) and cuLaunchKernel_ptsz = unchanged();
    submit [on config_stream(config)] cuLaunchKernelEx(config: *const c_void, f: CUfunction, kernelParams: *mut *mut c_void, extra: *mut *mut c_void) and cuLaunchKernelEx_ptsz = unchanged();
    submit [on stream] cuMemBatchDecompressAsync(paramsArray: *mut c_void, count: usize, flags: c_uint, errorIndex: *mut usize, stream: CUstream) and cuMemBatchDecompressAsync_ptsz = unchanged();
    submit [on hStream] cuMemMapArrayAsync(mapInfoList: *mut c_void, count: c_uint, hStream: CUstream) and cuMemMapArrayAsync_ptsz = handled(vmm::map_arrays);
    submit [on stream] cuStreamBatchMemOp(stream: CUstream, count: c_uint, paramArray: *mut c_void, flags: c_uint) and cuStreamBatchMemOp_ptsz = unchanged();
    submit [on stream] cuStreamBatchMemOp_v2(stream: CUstream, count: c_uint, paramArray: *mut c_void, flags: c_uint) and cuStreamBatchMemOp_v2_ptsz = unchanged();
    submit [on stream] cuStreamWaitValue32(stream: CUstream, addr: CUdeviceptr, value: u32, flags: c_uint) and cuStreamWaitValue32_ptsz = unchanged();
    submit [on stream] cuStreamWaitValue32_v2(stream: CUstream, addr: CUdeviceptr, value: u32, flags: c_uint) and cuStreamWaitValue32_v2_ptsz = unchanged();
    submit [on stream] cuStreamWaitValue64(stream: CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) and cuStreamWaitValue64_ptsz = unchanged();
    submit [on stream] cuStreamWaitValue64_v2(stream: CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) and cuStreamWaitValue64_v2_ptsz = unchanged();
    submit [on stream] cuStreamWriteValue32(stream: CUstream, addr: CUdeviceptr, value: u32, flags: c_uint) and cuStreamWriteValue32_ptsz = unchanged();
    submit [on stream] cuStreamWriteValue32_v2(stream: CUstream, addr: CUdeviceptr, value: u32, flags: c_uint) and cuStreamWriteValue32_v2_ptsz = unchanged();
    submit [on stream] cuStreamWriteValue64(stream: CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) and cuStreamWriteValue64_ptsz = unchanged();
    submit [on stream] cuStreamWriteValue64_v2(stream: CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) and cuStreamWriteValue64_v2_ptsz = unchanged();
    // copy
    copy [on hStream] cuMemDiscardAndPrefetchBatchAsync(dptrs: *mut CUdeviceptr, sizes: *mut usize, count: usize, prefetchLocs: *mut CUmemLocation, prefetchLocIdxs: *mut usize, numPrefetchLocs: usize, flags: c_ulonglong, hStream: CUstream) and cuMemDiscardAndPrefetchBatchAsync_ptsz = unchanged();
    copy [on hStream] cuMemDiscardBatchAsync(dptrs: *mut CUdeviceptr, sizes: *mut usize, count: usize, flags: c_ulonglong, hStream: CUstream) and cuMemDiscardBatchAsync_ptsz = unchanged();
    copy [on hStream] cuMemPrefetchAsync(devPtr: CUdeviceptr, count: usize, dstDevice: CUdevice, hStream: CUstream) and cuMemPrefetchAsync_ptsz = unchanged();
    copy [on hStream] cuMemPrefetchAsync_v2(devPtr: CUdeviceptr, count: usize, location: CUmemLocation, flags: c_uint, hStream: CUstream) and cuMemPrefetchAsync_v2_ptsz = unchanged();
    copy [on hStream] cuMemPrefetchBatchAsync(dptrs: *mut CUdeviceptr, sizes: *mut usize, count: usize, prefetchLocs: *mut CUmemLocation, prefetchLocIdxs: *mut usize, numPrefetchLocs: usize, flags: c_ulonglong, hStream: CUstream) and cuMemPrefetchBatchAsync_ptsz = unchanged();
    copy [on NULL] cuMemcpy2D(pCopy: *const c_void) = unchanged();
    copy [on hStream] cuMemcpy2DAsync(pCopy: *const c_void, hStream: CUstream) = unchanged();
    copy [on hStream] cuMemcpy2DAsync_v2(pCopy: *const c_void, hStream: CUstream) and cuMemcpy2DAsync_v2_ptsz = across(hStream);
    copy [on NULL] cuMemcpy2DUnaligned(pCopy: *const c_void) = unchanged();
    copy [on NULL] cuMemcpy2DUnaligned_v2(pCopy: *const c_void) and cuMemcpy2DUnaligned_v2_ptds = across(NULL);
    copy [on NULL] cuMemcpy2D_v2(pCopy: *const c_void) and cuMemcpy2D_v2_ptds = across(NULL);
    copy [on NULL] cuMemcpy3D(pCopy: *const c_void) = unchanged();
    copy [on hStream] cuMemcpy3DAsync(pCopy: *const c_void, hStream: CUstream) = unchanged();
    copy [on hStream] cuMemcpy3DAsync_v2(pCopy: *const c_void, hStream: CUstream) and cuMemcpy3DAsync_v2_ptsz = across(hStream);
    copy [on hStream] cuMemcpy3DBatchAsync(numOps: usize, opList: *mut c_void, failIdx: *mut usize, flags: c_ulonglong, hStream: CUstream) and cuMemcpy3DBatchAsync_ptsz = across(hStream);
    copy [on hStream] cuMemcpy3DBatchAsync_v2(numOps: usize, opList: *mut c_void, flags: c_ulonglong, hStream: CUstream) and cuMemcpy3DBatchAsync_v2_ptsz = across(hStream);
    copy [on NULL] cuMemcpy3DPeer(pCopy: *const c_void) and cuMemcpy3DPeer_ptds = unchanged();
    copy [on hStream] cuMemcpy3DPeerAsync(pCopy: *const c_void, hStream: CUstream) and cuMemcpy3DPeerAsync_ptsz = unchanged();
    copy [on NULL] cuMemcpy3D_v2(pCopy: *const c_void) and cuMemcpy3D_v2_ptds = across(NULL);
    copy [on hStream] cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize, hStream: CUstream) and cuMemcpyAsync_ptsz = across(hStream, dst, src, ByteCount);
    copy [on hStream] cuMemcpyWithAttributesAsync(dst: CUdeviceptr, src: CUdeviceptr, size: usize, attr: *mut c_void, hStream: CUstream) and cuMemcpyWithAttributesAsync_ptsz = across(hStream);
    copy [on hStream] cuMemcpy3DWithAttributesAsync(op: *mut c_void, flags: c_ulonglong, hStream: CUstream) and cuMemcpy3DWithAttributesAsync_ptsz = across(hStream);
    copy [on hStream] cuFabricCpyBatchAsync(numOps: usize, opList: *mut c_void, flags: c_ulonglong, hStream: CUstream) and cuFabricCpyBatchAsync_ptsz = unchanged();
    copy [on NULL] cuMemcpyAtoA(dstArray: CUarray, dstOffset: c_uint, srcArray: CUarray, srcOffset: c_uint, ByteCount: c_uint) = unchanged();
    copy [on NULL] cuMemcpyAtoA_v2(dstArray: CUarray, dstOffset: usize, srcArray: CUarray, srcOffset: usize, ByteCount: usize) and cuMemcpyAtoA_v2_ptds = unchanged();
    copy [on NULL] cuMemcpyAtoD(dstDevice: CUdeviceptrV1, srcArray: CUarray, srcOffset: c_uint, ByteCount: c_uint) = unchanged();
    copy [on NULL] cuMemcpyAtoD_v2(dstDevice: CUdeviceptr, srcArray: CUarray, srcOffset: usize, ByteCount: usize) and cuMemcpyAtoD_v2_ptds = across(NULL);
    copy [on NULL] cuMemcpyAtoH(dstHost: *mut c_void, srcArray: CUarray, srcOffset: c_uint, ByteCount: c_uint) = unchanged();
    copy [on hStream] cuMemcpyAtoHAsync(dstHost: *mut c_void, srcArray: CUarray, srcOffset: c_uint, ByteCount: c_uint, hStream: CUstream) = unchanged();
    copy [on hStream] cuMemcpyAtoHAsync_v2(dstHost: *mut c_void, srcArray: CUarray, srcOffset: usize, ByteCount: usize, hStream: CUstream) and cuMemcpyAtoHAsync_v2_ptsz = unchanged();
    copy [on NULL] cuMemcpyAtoH_v2(dstHost: *mut c_void, srcArray: CUarray, srcOffset: usize, ByteCount: usize) and cuMemcpyAtoH_v2_ptds = unchanged();
    copy [on hStream] cuMemcpyBatchAsync(dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize, attrs: *mut c_void, attrsIdxs: *mut usize, numAttrs: usize, failIdx: *mut usize, hStream: CUstream) and cuMemcpyBatchAsync_ptsz = across(hStream);
    copy [on hStream] cuMemcpyBatchAsync_v2(dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize, attrs: *mut c_void, attrsIdxs: *mut usize, numAttrs: usize, hStream: CUstream) and cuMemcpyBatchAsync_v2_ptsz = across(hStream);
    copy [on NULL] cuMemcpyDtoA(dstArray: CUarray, dstOffset: c_uint, srcDevice: CUdeviceptrV1, ByteCount: c_uint) = unchanged();
    copy [on NULL] cuMemcpyDtoA_v2(dstArray: CUarray, dstOffset: usize, srcDevice: CUdeviceptr, ByteCount: usize) and cuMemcpyDtoA_v2_ptds = across(NULL);
    copy [on NULL] cuMemcpyDtoD(dstDevice: CUdeviceptrV1, srcDevice: CUdeviceptrV1, ByteCount: c_uint) = unchanged();
    copy [on hStream] cuMemcpyDtoDAsync(dstDevice: CUdeviceptrV1, srcDevice: CUdeviceptrV1, ByteCount: c_uint, hStream: CUstream) = unchanged();
    copy [on hStream] cuMemcpyDtoDAsync_v2(dstDevice: CUdeviceptr, srcDevice: CUdeviceptr, ByteCount: usize, hStream: CUstream) and cuMemcpyDtoDAsync_v2_ptsz = across(hStream, dstDevice, srcDevice, ByteCount);
    copy [on NULL] cuMemcpyDtoH(dstHost: *mut c_void, srcDevice: CUdeviceptrV1, ByteCount: c_uint) = unchanged();
    copy [on hStream] cuMemcpyDtoHAsync(dstHost: *mut c_void, srcDevice: CUdeviceptrV1, ByteCount: c_uint, hStream: CUstream) = unchanged();
    copy [on hStream] cuMemcpyDtoHAsync_v2(dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize, hStream: CUstream) and cuMemcpyDtoHAsync_v2_ptsz = across(hStream);
    copy [on NULL] cuMemcpyDtoH_v2(dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize) and cuMemcpyDtoH_v2_ptds = across(NULL);
    copy [on NULL] cuMemcpyHtoA(dstArray: CUarray, dstOffset: c_uint, srcHost: *const c_void, ByteCount: c_uint) = unchanged();
    copy [on hStream] cuMemcpyHtoAAsync(dstArray: CUarray, dstOffset: c_uint, srcHost: *const c_void, ByteCount: c_uint, hStream: CUstream) = unchanged();
    copy [on hStream] cuMemcpyHtoAAsync_v2(dstArray: CUarray, dstOffset: usize, srcHost: *const c_void, ByteCount: usize, hStream: CUstream) and cuMemcpyHtoAAsync_v2_ptsz = unchanged();
    copy [on NULL] cuMemcpyHtoA_v2(dstArray: CUarray, dstOffset: usize, srcHost: *const c_void, ByteCount: usize) and cuMemcpyHtoA_v2_ptds = unchanged();
    copy [on NULL] cuMemcpyHtoD(dstDevice: CUdeviceptrV1, srcHost: *const c_void, ByteCount: c_uint) = unchanged();
    copy [on hStream] cuMemcpyHtoDAsync(dstDevice: CUdeviceptrV1, srcHost: *const c_void, ByteCount: c_uint, hStream: CUstream) = unchanged();
    copy [on hStream] cuMemcpyHtoDAsync_v2(dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize, hStream: CUstream) and cuMemcpyHtoDAsync_v2_ptsz = across(hStream);
    copy [on NULL] cuMemcpyHtoD_v2(dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize) and cuMemcpyHtoD_v2_ptds = across(NULL);
    copy [on NULL] cuMemcpyPeer(dstDevice: CUdeviceptr, dstContext: CUcontext, srcDevice: CUdeviceptr, srcContext: CUcontext, ByteCount: usize) and cuMemcpyPeer_ptds = unchanged();
    copy [on hStream] cuMemcpyPeerAsync(dstDevice: CUdeviceptr, dstContext: CUcontext, srcDevice: CUdeviceptr, srcContext: CUcontext, ByteCount: usize, hStream: CUstream) and cuMemcpyPeerAsync_ptsz = unchanged();
    // fill
    fill [on NULL] cuMemsetD16(dstDevice: CUdeviceptrV1, us: c_ushort, N: c_uint) = unchanged();
    fill [on hStream] cuMemsetD16Async(dstDevice: CUdeviceptr, us: c_ushort, N: usize, hStream: CUstream) and cuMemsetD16Async_ptsz = unchanged();
    fill [on NULL] cuMemsetD2D16(dstDevice: CUdeviceptrV1, dstPitch: c_uint, us: c_ushort, Width: c_uint, Height: c_uint) = unchanged();
    fill [on hStream] cuMemsetD2D16Async(dstDevice: CUdeviceptr, dstPitch: usize, us: c_ushort, Width: usize, Height: usize, hStream: CUstream) and cuMemsetD2D16Async_ptsz = unchanged();
    fill [on NULL] cuMemsetD2D32(dstDevice: CUdeviceptrV1, dstPitch: c_uint, ui: c_uint, Width: c_uint, Height: c_uint) = unchanged();
    fill [on hStream] cuMemsetD2D32Async(dstDevice: CUdeviceptr, dstPitch: usize, ui: c_uint, Width: usize, Height: usize, hStream: CUstream) and cuMemsetD2D32Async_ptsz = unchanged();
    fill [on NULL] cuMemsetD2D8(dstDevice: CUdeviceptrV1, dstPitch: c_uint, uc: c_uchar, Width: c_uint, Height: c_uint) = unchanged();
    fill [on hStream] cuMemsetD2D8Async(dstDevice: CUdeviceptr, dstPitch: usize, uc: c_uchar, Width: usize, Height: usize, hStream: CUstream) and cuMemsetD2D8Async_ptsz = unchanged();
    fill [on NULL] cuMemsetD32(dstDevice: CUdeviceptrV1, ui: c_uint, N: c_uint) = unchanged();
    fill [on hStream] cuMemsetD32Async(dstDevice: CUdeviceptr, ui: c_uint, N: usize, hStream: CUstream) and cuMemsetD32Async_ptsz = unchanged();
    fill [on NULL] cuMemsetD8(dstDevice: CUdeviceptrV1, uc: c_uchar, N: c_uint) = unchanged();
    fill [on hStream] cuMemsetD8Async(dstDevice: CUdeviceptr, uc: c_uchar, N: usize, hStream: CUstream) and cuMemsetD8Async_ptsz = unchanged();
    copy [on NULL] cuMemcpy(dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize) and cuMemcpy_ptds = across(NULL, dst, src, ByteCount, prompt cuMemcpyAsync);
    copy [on NULL] cuMemcpyDtoD_v2(dstDevice: CUdeviceptr, srcDevice: CUdeviceptr, ByteCount: usize) and cuMemcpyDtoD_v2_ptds = across(NULL, dstDevice, srcDevice, ByteCount, prompt cuMemcpyDtoDAsync_v2);
    fill [on NULL] cuMemsetD8_v2(dstDevice: CUdeviceptr, uc: c_uchar, N: usize) and cuMemsetD8_v2_ptds = prompt(cuMemsetD8Async, dstDevice);
    fill [on NULL] cuMemsetD16_v2(dstDevice: CUdeviceptr, us: c_ushort, N: usize) and cuMemsetD16_v2_ptds = prompt(cuMemsetD16Async, dstDevice);
    fill [on NULL] cuMemsetD32_v2(dstDevice: CUdeviceptr, ui: c_uint, N: usize) and cuMemsetD32_v2_ptds = prompt(cuMemsetD32Async, dstDevice);
    fill [on NULL] cuMemsetD2D8_v2(dstDevice: CUdeviceptr, dstPitch: usize, uc: c_uchar, Width: usize, Height: usize) and cuMemsetD2D8_v2_ptds = prompt(cuMemsetD2D8Async, dstDevice);
    fill [on NULL] cuMemsetD2D16_v2(dstDevice: CUdeviceptr, dstPitch: usize, us: c_ushort, Width: usize, Height: usize) and cuMemsetD2D16_v2_ptds = prompt(cuMemsetD2D16Async, dstDevice);
    fill [on NULL] cuMemsetD2D32_v2(dstDevice: CUdeviceptr, dstPitch: usize, ui: c_uint, Width: usize, Height: usize) and cuMemsetD2D32_v2_ptds = prompt(cuMemsetD2D32Async, dstDevice);
    // start
    init [none] cuInit(Flags: c_uint) = looked_up(init::cu_init);
    context [none] cuCtxCreate(pctx: *mut CUcontext, flags: c_uint, dev: CUdevice) = handled(contexts::create);
    context [none] cuCtxCreate_v2(pctx: *mut CUcontext, flags: c_uint, dev: CUdevice) = handled(contexts::create);
    context [none] cuCtxCreate_v3(pctx: *mut CUcontext, paramsArray: *mut c_void, numParams: c_int, flags: c_uint, dev: CUdevice) = handled(contexts::create_v3);
    context [none] cuCtxCreate_v4(pctx: *mut CUcontext, ctxCreateParams: *mut c_void, flags: c_uint, dev: CUdevice) = handled(contexts::create_v4);
    context [none] cuCtxDestroy(ctx: CUcontext) = handled(contexts::destroy);
    context [none] cuCtxDestroy_v2(ctx: CUcontext) = handled(contexts::destroy);
    context [none] cuCtxEnablePeerAccess(peerContext: CUcontext, Flags: c_uint) = handled(contexts::enable_peer);
    context [none] cuCtxDisablePeerAccess(peerContext: CUcontext) = handled(contexts::disable_peer);
    context [none] cuCtxAttach(pctx: *mut CUcontext, flags: c_uint) = handled(contexts::attach);
    context [none] cuCtxDetach(ctx: CUcontext) = handled(contexts::detach);
    context [none] cuGreenCtxCreate(phCtx: *mut CUgreenCtx, desc: *mut c_void, dev: CUdevice, flags: c_uint) = handled(contexts::create_green);
    context [none] cuGreenCtxDestroy(hCtx: CUgreenCtx) = handled(contexts::destroy_green);
    context [none] cuCtxSetCurrent(ctx: CUcontext) = handled(contexts::set_current);
    context [none] cuCtxPushCurrent(ctx: CUcontext) = handled(contexts::set_current);
    context [none] cuCtxPushCurrent_v2(ctx: CUcontext) = handled(contexts::set_current);
    context [none] cuCtxPopCurrent(pctx: *mut CUcontext) = handled(contexts::pop_current);
    context [none] cuCtxPopCurrent_v2(pctx: *mut CUcontext) = handled(contexts::pop_current);
    context [none] cuDevicePrimaryCtxRetain(pctx: *mut CUcontext, dev: CUdevice) = handled(contexts::retain_primary);
    context [none] cuDevicePrimaryCtxRelease(dev: CUdevice) = handled(contexts::release_primary);
    context [none] cuDevicePrimaryCtxRelease_v2(dev: CUdevice) = handled(contexts::release_primary);
    context [none] cuDevicePrimaryCtxReset(dev: CUdevice) = handled(contexts::reset_primary);
    context [none] cuDevicePrimaryCtxReset_v2(dev: CUdevice) = handled(contexts::reset_primary);
    // allocate, free, view
    allocate [none] cuMemAlloc(dptr: *mut CUdeviceptrV1, bytesize: c_uint) = handled(memory::alloc_v1);
    allocate [none] cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytesize: usize) = handled(memory::alloc);
    allocate [none] cuMemAllocPitch(dptr: *mut CUdeviceptrV1, pPitch: *mut c_uint, WidthInBytes: c_uint, Height: c_uint, ElementSizeBytes: c_uint) = handled(memory::alloc_pitch_v1);
    allocate [none] cuMemAllocPitch_v2(dptr: *mut CUdeviceptr, pPitch: *mut usize, WidthInBytes: usize, Height: usize, ElementSizeBytes: c_uint) = handled(memory::alloc_pitch);
    allocate [none] cuMemAllocManaged(dptr: *mut CUdeviceptr, bytesize: usize, flags: c_uint) = handled(memory::alloc_managed);
    free [none] cuMemFree(dptr: CUdeviceptrV1) = handled(memory::free_v1);
    free [none] cuMemFree_v2(dptr: CUdeviceptr) = handled(memory::free);
    view [none] cuMemGetInfo(free: *mut c_uint, total: *mut c_uint) = handled(memory_info::get_info_v1);
    view [none] cuMemGetInfo_v2(free: *mut usize, total: *mut usize) = handled(memory_info::get_info);
    view [none] cuDeviceTotalMem(bytes: *mut c_uint, dev: CUdevice) = handled(memory_info::total_mem_v1);
    view [none] cuDeviceTotalMem_v2(bytes: *mut usize, dev: CUdevice) = handled(memory_info::total_mem);
    // graphs: they allocate when they run
    submit [handler] cuGraphLaunch(hGraphExec: CUgraphExec, hStream: CUstream) and cuGraphLaunch_ptsz = of_stream(graphs::launch);
    submit [handler] cuGraphUpload(hGraphExec: CUgraphExec, hStream: CUstream) and cuGraphUpload_ptsz = of_stream(graphs::launch);
    free [none] cuDeviceGraphMemTrim(device: CUdevice) = handled(graphs::trim);
    allocate [handler] cuGraphAddMemAllocNode(phGraphNode: *mut c_void, hGraph: CUgraph, dependencies: *const c_void, numDependencies: usize, nodeParams: *mut c_void) = handled(graphs::add_mem_alloc_node);
    allocate [handler] cuGraphAddNode(phGraphNode: *mut c_void, hGraph: CUgraph, dependencies: *const c_void, numDependencies: usize, nodeParams: *mut c_void) = handled(nodes::add);
    allocate [handler] cuGraphAddNode_v2(phGraphNode: *mut c_void, hGraph: CUgraph, dependencies: *const c_void, dependencyData: *const c_void, numDependencies: usize, nodeParams: *mut c_void) = handled(nodes::add_v2);
    allocate [handler] cuGraphAddNode_v3(phGraphNode: *mut c_void, hGraph: CUgraph, dependencies: *const c_void, dependencyData: *const c_void, numDependencies: usize, nodeParams: *mut c_void) = handled(nodes::add_v2);
    // stream-ordered, physical and array memory: counted
    allocate [none] cuMemAllocAsync(dptr: *mut CUdeviceptr, bytesize: usize, hStream: CUstream) and cuMemAllocAsync_ptsz = of_stream(stream_ordered::alloc_async);
    allocate [none] cuMemAllocFromPoolAsync(dptr: *mut CUdeviceptr, bytesize: usize, pool: CUmemoryPool, hStream: CUstream) and cuMemAllocFromPoolAsync_ptsz = of_stream(stream_ordered::alloc_from_pool_async);
    free [none] cuMemFreeAsync(dptr: CUdeviceptr, hStream: CUstream) and cuMemFreeAsync_ptsz = of_stream(stream_ordered::free_async);
    allocate [none] cuMemPoolCreate(pool: *mut CUmemoryPool, poolProps: *const c_void) = handled(pools::create);
    allocate [none] cuMemPoolSetAttribute(pool: CUmemoryPool, attr: c_int, value: *mut c_void) = handled(pools::set_attribute);
    view [none] cuDeviceGetDefaultMemPool(pool_out: *mut CUmemoryPool, dev: CUdevice) = handled(pools::default_of_device);
    view [none] cuDeviceGetMemPool(pool: *mut CUmemoryPool, dev: CUdevice) = handled(pools::current_of_device);
    view [none] cuDeviceSetMemPool(dev: CUdevice, pool: CUmemoryPool) = handled(pools::set_of_device);
    view [none] cuMemGetDefaultMemPool(pool_out: *mut CUmemoryPool, location: *mut CUmemLocation, kind: c_int) = handled(pools::default_at);
    view [none] cuMemGetMemPool(pool: *mut CUmemoryPool, location: *mut CUmemLocation, kind: c_int) = handled(pools::current_at);
    view [none] cuMemSetMemPool(location: *mut CUmemLocation, kind: c_int, pool: CUmemoryPool) = handled(pools::set_at);
    view [none] cuMemPoolGetAccess(flags: *mut c_int, memPool: CUmemoryPool, location: *mut CUmemLocation) = handled(pools::get_access);
    free [none] cuMemPoolTrimTo(pool: CUmemoryPool, minBytesToKeep: usize) = handled(pools::trim_to);
    free [none] cuMemPoolDestroy(pool: CUmemoryPool) = handled(pools::destroy);
    allocate [none] cuMemCreate(handle: *mut c_ulonglong, size: usize, prop: *const c_void, flags: c_ulonglong) = handled(vmm::create);
    free [none] cuMemRelease(handle: c_ulonglong) = handled(vmm::release);
    allocate [handler] cuMemMap(ptr: CUdeviceptr, size: usize, offset: usize, handle: c_ulonglong, flags: c_ulonglong) = handled(vmm::map);
    free [none] cuMemUnmap(ptr: CUdeviceptr, size: usize) = handled(vmm::unmap);
    allocate [none] cuMemAddressReserve(ptr: *mut CUdeviceptr, size: usize, alignment: usize, addr: CUdeviceptr, flags: c_ulonglong) = handled(vmm::reserve);
    free [none] cuMemAddressFree(ptr: CUdeviceptr, size: usize) = handled(vmm::free_addresses);
    allocate [handler] cuMemSetAccess(ptr: CUdeviceptr, size: usize, desc: *const c_void, count: usize) = handled(vmm::set_access);
    view [none] cuMemGetAllocationPropertiesFromHandle(prop: *mut c_void, handle: c_ulonglong) = handled(vmm::get_properties);
    share [handler] cuMemExportToShareableHandle(shareableHandle: *mut c_void, handle: c_ulonglong, handleType: c_int, flags: c_ulonglong) = handled(vmm::export);
    share [none] cuMemPoolExportToShareableHandle(handle_out: *mut c_void, pool: CUmemoryPool, handleType: c_int, flags: c_ulonglong) = handled(vmm::export_pool);
    share [none] cuMemPoolExportPointer(shareData_out: *mut c_void, ptr: CUdeviceptr) = handled(vmm::export_pointer);
    share [none] cuMemPoolImportFromShareableHandle(pool_out: *mut CUmemoryPool, handle: *mut c_void, handleType: c_int, flags: c_ulonglong) = handled(vmm::import_pool);
    share [none] cuMemPoolImportPointer(ptr_out: *mut CUdeviceptr, pool: CUmemoryPool, shareData: *mut c_void) = handled(vmm::import_pointer);
    share [none] cuImportExternalMemory(extMem_out: *mut *mut c_void, memHandleDesc: *const c_void) = handled(vmm::import_external);
    share [handler] cuMulticastBindMem(mcHandle: c_ulonglong, mcOffset: usize, memHandle: c_ulonglong, memOffset: usize, size: usize, flags: c_ulonglong) = handled(vmm::bind);
    share [handler] cuMulticastBindAddr(mcHandle: c_ulonglong, mcOffset: usize, memptr: CUdeviceptr, size: usize, flags: c_ulonglong) = handled(vmm::bind_range);
    share [handler] cuMulticastBindMem_v2(mcHandle: c_ulonglong, dev: CUdevice, mcOffset: usize, memHandle: c_ulonglong, memOffset: usize, size: usize, flags: c_ulonglong) = handled(vmm::bind_v2);
    share [handler] cuMulticastBindAddr_v2(mcHandle: c_ulonglong, dev: CUdevice, mcOffset: usize, memptr: CUdeviceptr, size: usize, flags: c_ulonglong) = handled(vmm::bind_range_v2);
    share [handler] cuLogicalEndpointBindMem(leId: c_uint, dev: CUdevice, offset: u64, memHandle: c_ulonglong, memOffset: u64, size: u64, flags: c_ulonglong) = handled(vmm::bind_endpoint);
    share [handler] cuLogicalEndpointBindAddr(leId: c_uint, dev: CUdevice, offset: u64, ptr: CUdeviceptr, size: u64, flags: c_ulonglong) = handled(vmm::bind_endpoint_range);
    share [handler] cuPointerSetAttribute(value: *const c_void, attribute: c_int, ptr: CUdeviceptr) = handled(pointers::set_attribute);
    allocate [none] cuMemRetainAllocationHandle(handle: *mut c_ulonglong, addr: *mut c_void) = handled(vmm::retain);
    allocate [none] cuArrayCreate(pHandle: *mut CUarray, pAllocateArray: *const c_void) = handled(arrays::array_create_v1);
    allocate [none] cuArrayCreate_v2(pHandle: *mut CUarray, pAllocateArray: *const c_void) = handled(arrays::array_create);
    allocate [none] cuArray3DCreate(pHandle: *mut CUarray, pAllocateArray: *const c_void) = handled(arrays::array_3d_create_v1);
    allocate [none] cuArray3DCreate_v2(pHandle: *mut CUarray, pAllocateArray: *const c_void) = handled(arrays::array_3d_create);
    allocate [none] cuMipmappedArrayCreate(pHandle: *mut CUmipmappedArray, pMipmappedArrayDesc: *const c_void, numMipmapLevels: c_uint) = handled(arrays::mipmapped_create);
    free [none] cuArrayDestroy(hArray: CUarray) = handled(arrays::array_destroy);
    free [none] cuMipmappedArrayDestroy(hMipmappedArray: CUmipmappedArray) = handled(arrays::mipmapped_destroy);
    // pointers, seen by the program and by other processes
    view [none] cuMemGetAddressRange_v2(pbase: *mut CUdeviceptr, psize: *mut usize, dptr: CUdeviceptr) = handled(pointers::get_address_range);
    view [none] cuPointerGetAttribute(data: *mut c_void, attribute: c_int, ptr: CUdeviceptr) = handled(pointers::get_attribute);
    view [none] cuPointerGetAttributes(numAttributes: c_uint, attributes: *const c_int, data: *const *mut c_void, ptr: CUdeviceptr) = handled(pointers::get_attributes);
    share [handler] cuIpcGetMemHandle(pHandle: *mut CUipcMemHandle, dptr: CUdeviceptr) = handled(ipc::get_mem_handle);
    share [none] cuIpcOpenMemHandle(pdptr: *mut CUdeviceptr, handle: CUipcMemHandle, Flags: c_uint) = handled(ipc::open_mem_handle);
    share [none] cuIpcOpenMemHandle_v2(pdptr: *mut CUdeviceptr, handle: CUipcMemHandle, Flags: c_uint) = handled(ipc::open_mem_handle);
    share [none] cuIpcCloseMemHandle(dptr: CUdeviceptr) = handled(ipc::close_mem_handle);
    // what the driver reads addresses from: they have to have memory
    name [addresses] cuGraphAddMemcpyNode(phGraphNode: *mut c_void, hGraph: CUgraph, dependencies: *const c_void, numDependencies: usize, copyParams: *const c_void, ctx: CUcontext) = across_in(ctx);
    name [addresses] cuGraphAddMemsetNode(phGraphNode: *mut c_void, hGraph: CUgraph, dependencies: *const c_void, numDependencies: usize, memsetParams: *const c_void, ctx: CUcontext) = handled(nodes::add_fill);
    name [addresses] cuGraphMemcpyNodeSetParams(hNode: *mut c_void, nodeParams: *const c_void) = across_in(CUcontext::NULL);
    name [addresses] cuGraphMemsetNodeSetParams(hNode: *mut c_void, nodeParams: *const c_void) = handled(nodes::set_fill);
    name [addresses] cuGraphNodeSetParams(hNode: *mut c_void, nodeParams: *mut c_void) = handled(nodes::set);
    name [addresses] cuGraphNodeSetParams_v2(hNode: *mut c_void, nodeParams: *mut c_void) = handled(nodes::set);
    name [addresses] cuGraphExecMemcpyNodeSetParams(hGraphExec: CUgraphExec, hNode: *mut c_void, copyParams: *const c_void, ctx: CUcontext) = across_in(ctx);
    name [addresses] cuGraphExecMemsetNodeSetParams(hGraphExec: CUgraphExec, hNode: *mut c_void, memsetParams: *const c_void, ctx: CUcontext) = handled(nodes::set_fill_in_exec);
    name [addresses] cuGraphExecNodeSetParams(hGraphExec: CUgraphExec, hNode: *mut c_void, nodeParams: *mut c_void) = handled(nodes::set_in_exec);
    name [addresses] cuGraphAddBatchMemOpNode(phGraphNode: *mut c_void, hGraph: CUgraph, dependencies: *const c_void, numDependencies: usize, nodeParams: *const c_void) = unchanged();
    name [addresses] cuGraphBatchMemOpNodeSetParams(hNode: *mut c_void, nodeParams: *const c_void) = unchanged();
    name [addresses] cuGraphExecBatchMemOpNodeSetParams(hGraphExec: CUgraphExec, hNode: *mut c_void, nodeParams: *const c_void) = unchanged();
    name [addresses] cuGraphExecChildGraphNodeSetParams(hGraphExec: CUgraphExec, hNode: *mut c_void, childGraph: CUgraph) = unchanged();
    name [addresses] cuGraphExecUpdate(hGraphExec: CUgraphExec, hGraph: CUgraph, hErrorNode_out: *mut c_void, updateResult_out: *mut c_int) = unchanged();
    name [addresses] cuGraphExecUpdate_v2(hGraphExec: CUgraphExec, hGraph: CUgraph, resultInfo: *mut c_void) = unchanged();
    name [addresses] cuGraphInstantiate(phGraphExec: *mut CUgraphExec, hGraph: CUgraph, phErrorNode: *mut c_void, logBuffer: *mut c_char, bufferSize: usize) = unchanged();
    name [addresses] cuGraphInstantiate_v2(phGraphExec: *mut CUgraphExec, hGraph: CUgraph, phErrorNode: *mut c_void, logBuffer: *mut c_char, bufferSize: usize) = unchanged();
    name [addresses] cuGraphInstantiateWithFlags(phGraphExec: *mut CUgraphExec, hGraph: CUgraph, flags: c_ulonglong) = unchanged();
    name [addresses] cuGraphInstantiateWithParams(phGraphExec: *mut CUgraphExec, hGraph: CUgraph, instantiateParams: *mut c_void) and cuGraphInstantiateWithParams_ptsz = unchanged();
    view [none] cuMemGetAccess(flags: *mut c_ulonglong, location: *const c_void, ptr: CUdeviceptr) = handled(pointers::get_access);
    share [handler] cuMemGetHandleForAddressRange(handle: *mut c_void, dptr: CUdeviceptr, size: usize, handleType: c_int, flags: c_ulonglong) = handled(ipc::get_handle_for_range);
    // callbacks
    callback [on hStream] cuLaunchHostFunc(hStream: CUstream, func: *const c_void, userData: *mut c_void) and cuLaunchHostFunc_ptsz = of_stream(callbacks::launch_host_func);
    callback [on hStream] cuLaunchHostFunc_v2(hStream: CUstream, func: *const c_void, userData: *mut c_void, syncMode: c_uint) and cuLaunchHostFunc_v2_ptsz = of_stream(callbacks::launch_host_func_v2);
    callback [on hStream] cuStreamAddCallback(hStream: CUstream, callback: *const c_void, userData: *mut c_void, flags: c_uint) and cuStreamAddCallback_ptsz = of_stream(callbacks::add_callback);
    // streams and capture
    stream [none] cuStreamCreate(phStream: *mut CUstream, Flags: c_uint) = handled(streams::create);
    stream [none] cuStreamCreateWithPriority(phStream: *mut CUstream, flags: c_uint, priority: c_int) = handled(streams::create_with_priority);
    stream [none] cuGreenCtxStreamCreate(phStream: *mut CUstream, greenCtx: CUgreenCtx, flags: c_uint, priority: c_int) = handled(streams::create_green);
    stream [none] cuStreamWaitEvent(hStream: CUstream, hEvent: CUevent, Flags: c_uint) = handled(streams::wait_event);
    stream [none] cuStreamWaitEvent_ptsz(hStream: CUstream, hEvent: CUevent, Flags: c_uint) = handled(streams::wait_event);
    stream [none] cuStreamDestroy(hStream: CUstream) = handled(streams::destroy);
    stream [none] cuStreamDestroy_v2(hStream: CUstream) = handled(streams::destroy);
    capture [none] cuStreamBeginCapture(hStream: CUstream) and cuStreamBeginCapture_ptsz = of_stream(captures::begin_v1);
    capture [none] cuStreamBeginCapture_v2(hStream: CUstream, mode: c_int) and cuStreamBeginCapture_v2_ptsz = of_stream(captures::begin);
    capture [none] cuStreamBeginCaptureToGraph(hStream: CUstream, hGraph: CUgraph, dependencies: *const c_void, dependencyData: *const c_void, numDependencies: usize, mode: c_int) and cuStreamBeginCaptureToGraph_ptsz = of_stream(captures::begin_to_graph);
    capture [none] cuStreamBeginRecaptureToGraph(hStream: CUstream, mode: c_int, hGraph: CUgraph, callbackFunc: *const c_void, userData: *mut c_void) and cuStreamBeginRecaptureToGraph_ptsz = of_stream(captures::begin_again);
    capture [none] cuStreamBeginCaptureToCig(hStream: CUstream, streamCigCaptureParams: *mut c_void) and cuStreamBeginCaptureToCig_ptsz = of_stream(captures::begin_for_graphics);
    capture [none] cuStreamEndCaptureToCig(hStream: CUstream) and cuStreamEndCaptureToCig_ptsz = of_stream(captures::end_for_graphics);
    capture [none] cuStreamEndCapture(hStream: CUstream, phGraph: *mut CUgraph) and cuStreamEndCapture_ptsz = of_stream(captures::end);
    resolve [none] cuGetProcAddress(symbol: *const c_char, pfn: *mut *mut c_void, cudaVersion: c_int, flags: u64) = looked_up(get_proc_address::get_proc_address);
    resolve [none] cuGetProcAddress_v2(symbol: *const c_char, pfn: *mut *mut c_void, cudaVersion: c_int, flags: u64, symbolStatus: *mut c_int) = looked_up(get_proc_address::get_proc_address_v2);
    resolve [none] cuGetProcAddress_v2_ptsz(symbol: *const c_char, pfn: *mut *mut c_void, cudaVersion: c_int, flags: u64, symbolStatus: *mut c_int) = looked_up(get_proc_address::get_proc_address_v2);
}

called {
    cuCheckpointProcessCheckpoint(pid: c_int, args: *mut c_void);
    cuCheckpointProcessLock(pid: c_int, args: *mut c_void);
    cuCheckpointProcessRestore(pid: c_int, args: *mut c_void);
    cuCheckpointProcessUnlock(pid: c_int, args: *mut c_void);
    cuCtxFromGreenCtx(pContext: *mut CUcontext, hCtx: CUgreenCtx);
    cuCtxGetCurrent(pctx: *mut CUcontext);
    cuCtxGetDevice(device: *mut CUdevice);
    cuCtxGetLimit(pvalue: *mut usize, limit: c_int);
    cuCtxRecordEvent(hCtx: CUcontext, hEvent: CUevent);
    cuCtxSetLimit(limit: c_int, value: usize);
    cuCtxSynchronize();
    cuDeviceCanAccessPeer(canAccessPeer: *mut c_int, dev: CUdevice, peerDev: CUdevice);
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetAttribute(pi: *mut c_int, attrib: c_int, dev: CUdevice);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGetGraphMemAttribute(device: CUdevice, attr: c_int, value: *mut c_void);
    cuDeviceGetUuid(uuid: *mut [u8; 16], dev: CUdevice);
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], dev: CUdevice);
    cuDevicePrimaryCtxGetState(dev: CUdevice, flags: *mut c_uint, active: *mut c_int);
    cuMemHostRegister_v2(p: *mut c_void, bytesize: usize, Flags: c_uint);
    cuMemHostUnregister(p: *mut c_void);
    cuMemImportFromShareableHandle(handle: *mut c_ulonglong, osHandle: *mut c_void, shHandleType: c_int);
    cuModuleGetFunction(hfunc: *mut CUfunction, hmod: CUmodule, name: *const c_char);
    cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    cuMemPoolGetAttribute(pool: CUmemoryPool, attr: c_int, value: *mut c_void);
    cuEventCreate(phEvent: *mut CUevent, Flags: c_uint);
    cuEventDestroy_v2(hEvent: CUevent);
    cuEventQuery(hEvent: CUevent);
    cuEventRecord(hEvent: CUevent, hStream: CUstream) and cuEventRecord_ptsz;
    cuStreamGetCtx(hStream: CUstream, pctx: *mut CUcontext);
    cuStreamIsCapturing(hStream: CUstream, captureStatus: *mut c_int);
    cuStreamQuery(hStream: CUstream);
    cuStreamSynchronize(hStream: CUstream);
    cuThreadExchangeStreamCaptureMode(mode: *mut c_int);
}

forwarded {
    cuArray3DGetDescriptor cuArray3DGetDescriptor_v2
    cuArrayGetDescriptor cuArrayGetDescriptor_v2 cuArrayGetMemoryRequirements
    cuArrayGetPlane cuArrayGetSparseProperties
    cuCheckpointProcessGetRestoreThreadId cuCheckpointProcessGetState
    cuCoredumpGetAttribute cuCoredumpGetAttributeGlobal
    cuCoredumpSetAttribute cuCoredumpSetAttributeGlobal cuCtxGetApiVersion cuCtxGetCacheConfig cuCtxGetDevice_v2
    cuCtxGetDevResource cuCtxGetExecAffinity cuCtxGetFlags cuCtxGetId cuCtxGetSharedMemConfig
    cuCtxGetStreamPriorityRange cuCtxResetPersistingL2Cache cuCtxSetCacheConfig cuCtxSetFlags
    cuCtxSetSharedMemConfig cuCtxSynchronize_v2 cuCtxWaitEvent cuDestroyExternalMemory
    cuDestroyExternalSemaphore cuDeviceComputeCapability cuDeviceGetByPCIBusId
    cuDeviceGetDevResource cuDeviceGetExecAffinitySupport
    cuDeviceGetHostAtomicCapabilities cuDeviceGetLuid
    cuDeviceGetName cuDeviceGetNvSciSyncAttributes cuDeviceGetP2PAtomicCapabilities cuDeviceGetP2PAttribute
    cuDeviceGetPCIBusId cuDeviceGetProperties cuDeviceGetTexture1DLinearMaxWidth
    cuDevicePrimaryCtxSetFlags cuDevicePrimaryCtxSetFlags_v2
    cuDeviceRegisterAsyncNotification cuDeviceSetGraphMemAttribute
    cuDeviceUnregisterAsyncNotification cuDevResourceGenerateDesc cuDevSmResourceSplitByCount
    cuDriverGetVersion cuEGLApiInit cuEGLStreamConsumerAcquireFrame cuEGLStreamConsumerConnect
    cuEGLStreamConsumerConnectWithFlags cuEGLStreamConsumerDisconnect cuEGLStreamConsumerReleaseFrame
    cuEGLStreamProducerConnect cuEGLStreamProducerDisconnect cuEGLStreamProducerPresentFrame
    cuEGLStreamProducerReturnFrame cuEventDestroy cuEventElapsedTime cuEventElapsedTime_v2
    cuEventRecordWithFlags cuEventRecordWithFlags_ptsz cuEventSynchronize cuExternalMemoryGetMappedBuffer
    cuExternalMemoryGetMappedMipmappedArray cuFlushGPUDirectRDMAWrites cuFuncGetAttribute cuFuncGetModule
    cuFuncGetName cuFuncGetParamInfo cuFuncIsLoaded cuFuncLoad cuFuncSetAttribute cuFuncSetBlockShape
    cuFuncSetCacheConfig cuFuncSetSharedMemConfig cuFuncSetSharedSize cuGetErrorName cuGetErrorString
    cuGetExportTable cuGLCtxCreate cuGLCtxCreate_v2 cuGLGetDevices cuGLGetDevices_v2 cuGLInit
    cuGLMapBufferObject cuGLMapBufferObjectAsync cuGLMapBufferObjectAsync_v2 cuGLMapBufferObjectAsync_v2_ptsz
    cuGLMapBufferObject_v2 cuGLMapBufferObject_v2_ptds cuGLRegisterBufferObject cuGLSetBufferObjectMapFlags
    cuGLUnmapBufferObject cuGLUnmapBufferObjectAsync cuGLUnregisterBufferObject
    cuGraphAddChildGraphNode cuGraphAddDependencies cuGraphAddDependencies_v2 cuGraphAddEmptyNode
    cuGraphAddEventRecordNode cuGraphAddEventWaitNode cuGraphAddExternalSemaphoresSignalNode
    cuGraphAddExternalSemaphoresWaitNode cuGraphAddHostNode cuGraphAddKernelNode cuGraphAddKernelNode_v2
     cuGraphAddMemFreeNode
    cuGraphBatchMemOpNodeGetParams
    cuGraphChildGraphNodeGetGraph cuGraphClone cuGraphConditionalHandleCreate cuGraphCreate
    cuGraphDebugDotPrint cuGraphDestroy cuGraphDestroyNode cuGraphEventRecordNodeGetEvent
    cuGraphEventRecordNodeSetEvent cuGraphEventWaitNodeGetEvent cuGraphEventWaitNodeSetEvent
    cuGraphExecDestroy
    cuGraphExecEventRecordNodeSetEvent cuGraphExecEventWaitNodeSetEvent
    cuGraphExecExternalSemaphoresSignalNodeSetParams cuGraphExecExternalSemaphoresWaitNodeSetParams
    cuGraphExecGetFlags cuGraphExecHostNodeSetParams cuGraphExecKernelNodeSetParams
    cuGraphExecKernelNodeSetParams_v2

    cuGraphExternalSemaphoresSignalNodeGetParams cuGraphExternalSemaphoresSignalNodeSetParams
    cuGraphExternalSemaphoresWaitNodeGetParams cuGraphExternalSemaphoresWaitNodeSetParams cuGraphGetEdges
    cuGraphGetEdges_v2 cuGraphGetNodes cuGraphGetRootNodes cuGraphHostNodeGetParams cuGraphHostNodeSetParams
    cuGraphicsEGLRegisterImage cuGraphicsGLRegisterBuffer cuGraphicsGLRegisterImage cuGraphicsMapResources
    cuGraphicsMapResources_ptsz cuGraphicsResourceGetMappedEglFrame cuGraphicsResourceGetMappedMipmappedArray
    cuGraphicsResourceGetMappedPointer cuGraphicsResourceGetMappedPointer_v2 cuGraphicsResourceSetMapFlags
    cuGraphicsResourceSetMapFlags_v2 cuGraphicsSubResourceGetMappedArray cuGraphicsUnmapResources
    cuGraphicsUnmapResources_ptsz cuGraphicsUnregisterResource cuGraphicsVDPAURegisterOutputSurface
    cuGraphicsVDPAURegisterVideoSurface
      cuGraphKernelNodeCopyAttributes
    cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams cuGraphKernelNodeGetParams_v2
    cuGraphKernelNodeSetAttribute cuGraphKernelNodeSetParams cuGraphKernelNodeSetParams_v2
    cuGraphMemAllocNodeGetParams cuGraphMemcpyNodeGetParams
    cuGraphMemFreeNodeGetParams cuGraphMemsetNodeGetParams cuGraphNodeFindInClone
    cuGraphNodeGetDependencies cuGraphNodeGetDependencies_v2 cuGraphNodeGetDependentNodes
    cuGraphNodeGetDependentNodes_v2 cuGraphNodeGetEnabled cuGraphNodeGetType cuGraphNodeSetEnabled
     cuGraphReleaseUserObject cuGraphRemoveDependencies cuGraphRemoveDependencies_v2
    cuGraphRetainUserObject cuGreenCtxGetDevResource cuGreenCtxGetId
    cuGreenCtxRecordEvent cuGreenCtxWaitEvent
    cuImportExternalSemaphore cuIpcGetEventHandle cuIpcOpenEventHandle
    cuKernelGetAttribute cuKernelGetFunction cuKernelGetLibrary
    cuKernelGetName cuKernelGetParamInfo cuKernelSetAttribute cuKernelSetCacheConfig
    cuLibraryEnumerateKernels cuLibraryGetGlobal cuLibraryGetKernel
    cuLibraryGetKernelCount cuLibraryGetManaged cuLibraryGetModule cuLibraryGetUnifiedFunction
    cuLibraryLoadData cuLibraryLoadFromFile cuLibraryUnload cuLinkAddData cuLinkAddData_v2 cuLinkAddFile
    cuLinkAddFile_v2 cuLinkComplete cuLinkCreate cuLinkCreate_v2 cuLinkDestroy cuLogsCurrent cuLogsDumpToFile
    cuLogsDumpToMemory cuLogsRegisterCallback cuLogsUnregisterCallback cuMemAdvise cuMemAdvise_v2
    cuMemAllocHost cuMemAllocHost_v2
    cuMemFreeHost cuMemGetAddressRange
    cuMemGetAllocationGranularity
    cuMemGetAttribute cuMemGetAttribute_v2
    cuMemHostAlloc cuMemHostGetDevicePointer cuMemHostGetDevicePointer_v2 cuMemHostGetFlags
    cuMemHostRegister
    cuMemPoolSetAccess cuMemRangeGetAttribute cuMemRangeGetAttributes
    cuMipmappedArrayGetLevel cuMipmappedArrayGetMemoryRequirements
    cuMipmappedArrayGetSparseProperties cuModuleEnumerateFunctions
    cuModuleGetFunctionCount cuModuleGetGlobal cuModuleGetGlobal_v2 cuModuleGetLoadingMode cuModuleGetSurfRef
    cuModuleGetTexRef cuModuleLoad cuModuleLoadDataEx cuModuleLoadFatBinary cuModuleUnload
    cuMulticastAddDevice cuMulticastCreate cuMulticastGetGranularity
    cuMulticastUnbind cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxActiveClusters
    cuOccupancyMaxPotentialBlockSize cuOccupancyMaxPotentialBlockSizeWithFlags
    cuOccupancyMaxPotentialClusterSize cuParamSetf cuParamSeti cuParamSetSize cuParamSetTexRef cuParamSetv
    cuProfilerInitialize cuProfilerStart
    cuProfilerStop cuSignalExternalSemaphoresAsync cuSignalExternalSemaphoresAsync_ptsz
    cuStreamAttachMemAsync cuStreamAttachMemAsync_ptsz cuStreamCopyAttributes
    cuStreamCopyAttributes_ptsz cuStreamGetAttribute cuStreamGetAttribute_ptsz cuStreamGetCaptureInfo
    cuStreamGetCaptureInfo_ptsz cuStreamGetCaptureInfo_v2 cuStreamGetCaptureInfo_v2_ptsz
    cuStreamGetCaptureInfo_v3 cuStreamGetCaptureInfo_v3_ptsz cuStreamGetCtx_ptsz cuStreamGetCtx_v2
    cuStreamGetCtx_v2_ptsz cuStreamGetDevice cuStreamGetDevice_ptsz cuStreamGetFlags cuStreamGetFlags_ptsz cuStreamGetGreenCtx
    cuStreamGetId cuStreamGetId_ptsz cuStreamGetPriority cuStreamGetPriority_ptsz cuStreamIsCapturing_ptsz
    cuStreamQuery_ptsz cuStreamSetAttribute cuStreamSetAttribute_ptsz cuStreamSynchronize_ptsz
    cuStreamUpdateCaptureDependencies cuStreamUpdateCaptureDependencies_ptsz
    cuStreamUpdateCaptureDependencies_v2 cuStreamUpdateCaptureDependencies_v2_ptsz cuSurfObjectCreate cuSurfObjectDestroy cuSurfObjectGetResourceDesc
    cuSurfRefGetArray cuSurfRefSetArray cuTensorMapEncodeIm2col cuTensorMapEncodeIm2colWide
    cuTensorMapEncodeTiled cuTensorMapReplaceAddress cuTexObjectCreate cuTexObjectDestroy
    cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc cuTexRefCreate
    cuTexRefDestroy cuTexRefGetAddress cuTexRefGetAddressMode cuTexRefGetAddress_v2 cuTexRefGetArray
    cuTexRefGetBorderColor cuTexRefGetFilterMode cuTexRefGetFlags cuTexRefGetFormat cuTexRefGetMaxAnisotropy
    cuTexRefGetMipmapFilterMode cuTexRefGetMipmapLevelBias cuTexRefGetMipmapLevelClamp
    cuTexRefGetMipmappedArray cuTexRefSetAddress cuTexRefSetAddress2D cuTexRefSetAddress2D_v2
    cuTexRefSetAddress2D_v3 cuTexRefSetAddressMode cuTexRefSetAddress_v2 cuTexRefSetArray
    cuTexRefSetBorderColor cuTexRefSetFilterMode cuTexRefSetFlags cuTexRefSetFormat cuTexRefSetMaxAnisotropy
    cuTexRefSetMipmapFilterMode cuTexRefSetMipmapLevelBias cuTexRefSetMipmapLevelClamp
    cuTexRefSetMipmappedArray cuUserObjectCreate cuUserObjectRelease cuUserObjectRetain cuVDPAUCtxCreate
    cuVDPAUCtxCreate_v2 cuVDPAUGetDevice cuWaitExternalSemaphoresAsync cuWaitExternalSemaphoresAsync_ptsz
    cuCheckpointOperationComplete cuCoredumpDeregisterCompleteCallback cuCoredumpDeregisterStartCallback
    cuCoredumpRegisterCompleteCallback cuCoredumpRegisterStartCallback cuDevSmResourceSplit
    cuDeviceGetCliqueCount cuDeviceGetCliqueInfo cuDeviceGetFabricClusterUuid cuEventCreateFromEGLSync
    cuFuncGetParamCount cuGraphExecGetId cuGraphGetId cuGraphNodeGetContainingGraph
    cuGraphNodeGetLocalId cuGraphNodeGetParams cuGraphNodeGetToolsId cuKernelGetParamCount
    cuLogicalEndpointAddDevice cuLogicalEndpointCreate cuLogicalEndpointDestroy cuLogicalEndpointExport
    cuLogicalEndpointGetLimits cuLogicalEndpointIdRelease cuLogicalEndpointIdReserve cuLogicalEndpointImport
    cuLogicalEndpointQuery cuLogicalEndpointUnbind cuMemGetLocationInfo cuStreamGetDevResource
    cuStreamGetDevResource_ptsz cuTensorMapSetAllocationClass cuWGLGetDevice
}
} };
}

pub(crate) use entry_points;
