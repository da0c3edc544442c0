#!/usr/bin/env bash
# Runs the image as a cluster would: the scheduler in one container, clients in others, without root, without
# capabilities, read-only, on the simulated GPU. Needs root, podman and runc; what is missing is an error.
#
#   tests/e2e/containers.sh IMAGE BUILD     IMAGE: of `cargo image` with the tools of a portable build at hand
#                                           BUILD: a folder with nvshare-workload and libcuda.so (target/debug)
set -euo pipefail
image=${1:?the image}
build=$(realpath "${2:?a folder with nvshare-workload and libcuda.so}")
cd "$(dirname "$0")/../.."

for program in podman runc cc; do
    command -v "$program" >/dev/null || { echo "$program is missing"; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo 'this needs root'; exit 1; }
musl=$(command -v musl-gcc) || { echo 'musl-gcc is missing'; exit 1; }

here=$(mktemp -d /tmp/nvshare-containers.XXXXXX)
tag=nvshare-containers-$$
device=/etc/cdi/$tag.json
mkdir -p /etc/cdi
clean() {
    podman ps --all --quiet --filter "label=nvshare-test=$tag" | xargs --no-run-if-empty podman rm --force --time 0 >/dev/null
    podman rmi --force "localhost/$tag" >/dev/null 2>&1 || true
    rm -rf "$here" "$device"
}
trap clean EXIT
fail() { echo "FAILED: $*"; podman logs "$tag-scheduler" 2>&1 | tail -20 || true; exit 1; }
step() { printf '%s\n' "- $*"; }

# A client's image: the workload, the simulated driver, the C library, and a program for musl.
root=$here/client
mkdir -p "$root/opt" "$root/usr/lib" "$root/lib" "$root/tmp" "$here"/{run,admin,lib,sim,out}
cp "$build/nvshare-workload" "$root/opt/"
cp "$build/libcuda.so" "$root/usr/lib/libcuda.so.1"
ldd "$build/nvshare-workload" "$build/libcuda.so" | grep -o '/[^ :]*\.so[^ :]*' | grep -v "^$build" | sort -u |
    while read -r library; do mkdir -p "$root$(dirname "$library")"; cp -L "$library" "$root$library"; done
# The library may need what newer C libraries have for older programs alone.
libc=$(dirname "$(ldd "$build/nvshare-workload" | grep -o '/[^ ]*libc\.so\.6')")
for stub in libpthread.so.0 libdl.so.2 librt.so.1; do cp -L "$libc/$stub" "$root$libc/"; done
printf '#include <stdio.h>\nint main(void) { puts("alive"); return 0; }\n' >"$here/alive.c"
cc -o "$root/opt/alive" "$here/alive.c"
cc -o "$root/opt/preload" -x c - <<<'#include <stdio.h>
#include <stdlib.h>
int main(void) { puts(getenv("LD_PRELOAD")); return 0; }'
"$musl" -o "$root/opt/alive-musl" "$here/alive.c"
cp -L /lib/ld-musl-*.so.1 "$root/lib/"
cc -shared -fPIC -o "$root/opt/own.so" -x c - <<<'int own(void) { return 1; }'
printf 'FROM scratch\nCOPY client/ /\n' >"$here/Containerfile"
podman build --quiet --tag "localhost/$tag" --file "$here/Containerfile" "$here" >/dev/null
chmod 777 "$here/sim" "$here/out"

run() { # run NAME OPTIONS… : a container of ours
    local name=$1
    shift
    podman run --name "$tag-$name" --label "nvshare-test=$tag" --network none --runtime runc --cap-drop all --read-only \
        --security-opt no-new-privileges --ulimit nofile=4096:4096 --ulimit nproc=4096:4096 "$@"
}
client() { # client NAME OPTIONS… -- COMMAND…
    local name=$1 options=()
    shift
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    run "$name" --user 1000:1000 --volume "$here/lib:/opt/nvshare:ro" --volume "$here/run:/var/run/nvshare:ro" \
        --volume "$here/sim:/sim" --env NVSIM_DIR=/sim --env NVSIM_MEMORY=1GiB --env NVSIM_SCALE=64 \
        --env LD_PRELOAD=/opt/nvshare/libnvshare.so "${options[@]}" "localhost/$tag" "$@"
}
ctl() { podman exec "$tag-scheduler" nvshare-ctl "$@"; }
until_true() { # until_true WHAT COMMAND…
    local what=$1 i
    shift
    for i in $(seq 600); do "$@" && return; sleep 0.1; done
    fail "waited in vain: $what"
}
turns() { ctl status --json | python3 -c 'import json, sys; print(sum(gpu["turns"] for gpu in json.load(sys.stdin)["gpus"]))'; }
turns_of() { [ "$(turns 2>/dev/null || echo 0)" -ge "$1" ]; }

step 'the library goes into a folder, by an image without a shell'
run install --rm --user 0:0 --volume "$here/lib:/out" "$image" nvshare-ctl install-library /out
[ -s "$here/lib/libnvshare.so" ] || fail 'no library'
image_root=$(podman create "$image")
podman cp "$image_root:/usr/share/man/man8/nvshare-scheduler.8" "$here/page" || fail 'no manual page in the image'
podman rm "$image_root" >/dev/null

step 'the scheduler starts with folders for its sockets alone'
run scheduler --detach --user 0:0 --volume "$here/run:/var/run/nvshare" --volume "$here/admin:/var/run/nvshare-admin" \
    "$image" nvshare-scheduler --gpu-memory 1GiB --tq 0.3 --socket /var/run/nvshare/scheduler.sock \
    --admin-socket /var/run/nvshare-admin/admin.sock >/dev/null
until_true 'the scheduler answers' ctl status >/dev/null 2>&1

step 'two that do not fit take turns, as an ordinary user'
job='--memory 768MiB --block 64MiB --kernel-us 1000 --full-check'
# They go on until the file is there.
until_told=(--detach --env STOP=/sim/stop)
for name in a b; do
    # shellcheck disable=SC2086
    client "$name" "${until_told[@]}" -- /opt/nvshare-workload "$name" $job >/dev/null
done
until_true 'turns are taken' turns_of 4

step 'the scheduler is restarted under them'
podman restart --time 2 "$tag-scheduler" >/dev/null
until_true 'turns are taken again' turns_of 4

step 'one that is killed holds nobody up'
# shellcheck disable=SC2086
client killed "${until_told[@]}" -- /opt/nvshare-workload killed $job >/dev/null
until_true 'three clients are there' sh -c "[ \$(podman exec $tag-scheduler nvshare-ctl clients --json | grep -c '\"gone\": false') = 3 ]"
podman kill --signal KILL "$tag-killed" >/dev/null
touch "$here/sim/stop"
for name in a b; do
    code=$(podman wait "$tag-$name")
    out=$(podman logs "$tag-$name" 2>/dev/null)
    [ "$code" = 0 ] || fail "$name ended with $code: $out"
    grep -q '"wrong_words":0' <<<"$out" || fail "$name: $out"
done

step 'programs of a musl image, and those that do not use a GPU, stay alive'
[ "$(client musl --rm -- /opt/alive-musl 2>/dev/null)" = alive ] ||
    fail 'musl: does not start with the library; only the portable build of dist/ does that'
[ "$(client plain --rm -- /opt/alive)" = alive ] || fail 'a program without a GPU'

step 'a container with a preload of its own'
# shellcheck disable=SC2086
client own --rm --env LD_PRELOAD=/opt/own.so:/opt/nvshare/libnvshare.so -- /opt/nvshare-workload own $job --seconds 0.2 >/dev/null ||
    fail 'beside another preload'

step 'a container that asks for a device and nothing else'
dist/bin/nvshare-ctl --socket "$here/run/scheduler.sock" cdi generate --library "$here/lib/libnvshare.so" >"$device"
# shellcheck disable=SC2086
run device --detach --user 1000:1000 --device nvshare.com/gpu=all --volume "$here/sim:/sim" --env NVSIM_DIR=/sim --env NVSIM_MEMORY=1GiB --env NVSIM_SCALE=64 \
    --env STOP=/sim/stop-device "localhost/$tag" /opt/nvshare-workload device $job >/dev/null || fail 'the device'
until_true 'the container is a client' sh -c "[ \$(podman exec $tag-scheduler nvshare-ctl clients --json | grep -c '\"gone\": false') = 1 ]"
touch "$here/sim/stop-device"
[ "$(run preload --rm --device nvshare.com/gpu=all --env LD_PRELOAD=/opt/own.so "localhost/$tag" /opt/preload)" = /usr/lib/nvshare/libnvshare.so ] ||
    fail "the device's variable does not replace the container's own"
code=$(podman wait "$tag-device")
[ "$code" = 0 ] || fail "the device's container ended with $code: $(podman logs "$tag-device" 2>&1)"

step 'without the folder of the sockets, and with one where nobody listens, a program runs alone'
# Without a scheduler a program gets what is free. The simulated card knows processes by their numbers, which mean another
# process in each container, and so has not noticed that one was killed: here is another card.
mkdir -m 777 "$here/sim/alone"
for sockets in /nowhere /var/run/nvshare/none.sock; do
    client "alone" --rm --env NVSIM_DIR=/sim/alone --env "NVSHARE_SOCKET=$sockets" -- /opt/nvshare-workload alone --memory 128MiB --block 64MiB \
        --full-check --seconds 0.2 >"$here/log" 2>&1 || fail "alone: $(cat "$here/log")"
    grep -q "no scheduler at $sockets" "$here/log" || fail "it does not say so: $(cat "$here/log")"
done

step 'a scheduler that may not write its folders says so and ends'
ends() { # ends WHAT EXPECTED OPTIONS… : it ends with a line that has EXPECTED
    local what=$1 expected=$2
    shift 2
    if run other --rm "$@" "$image" nvshare-scheduler --socket /var/run/nvshare/scheduler.sock \
        --admin-socket /var/run/nvshare-admin/admin.sock >"$here/log" 2>&1; then fail "$what: it ran"; fi
    [ "$(wc -l <"$here/log")" = 1 ] && grep -q "ERROR /var/run/nvshare.*$expected" "$here/log" || fail "$what: $(cat "$here/log")"
}
mkdir -m 755 "$here/mine"
ends 'without folders' 'Read-only file system'
ends 'without folders, as root' 'Read-only file system' --user 0:0
ends 'with read-only folders' 'Read-only file system' --user 0:0 --volume "$here/mine:/var/run/nvshare:ro" --volume "$here/mine:/var/run/nvshare-admin:ro"
ends 'as another user' 'Permission denied' --user 1234:1234 --volume "$here/mine:/var/run/nvshare" --volume "$here/mine:/var/run/nvshare-admin"
[ -z "$(ls -A "$here/mine")" ] || fail "left: $(ls -A "$here/mine")"

echo 'containers: all as it should be'
