#!/usr/bin/env bash
# Installs, upgrades and removes the Debian package in a Debian of its own, while programs run on the simulated GPU.
# Needs root, debootstrap (and Debian's mirror the first time), systemd-analyze, lintian, cargo-deb; what is missing is an error.
#
#   tests/package.sh BUILD     BUILD: a folder with nvshare-workload and libcuda.so (target/debug)
#                              dist/ and a package of it (cargo deb-local) are there already
set -euo pipefail
build=$(realpath "${1:?a folder with nvshare-workload and libcuda.so}")
cd "$(dirname "$0")/.."
suite=bookworm
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}

fail() { echo "FAILED: $*" >&2; exit 1; }
step() { printf '%s\n' "- $*"; }
for program in debootstrap dpkg-deb systemd-analyze lintian cargo-deb setpriv man; do
    command -v "$program" >/dev/null || fail "$program is missing"
done
[ "$(id -u)" = 0 ] || fail 'this needs root'
deb=$(ls -t target/debian/nvshare_*_*.deb 2>/dev/null | head -1 || true)
[ -n "$deb" ] || fail 'no package: cargo deb-local'
tarball=$(ls -t target/nvshare-*-linux.tar.gz 2>/dev/null | head -1 || true)
[ -n "$tarball" ] || fail 'no tarball: cargo dist-local'

step 'the unit is good, and hardened'
root=$(mktemp -d /tmp/nvshare-package.XXXXXX)
pids=()
clean() {
    [ ${#pids[@]} = 0 ] || kill -KILL "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    ! mountpoint -q "$root/proc" || umount "$root/proc"
    rm -rf "$root"
}
trap clean EXIT
unit=packaging/nvshare-scheduler.service
# `verify` looks for the programs on this machine.
sed 's,^ExecStart=/usr/bin/nvshare-scheduler,ExecStart=/bin/true,' "$unit" >"$root/nvshare-scheduler.service"
SYSTEMD_LOG_LEVEL=warning systemd-analyze verify --man=no "$root/nvshare-scheduler.service" 2>&1 | tee "$root/verify"
[ ! -s "$root/verify" ] || fail 'systemd-analyze verify'
# In tenths: 3.0 at most.
systemd-analyze security --offline=true --threshold=30 "$unit" | tail -1 || fail 'systemd-analyze security'
rm -f "$root"/*

step 'the package is well made'
lintian --allow-root --fail-on error,warning --suppress-tags copyright-without-copyright-notice,initial-upload-closes-no-bugs,wrong-name-for-upstream-changelog "$deb"

step 'a Debian'
base=target/debian/$suite.tar
if [ ! -s "$base" ]; then
    debootstrap --variant=minbase --include=systemd,procps "$suite" "$root" "$mirror" >"$root.log" 2>&1 || { tail "$root.log"; fail debootstrap; }
    rm -f "$root.log"
    tar --create --file "$base.new" --directory "$root" --exclude=./var/cache/apt --exclude=./proc/* . && mv "$base.new" "$base"
else
    tar --extract --file "$base" --directory "$root"
fi
chmod 755 "$root"
mount -t proc proc "$root/proc"
mkdir -p "$root/opt/sim" "$root/opt/lib" "$root/out"
cp "$build/nvshare-workload" "$root/opt/"
cp "$build/libcuda.so" "$root/opt/lib/libcuda.so.1"
chmod 1777 "$root/opt/sim" "$root/out"
in_root() { chroot "$root" "$@"; }
# As systemd would: the unit's user, no right to anything.
scheduler() {
    local line home
    line=$(sed -n 's/^ExecStart=//p' "$root/lib/systemd/system/nvshare-scheduler.service" "$root/usr/lib/systemd/system/nvshare-scheduler.service" 2>/dev/null | head -1)
    home=$(sed -n 's/^Environment=XDG_CONFIG_HOME=//p' "$unit")
    install -d -o "$(in_root id -u nvshare)" -g "$(in_root id -g nvshare)" -m 750 "$root/var/lib/nvshare"
    # shellcheck disable=SC2086
    chroot "$root" setpriv --reuid nvshare --regid nvshare --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
        env -i PATH=/usr/bin:/bin XDG_CONFIG_HOME="$home" $line >>"$root/out/scheduler.log" 2>&1 &
    pid=$!
    pids+=("$pid")
}
job() { # job NAME SECONDS : a program of an ordinary user, by the installed library
    chroot "$root" setpriv --reuid 1000 --regid 1000 --clear-groups env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/ NVSIM_DIR=/opt/sim \
        NVSIM_MEMORY=1GiB NVSIM_SCALE=64 LD_LIBRARY_PATH=/opt/lib STOP=/out/stop nvshare-ctl run -- /opt/nvshare-workload "$1" \
        --memory 768MiB --block 64MiB --kernel-us 1000 --full-check >"$root/out/$1.out" 2>"$root/out/$1.log" &
    pids+=("$!")
    jobs+=("$! $1")
}
until_true() { # until_true WHAT COMMAND…
    local what=$1 i
    shift
    for i in $(seq 600); do "$@" && return; sleep 0.1; done
    tail -n 20 "$root"/out/*.log >&2
    fail "waited in vain: $what"
}
turns() { in_root nvshare-ctl status --json | python3 -c 'import json, sys; print(sum(gpu["turns"] for gpu in json.load(sys.stdin)["gpus"]))'; }
turns_of() { [ "$(turns 2>/dev/null || echo 0)" -ge "$1" ]; }
answers() { in_root nvshare-ctl status >/dev/null 2>&1; }
alive() { local entry; for entry in "${jobs[@]}"; do kill -0 "${entry%% *}" 2>/dev/null || fail "${entry#* } ended: $(cat "$root/out/${entry#* }.log")"; done; }
jobs=()

step 'it is installed; the service has a user, folders, pages and completions'
cp "$deb" "$root/nvshare.deb"
in_root dpkg --install /nvshare.deb >"$root/out/dpkg.log" 2>&1 || { cat "$root/out/dpkg.log"; fail 'dpkg --install'; }
in_root id nvshare >/dev/null
[ "$(stat -c '%a %U' "$root/run/nvshare-admin" | cut -d' ' -f1)" = 700 ] || fail "rights of /run/nvshare-admin"
[ "$(stat -c %a "$root/run/nvshare")" = 755 ] || fail "rights of /run/nvshare"
for page in man1/nvshare-ctl.1 man1/nvshare-ctl-status.1 man8/nvshare-scheduler.8; do
    file=$(ls "$root/usr/share/man/$page"*)
    man --warnings --local-file "$file" 2>&1 >/dev/null | tee "$root/out/man"
    [ ! -s "$root/out/man" ] || fail "$page"
done
[ -s "$root/usr/share/bash-completion/completions/nvshare-ctl" ] || fail 'no completions'
[ -L "$root/etc/systemd/system/multi-user.target.wants/nvshare-scheduler.service" ] || fail 'the service is not enabled'

step 'two programs of an ordinary user take turns under it'
printf 'tq = 0.3\ngpu-memory = "1GiB"\n' >"$root/etc/nvshare/config.toml"
scheduler
first=$pid
until_true 'the scheduler answers' answers
[ "$(stat -c %U "/proc/$first")" != root ] || fail 'the scheduler is root'
job a
job b
until_true 'turns are taken' turns_of 4
in_root nvshare-ctl set-tq 0.2 >/dev/null || fail 'root may change things'
[ -s "$root/var/lib/nvshare/state.toml" ] || fail 'the state is not kept'
if chroot "$root" setpriv --reuid 1000 --regid 1000 --clear-groups nvshare-ctl set-tq 9 2>"$root/out/refused"; then fail 'everybody may change things'; fi
grep -q 'changes need the administrators' "$root/out/refused" || fail "$(cat "$root/out/refused")"

step 'it is upgraded under them: the old scheduler goes on, and says so'
mkdir "$root/next"
dpkg-deb --raw-extract "$deb" "$root/next"
sed -i 's/^\(Version: .*\)$/\1+next/' "$root/next/DEBIAN/control"
dpkg-deb --root-owner-group --build "$root/next" "$root/next.deb" >/dev/null
in_root dpkg --install --force-confold /next.deb >"$root/out/dpkg.log" 2>&1 || { cat "$root/out/dpkg.log"; fail 'upgrade'; }
grep -q 'the running scheduler stays the old version until: systemctl restart nvshare-scheduler' "$root/out/dpkg.log" || fail "$(cat "$root/out/dpkg.log")"
grep -q 'tq = 0.3' "$root/etc/nvshare/config.toml" || fail 'the configuration was replaced'
alive
kill -0 "$first" || fail 'the scheduler ended'
until_true 'turns go on' turns_of "$(($(turns) + 4))"

step 'the scheduler of the new package takes them over'
kill -TERM "$first"
wait "$first" 2>/dev/null || true
scheduler
until_true 'the new scheduler answers' answers
until_true 'turns are taken again' turns_of 4
[ "$(in_root nvshare-ctl status --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["scheduler"]["quantum_ms"])')" = 200 ] ||
    fail 'what was set at run time is lost'
job c
until_true 'a program that started later is there' sh -c "[ \$(chroot $root nvshare-ctl clients --json | grep -c '\"gone\": false') = 3 ]"

step 'a downgrade, and a tarball beside it'
in_root dpkg --install --force-confold --force-downgrade /nvshare.deb >"$root/out/dpkg.log" 2>&1 || { cat "$root/out/dpkg.log"; fail 'downgrade'; }
alive
mkdir "$root/tarball"
tar --extract --gzip --file "$tarball" --directory "$root/tarball" --strip-components=1
in_root /tarball/bin/nvshare-ctl install >/dev/null
[ -s "$root/usr/local/share/man/man1/nvshare-ctl.1" ] && [ -s "$root/usr/local/share/bash-completion/completions/nvshare-ctl" ] || fail "a tarball without papers"
in_root dpkg --install --force-confold /next.deb >"$root/out/dpkg.log" 2>&1 || { cat "$root/out/dpkg.log"; fail 'an install over a tarball'; }
grep -q '/usr/local/bin/nvshare-ctl of another installation comes first in PATH' "$root/out/dpkg.log" || fail "$(cat "$root/out/dpkg.log")"
in_root /usr/local/bin/nvshare-ctl uninstall >/dev/null
[ -z "$(find "$root/usr/local" -name '*nvshare*')" ] || fail "left by uninstall: $(find "$root/usr/local" -name '*nvshare*')"

step 'it is removed under them, and everybody ends well'
in_root dpkg --remove nvshare >"$root/out/dpkg.log" 2>&1 || { cat "$root/out/dpkg.log"; fail 'remove'; }
[ ! -e "$root/usr/bin/nvshare-scheduler" ] && [ ! -e "$root/usr/lib/nvshare" ] || fail 'programs are left'
[ -s "$root/etc/nvshare/config.toml" ] || fail 'the configuration went without a purge'
alive
kill -TERM "$pid"
wait "$pid" || fail 'the scheduler ends badly'
alive
touch "$root/out/stop"
for entry in "${jobs[@]}"; do
    wait "${entry%% *}" || fail "${entry#* } ended badly: $(cat "$root/out/${entry#* }.log")"
    grep -q '"wrong_words":0' "$root/out/${entry#* }.out" || fail "${entry#* }: $(cat "$root/out/${entry#* }.out")"
done
in_root dpkg --purge nvshare >"$root/out/dpkg.log" 2>&1 || { cat "$root/out/dpkg.log"; fail 'purge'; }
left=$(find "$root"/{etc,var/lib,usr,run} -name '*nvshare*' -not -path '*/dpkg/*' -not -path '*/deb-systemd-helper*')
[ -z "$left" ] || fail "left by purge: $left"
pids=()

echo 'package: all as it should be'
