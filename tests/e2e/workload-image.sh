#!/usr/bin/env bash
# Makes the image of a program that uses a GPU: the workload, the simulated driver unless BUILD has none (for real GPUs), the
# C library of this machine, and a shell. Needs podman.
#
#   tests/e2e/workload-image.sh BUILD NAME [FOLDER]    BUILD: a folder with nvshare-workload and libcuda.so (target/debug)
#                                                      NAME: the image's; FOLDER: what else belongs into it
set -euo pipefail
build=$(realpath "${1:?a folder with nvshare-workload}")
name=${2:?the name of the image}
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
root=$here/root
mkdir -p "$root"/{bin,etc/pam.d,home/user,lib,opt,sim,tmp,usr/lib}
cp "$build/nvshare-workload" "$root/opt/"
[ ! -e "$build/libcuda.so" ] || cp "$build/libcuda.so" "$root/usr/lib/libcuda.so.1"
# Programs that start others without their variables, and what su needs.
programs=()
for program in sh cat chmod date env sleep su touch; do programs+=("$(command -v $program)"); done
cp -L "${programs[@]}" "$root/bin/"
modules=$(echo /lib/*/security)
mkdir -p "$root$modules"
cp "$modules/pam_permit.so" "$root$modules/"
for kind in auth account session; do echo "$kind required pam_permit.so"; done >"$root/etc/pam.d/su"
cp "$root/etc/pam.d/su" "$root/etc/pam.d/su-l"
printf 'root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\nuser:x:1000:\n' >"$root/etc/group"
ldd "$build/nvshare-workload" "${programs[@]}" "$modules/pam_permit.so" | grep -o '/[^ :]*\.so[^ :]*' |
    grep -v /security/ | sort -u |
    while read -r library; do mkdir -p "$root$(dirname "$library")"; cp -L "$library" "$root$library"; done
# The library may need what newer C libraries have for older programs alone.
libc=$(dirname "$(ldd "$build/nvshare-workload" | grep -o '/[^ ]*libc\.so\.6')")
for stub in libpthread.so.0 libdl.so.2 librt.so.1; do cp -L "$libc/$stub" "$root$libc/"; done
[ -z "${3:-}" ] || cp -a "$3/." "$root/"
# A card of 1 GiB, which those share that have the same folder there.
cat >"$here/Containerfile" <<'END'
FROM scratch
COPY root/ /
ENV PATH=/opt:/bin NVSIM_DIR=/sim NVSIM_MEMORY=1GiB NVSIM_SCALE=64
END
chmod 1777 "$root/sim" "$root/tmp"
podman build --quiet --tag "$name" --file "$here/Containerfile" "$here" >/dev/null
