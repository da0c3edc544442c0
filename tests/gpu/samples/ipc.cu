// Memory and events of one process opened by others that were exec'd, in the order that pipes give. Managed memory has no handle:
// an interposer has to have kept memory that has one, or say what the driver says.
#include "check.h"
const size_t N = 4 * MiB;
struct Offer { cudaIpcMemHandle_t memory; cudaIpcEventHandle_t event; };
CHILD(opens) {
    int s = stoi(args[0]), k = stoi(args[1]); auto o = get<Offer>(s); uint32_t *p; cudaEvent_t e;
    CHECK(cudaIpcOpenMemHandle((void **)&p, o.memory, cudaIpcMemLazyEnablePeerAccess)); CHECK(cudaIpcOpenEventHandle(&e, o.event));
    CHECK(cudaStreamWaitEvent(0, e, 0)); for (size_t i : {size_t(0), N - 1}) { uint32_t v; CHECK(cudaMemcpy(&v, p + i, 4, cudaMemcpyDeviceToHost));
    WANT(v == value(i, 1) + k); } add<<<256, 256>>>(p, N, 1u); CHECK(cudaDeviceSynchronize()); CHECK(cudaIpcCloseMemHandle(p)); CHECK(cudaEventDestroy(e));
    put(s, 'x');
}
CASE(children) {
    auto p = device(N); cudaEvent_t e; CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming | cudaEventInterprocess)); Offer o;
    CHECK(cudaIpcGetMemHandle(&o.memory, p)); CHECK(cudaIpcGetEventHandle(&o.event, e)); std::vector<std::pair<pid_t, int>> all;
    for (int i = 0; i < 3; i++) { int s[2]; WANT(!socketpair(AF_UNIX, SOCK_STREAM, 0, s)); all.push_back({start("opens", s[1], i), s[0]}); close(s[1]); }
    fill<<<256, 256>>>(p, N, 1); CHECK(cudaEventRecord(e)); for (auto [pid, s] : all) { put(s, o); WANT(get<char>(s) == 'x'); WANT(!result(pid)); }
    for (size_t i : {size_t(0), N / 2, N - 1}) { uint32_t v; CHECK(cudaMemcpy(&v, p + i, 4, cudaMemcpyDeviceToHost)); WANT(v == value(i, 1) + 3); }
    CHECK(cudaFree(p));
}
CASE(small_and_inside) {  // opening one's own is an error
    cudaIpcMemHandle_t a, b; auto p = device<char>(1000); SAY(cudaIpcGetMemHandle(&a, p)); auto q = device<char>(8 * MiB); SAY(cudaIpcGetMemHandle(&a, q));
    SAY(cudaIpcGetMemHandle(&b, q + 4096)); printf("same %d\n", !memcmp(&a, &b, sizeof a)); void *r;
    SAY(cudaIpcOpenMemHandle(&r, a, cudaIpcMemLazyEnablePeerAccess)); cudaGetLastError();
}
CASE(mistakes) {
    cudaIpcMemHandle_t h; void *m, *s, *p; CHECK(cudaMallocHost(&p, 4096)); CHECK(cudaMallocManaged(&m, MiB)); CHECK(cudaMallocAsync(&s, MiB, 0));
    CHECK(cudaDeviceSynchronize()); SAY(cudaIpcGetMemHandle(&h, p)); SAY(cudaIpcGetMemHandle(&h, m)); SAY(cudaIpcGetMemHandle(&h, s));
    SAY(cudaIpcGetMemHandle(&h, nullptr)); SAY(cudaIpcCloseMemHandle(m)); cudaEvent_t e; CHECK(cudaEventCreate(&e)); cudaIpcEventHandle_t eh;
    SAY(cudaIpcGetEventHandle(&eh, e)); cudaGetLastError();
}
CASE(again_after_refusal) {  // a program that frees and tries once more gets what it wants
    auto p = device(N); cudaIpcMemHandle_t h; if (cudaIpcGetMemHandle(&h, p)) { cudaGetLastError(); CHECK(cudaFree(p)); p = device(N);
    CHECK(cudaIpcGetMemHandle(&h, p)); } fill<<<64, 256>>>(p, N, 1); WANT(!wrong_on_device(p, N, 1));
}
