#!/bin/sh
# Builds the samples into bin/: NVCC=/path/to/nvcc tests/gpu/samples/build.sh [SAMPLE...]. A driver is not needed: where a sample
# links it, a stand-in with the names it uses is linked instead. `// build: FLAGS` and `// also NAME: FLAGS` in a sample are obeyed.
set -eu
cd "$(dirname "$0")"
nvcc=${NVCC:-nvcc}
root=$(cd "$(dirname "$(command -v "$nvcc")")/.." && pwd)
lib=$root/lib64; [ -e "$lib/libcudart_static.a" ] || lib=$root/lib
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p bin

build() { # output, source, flags
    "$nvcc" -O2 -std=c++17 -arch="${ARCH:-sm_90}" -Wno-deprecated-gpu-targets -Xcompiler -w $3 -c "$2" -o "$work/$1.o" || return 1
    link=
    names=$(nm -u "$work/$1.o" | sed -n 's/^ *U \(cu[A-Z][A-Za-z0-9_]*\)$/\1/p')
    if [ -n "$names" ]; then
        for n in $names; do echo "int $n(void) { return 999; }"; done > "$work/cuda.c"
        gcc -shared -fPIC -Wl,-soname,libcuda.so.1 "$work/cuda.c" -o "$work/libcuda.so"
        link="-L$work -lcuda"
    fi
    case $3 in *"cudart shared"*) cp "$lib"/libcudart.so.1[0-9] bin/; ln -sf "$(ls "$lib"/libcudart.so.1[0-9])" "$work/libcudart.so"; link="$link -L$work -Xlinker -rpath=\$ORIGIN";; esac
    "$nvcc" -arch="${ARCH:-sm_90}" -Wno-deprecated-gpu-targets $3 "$work/$1.o" -o "bin/$1" -L"$lib" $link -ldl -lpthread || return 1
    rm "$work/$1.o"
}

for source in ${*:-*.cu}; do
    name=$(basename "$source" .cu); source=$name.cu
    flags=$(sed -n 's,^// build: ,,p' "$source")
    build "$name" "$source" "$flags" || { echo "$name does not build" >&2; failed=1; continue; }
    sed -n 's,^// also \([a-z]*\): ,\1 ,p' "$source" | while read -r also more; do build "$name-$also" "$source" "$flags $more"; done
done
du -sh bin
exit "${failed:-0}"
