# /etc/profile.d/nvshare.sh: what each user of this workstation has of its GPU. A login shell reads it, and all that it starts inherits it.
#
# NVSHARE_RUN is the same for all programs of a user. So these are one tenant: they share one limit of memory and one share of the time.

case $(id -un) in
    anna) NVSHARE_MEM_LIMIT=24g NVSHARE_WEIGHT=100 ;;
    ben) NVSHARE_MEM_LIMIT=24g NVSHARE_WEIGHT=100 ;;
    chris) NVSHARE_MEM_LIMIT=12g NVSHARE_WEIGHT=50 ;;
    dora) NVSHARE_MEM_LIMIT=12g NVSHARE_WEIGHT=50 NVSHARE_PRIORITY=low ;;
    *) return 0 ;;
esac
NVSHARE_RUN=1
LD_PRELOAD=/usr/lib/nvshare/libnvshare.so${LD_PRELOAD:+:$LD_PRELOAD}
export NVSHARE_MEM_LIMIT NVSHARE_WEIGHT NVSHARE_RUN LD_PRELOAD
if [ -n "${NVSHARE_PRIORITY:-}" ]; then export NVSHARE_PRIORITY; fi
