/* A program with an allocator of its own, such as jemalloc: its first use looks symbols up, and the look-up must not call the
   allocator again. */
#include "guest.h"
#include <errno.h>
#include <sys/mman.h>
static char *arena;
static size_t used;
static __thread int looking;
static void *(*next_calloc)(size_t, size_t);
static int own_allocations;

static void set_up(void) {
    static volatile int state;
    if (state == 2) return;
    if (looking) { write(2, "a look-up allocates\n", 20); _exit(1); }
    looking = 1;
    arena = mmap(NULL, 1ul << 32, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    next_calloc = dlsym(RTLD_NEXT, "calloc");
    if (!dlsym(RTLD_NEXT, "pthread_create") || !next_calloc) _exit(1);
    looking = 0;
    state = 2;
}

void *aligned_alloc(size_t alignment, size_t bytes) {
    set_up();
    size_t whole = (bytes + alignment + 31) & ~15ul;
    char *at = arena + __sync_fetch_and_add(&used, whole) + 16;
    at = (char *)(((uintptr_t)at + alignment - 1) & ~(alignment - 1));
    ((size_t *)at)[-1] = bytes;
    __sync_fetch_and_add(&own_allocations, 1);
    return at;
}
void *malloc(size_t bytes) { return aligned_alloc(16, bytes); }
void *memalign(size_t alignment, size_t bytes) { return aligned_alloc(alignment, bytes); }
int posix_memalign(void **place, size_t alignment, size_t bytes) { return *place = aligned_alloc(alignment, bytes), 0; }
void *calloc(size_t count, size_t bytes) { return memset(malloc(count * bytes), 0, count * bytes); }
void free(void *memory) { if (memory) memset(memory, 0x5a, ((size_t *)memory)[-1]); }
void *realloc(void *old, size_t bytes) {
    void *new = malloc(bytes);
    size_t before = old ? ((size_t *)old)[-1] : 0;
    if (old) memcpy(new, old, before < bytes ? before : bytes), free(old);
    return new;
}

static void *work(void *argument) {
    CHECK(FN(cuCtxSetCurrent)(context));
    for (int i = 0; i < 50; i++) {
        uint64_t base = alloc(MIB);
        CHECK(launch(base, 64, 10, NULL));
        CHECK(FN(cuMemFree_v2)(base));
    }
    return argument;
}

int main(void) {
    start();
    load_kernel();
    in_threads(4, work);
    CHECK(FN(cuCtxSynchronize)());
    EXPECT(own_allocations > 100);
    return 0;
}
