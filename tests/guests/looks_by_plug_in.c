/* It looks at a GPU by a plug-in that is linked to NVML, which is in the plug-in's scope alone unless a second word says `global`. */
#include "guest.h"
int main(int count, char **arguments) {
    EXPECT(count >= 2);
    void *plug_in = dlopen(arguments[1], RTLD_NOW | (count > 2 ? RTLD_GLOBAL : RTLD_LOCAL));
    EXPECT(plug_in != NULL);
    int (*look)() = dlsym(plug_in, "look");
    uint64_t memory[3];
    unsigned index;
    CHECK(look((void *)16, memory, &index));
    printf("%lu of %lu\n", memory[2] / MIB, memory[0] / MIB);
    return 0;
}
