# /etc/profile.d/nvshare.sh: what each user of this workstation has of its GPU. A login shell reads it, and all that it starts inherits it.
#
# NVSHARE_RUN is the same for all programs of a user. So these are one tenant: they share one limit of memory and one share of the time.

nvshare=/usr/lib/nvshare/libnvshare.so
case $(id -un) in
    anna) NVSHARE_MEM_LIMIT=24g NVSHARE_WEIGHT=100 ;;
    ben) NVSHARE_MEM_LIMIT=24g NVSHARE_WEIGHT=100 ;;
    chris) NVSHARE_MEM_LIMIT=12g NVSHARE_WEIGHT=50 ;;
    dora) NVSHARE_MEM_LIMIT=12g NVSHARE_WEIGHT=50 NVSHARE_PRIORITY=low ;;
    *) nvshare= ;;
esac
# Where the library is missing, as after a removal, each program would complain that it cannot be preloaded.
if [ -r "$nvshare" ]; then
    NVSHARE_RUN=1
    LD_PRELOAD=$nvshare${LD_PRELOAD:+:$LD_PRELOAD}
    export NVSHARE_MEM_LIMIT NVSHARE_WEIGHT NVSHARE_RUN LD_PRELOAD
    if [ -n "${NVSHARE_PRIORITY:-}" ]; then export NVSHARE_PRIORITY; fi
fi
unset nvshare
