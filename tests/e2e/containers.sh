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
kubelet=
clean() {
    [ -z "$kubelet" ] || kill "$kubelet" || true
    podman ps --all --quiet --filter "label=nvshare-test=$tag" | xargs --no-run-if-empty podman rm --force --time 0 >/dev/null
    podman rmi --force "localhost/$tag" >/dev/null 2>&1 || true
    rm -rf "$here" /etc/cdi/"$tag"*.json
}
trap clean EXIT
fail() { echo "FAILED: $*"; podman logs "$tag-scheduler" 2>&1 | tail -20 || true; exit 1; }
step() { printf '%s\n' "- $*"; }

# The client's image has a program for musl as well, and what else the steps need.
more=$here/client
mkdir -p "$more"/{opt,lib} "$here"/{run,admin,seats,state,lib,sim,out}
printf '#include <stdio.h>\nint main(void) { puts("alive"); return 0; }\n' >"$here/alive.c"
cc -o "$more/opt/alive" "$here/alive.c"
cc -o "$more/opt/preload" -x c - <<<'#include <stdio.h>
#include <stdlib.h>
int main(void) { puts(getenv("LD_PRELOAD")); return 0; }'
"$musl" -o "$more/opt/alive-musl" "$here/alive.c"
cp -L /lib/ld-musl-*.so.1 "$more/lib/"
cc -shared -fPIC -o "$more/opt/own.so" -x c - <<<'int own(void) { return 1; }'
tests/e2e/workload-image.sh "$build" "localhost/$tag" "$more"
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
        --volume "$here/sim:/sim" --env LD_PRELOAD=/opt/nvshare/libnvshare.so "${options[@]}" "localhost/$tag" "$@"
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
    --volume "$here/seats:/var/run/nvshare-seats" --volume "$here/state:/var/lib/nvshare" \
    "$image" nvshare-scheduler --state /var/lib/nvshare/state.toml --gpu-memory 1GiB --tq 0.3 --socket /var/run/nvshare/scheduler.sock \
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
run device --detach --user 1000:1000 --device nvshare.com/gpu=all --volume "$here/sim:/sim" \
    --env STOP=/sim/stop-device "localhost/$tag" /opt/nvshare-workload device $job >/dev/null || fail 'the device'
until_true 'the container is a client' sh -c "[ \$(podman exec $tag-scheduler nvshare-ctl clients --json | grep -c '\"gone\": false') = 1 ]"
touch "$here/sim/stop-device"
[ "$(run preload --rm --device nvshare.com/gpu=all --env LD_PRELOAD=/opt/own.so "localhost/$tag" /opt/preload)" = /usr/lib/nvshare/libnvshare.so ] ||
    fail "the device's variable does not replace the container's own"
code=$(podman wait "$tag-device")
[ "$code" = 0 ] || fail "the device's container ended with $code: $(podman logs "$tag-device" 2>&1)"

step 'containers with seats, by the device plugin: each has its name and its limit'
gpu=GPU-51600000-0000-4000-8000-000000000000
mkdir -p "$here"/{gpus/card,cdi,etc-cdi,kubelet/kubelet/device-plugins,kubelet/kubelet/pod-resources}
mkdir -m 777 "$here/sim-seats"
echo "GPU UUID: $gpu" >"$here/gpus/card/information"
# As NVIDIA's toolkit describes a GPU. The image has the driver already.
cat >"$here/etc-cdi/nvidia.json" <<END
{"cdiVersion": "0.3.0", "kind": "nvidia.com/gpu", "devices": [{"name": "$gpu", "containerEdits": {"mounts":
    [{"hostPath": "$here/sim-seats", "containerPath": "/sim", "options": ["rw", "bind"]}]}}]}
END
"$build/examples/kubelet" "$here/kubelet" "one=$gpu::0" "two=$gpu::1" >"$here/given" &
kubelet=$!
run plugin --detach --user 0:0 --volume "$here/kubelet/kubelet:/var/lib/kubelet" --volume "$here/admin:/var/run/nvshare-admin:ro" \
    --volume "$here/state:/var/lib/nvshare" --volume "$here/cdi:/var/run/cdi" --volume "$here/etc-cdi:/etc/cdi:ro" --volume "$here/gpus:/gpus:ro" \
    "$image" nvshare-device-plugin --library /usr/lib/nvshare/libnvshare.so --gpu-descriptions /gpus --slots 2 --slot-memory 512MiB \
    --preload file >/dev/null
are_given() { [ "$(wc -l <"$here/given")" = 2 ]; }
until_true 'two seats are given' are_given
# The folders are elsewhere here.
sed "/hostPath/ { s,/var/run/nvshare-seats,$here/seats,; s,/var/lib/nvshare/lib,$here/state/lib,; }" "$here/cdi/nvshare.com-gpu.json" >/etc/cdi/"$tag-seats.json"
cp "$here/etc-cdi/nvidia.json" /etc/cdi/"$tag-nvidia.json"
seat() { # seat POD NUMBER OPTIONS… -- COMMAND…: a container with what the kubelet asks the engine for
    local name=$1 devices=() options=()
    for word in $(sed -n "$2p" "$here/given"); do devices+=(--device "$word"); done
    shift 2
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    run "$name" "${devices[@]}" "${options[@]}" "localhost/$tag" "$@"
}
held() { # held POD : the limit of its seat, and how many clients it has
    ctl status --json | python3 -c "import json, sys
print(*[(s['seat']['given']['memory'] >> 20, len(s['clients'])) for s in json.load(sys.stdin)['seats'] if s['holder'] and s['holder']['pod'] == '$1'])"
}
holds() { [ "$(held "$1" 2>/dev/null)" = "(512, 1)" ]; }
seat one 1 --detach --user 1000:1000 --tmpfs /tmp:mode=1777 --env STOP=/tmp/stop -- /opt/nvshare-workload one --memory 384MiB --block 64MiB --full-check >/dev/null
until_true 'the seat has its name, its limit and one client' holds one
bare='env -i NVSIM_DIR=/sim NVSIM_MEMORY=1GiB NVSIM_SCALE=64 /opt/nvshare-workload second --block 32MiB --steps 2 --full-check --memory'
limited() { # limited WHAT : a second process of the seat, without any variable of nvshare, has what is left
    # shellcheck disable=SC2086
    podman exec "$tag-one" $bare 96MiB >"$here/log" 2>&1 || fail "$1: $(cat "$here/log")"
    grep -q '"total":536870912' "$here/log" || fail "$1: it sees more than the seat's memory: $(cat "$here/log")"
    # shellcheck disable=SC2086
    if podman exec "$tag-one" $bare 192MiB >"$here/log" 2>&1; then fail "$1: more than the seat's memory"; fi
    grep -q 'CUDA error 2"' "$here/log" || fail "$1: $(cat "$here/log")"
}
limited 'at first'
# shellcheck disable=SC2086
if podman exec "$tag-one" ${bare/env -i/env -i NVSHARE_SOCKET=/nowhere} 192MiB >"$here/log" 2>&1; then fail "with another socket: more than the seat's memory"; fi
grep -q 'NVSHARE_SOCKET=/nowhere has no effect: this container has a seat' "$here/log" || fail "with another socket: $(cat "$here/log")"
for shell in "su user -c" "su - user -c"; do
    # shellcheck disable=SC2086
    seat two 2 --rm --user 0:0 --cap-add setuid,setgid -- $shell "exec $bare 96MiB" >"$here/log" 2>&1 || fail "$shell: $(cat "$here/log")"
    grep -q '"total":536870912' "$here/log" || fail "$shell: it sees more than the seat's memory: $(cat "$here/log")"
done
both=()
for word in $(tr " " "\n" <"$here/given" | sort -u); do both+=(--device "$word"); done
if run both --rm --user 1000:1000 "${both[@]}" "localhost/$tag" /opt/nvshare-workload both --memory 96MiB --block 32MiB >"$here/log" 2>&1; then
    fail 'a container with two seats: it ran'
fi
for word in $(grep -o 'seat-[0-9a-f]*' "$here/given"); do
    grep -q "this container has two seats, .*${word#seat-}" "$here/log" || fail "a container with two seats: $(cat "$here/log")"
done
podman restart --time 2 "$tag-scheduler" >/dev/null
until_true 'after a restart of the scheduler the seat has its name, its limit and its client' holds one
limited 'after a restart of the scheduler'
podman exec "$tag-one" touch /tmp/stop
code=$(podman wait "$tag-one")
[ "$code" = 0 ] || fail "the seat's container ended with $code: $(podman logs "$tag-one" 2>&1)"

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

step 'the clean-up refuses while containers have seats; afterwards nothing is left in the folders that it is given'
podman rm --force --time 2 "$tag-scheduler" "$tag-plugin" >/dev/null
clean_up() {
    run clean-up --rm --user 0:0 --volume "$here/state:/var/lib/nvshare" --volume "$here/run:/var/run/nvshare" \
        --volume "$here/seats:/var/run/nvshare-seats" --volume "$here/admin:/var/run/nvshare-admin" --volume "$here/cdi:/var/run/cdi" \
        --volume "$here/kubelet/kubelet/device-plugins:/var/lib/kubelet/device-plugins" \
        --volume "$here/kubelet/kubelet/pod-resources:/var/lib/kubelet/pod-resources:ro" \
        "$image" nvshare-device-plugin --clean-up --admin-socket /var/run/nvshare-admin/admin.sock >"$here/log" 2>&1
}
if clean_up; then fail "while containers have seats: $(cat "$here/log")"; fi
grep -q 'containers that have seats: 2, such as default/one/main' "$here/log" || fail "it refuses: $(cat "$here/log")"
[ -s "$here/state/lib/libnvshare.so" ] || fail 'it refuses, and the library is gone'
kill "$kubelet"
"$build/examples/kubelet" "$here/kubelet" &
kubelet=$!
until_true 'the next kubelet runs no pod' grep -q '"PodDeviceEntries":\[\]' "$here/kubelet/kubelet/device-plugins/kubelet_internal_checkpoint"
clean_up || fail "the clean-up: $(cat "$here/log")"
left=$(find "$here"/{state,run,seats,admin,cdi} "$here/kubelet/kubelet/device-plugins" -mindepth 1 -not -name 'kubelet*')
[ -z "$left" ] || fail "it leaves: $left"

echo 'containers: all as it should be'
