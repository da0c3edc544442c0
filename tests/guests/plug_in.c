/* It loads a plug-in, which looks for a function of its own. */
#include "guest.h"
int main(int count, char **arguments) {
    EXPECT(count == 2);
    CHECK(FN(cuInit)(0));
    void *plug_in = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    EXPECT(plug_in != NULL);
    int (*finds)(void) = (int (*)(void))dlsym(plug_in, "finds_own_name");
    EXPECT(finds && finds());
    return 0;
}
