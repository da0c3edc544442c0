#!/usr/bin/env bash
# Whether dist/ runs where it is meant to run: an old glibc, no libgcc_s, under musl. Needs musl-gcc, readelf, objdump.
set -euo pipefail
cd "$(dirname "$0")/.."
library=$PWD/dist/lib/nvshare/libnvshare.so
failed=0
fail() { echo "portable.sh: $1" >&2; failed=1; }

for file in "$library" dist/bin/*; do
    newest=$(objdump -T "$file" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1)
    [ "$(printf '%s\nGLIBC_2.17\n' "$newest" | sort -V | tail -1)" = GLIBC_2.17 ] || fail "$file needs $newest"
    if readelf -d "$file" | grep NEEDED | grep -q libgcc_s; then fail "$file needs libgcc_s"; fi
    echo "$(basename "$file"): $newest"
done
readelf -d "$library" | grep NEEDED | grep -q ld-linux && fail 'the library needs the loader by name'
diff <(nm -D --defined-only -f posix "$library" | cut -d' ' -f1 | LC_ALL=C sort) tests/e2e/tests/golden/exports.txt || fail 'exports'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo 'int main(void) { return 42; }' > "$work/program.c"
musl-gcc -o "$work/musl" "$work/program.c"
cc -o "$work/glibc" "$work/program.c"
for program in musl glibc; do
    status=0
    LD_PRELOAD=$library "$work/$program" || status=$?
    [ $status = 42 ] || fail "a $program program ends with $status"
done
# What unwinds through the library is the host's, by the host's unwinder.
cc -w -shared -fPIC -fexceptions -o "$work/libcuda.so.1" tests/guests/odd_driver.c
cc -w -pthread -o "$work/cancel" tests/guests/cancel_inside.c -ldl
NVSHARE_LOG=error NVSHARE_SOCKET=$work/none LD_LIBRARY_PATH=$work LD_PRELOAD=$library "$work/cancel" || fail 'a cancelled thread'
exit $failed
