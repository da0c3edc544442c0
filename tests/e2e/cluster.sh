#!/usr/bin/env bash
# A Kubernetes of one node, from Debian's packages alone, for tests/e2e/kubernetes.sh on a machine that has no cluster.
#
#   tests/e2e/cluster.sh build             builds its programs; minutes, and 4 GB of disk
#   tests/e2e/cluster.sh start IMAGE…      starts it, with these images of podman; prints what to set for kubernetes.sh
#   tests/e2e/cluster.sh restart-kubelet
#   tests/e2e/cluster.sh stop              ends it and all its containers, and removes the kubelet's folder and nvshare's
#
# The folder is $CLUSTER (/tmp/nvshare-cluster). It needs Debian 12, root, control groups of version 1, and a machine that is
# no node and has no nvshare of its own: the kubelet's folder is /var/lib/kubelet, and nvshare's are where manifests/ say.
# Everybody on the machine may do everything in the cluster, so it is for tests alone.
#
# Debian has Kubernetes 1.20.2, which is older than what nvshare supports: it knows no CDI devices, and one line is changed.
# It gives the path of a plugin's socket as the name of the server, which no HTTP/2 server of Rust accepts. Later ones
# say "localhost".
set -euo pipefail
cluster=${CLUSTER:-/tmp/nvshare-cluster}
bin=$cluster/bin
api=https://127.0.0.1:6443
containerd=$cluster/containerd.sock

packages() {
    local missing=()
    for package; do dpkg-query --show --showformat='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q ^ii || missing+=("$package"); done
    [ ${#missing[@]} = 0 ] || apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

build() {
    mkdir -p "$bin" "$cluster/go/src/k8s.io"
    apt-get update -qq
    packages golang-1.19-go dpkg-dev
    local source=$cluster/go/src/k8s.io/kubernetes
    if [ ! -d "$source" ]; then
        (cd "$cluster" && apt-get source -qq --only-source kubernetes/bookworm) || {
            echo 'it needs a line `deb-src http://deb.debian.org/debian bookworm main` in /etc/apt/sources.list' >&2; exit 1; }
        mv "$cluster"/kubernetes-1.20*/ "$source"
        # As Kubernetes has it since 1.26.
        sed -i 's/unixSocketPath, grpc.WithInsecure(), grpc.WithBlock(),/& grpc.WithAuthority("localhost"),/' \
            "$source/pkg/kubelet/cm/devicemanager/endpoint.go"
        grep -q WithAuthority "$source/pkg/kubelet/cm/devicemanager/endpoint.go"
    fi
    export GOPATH=$cluster/go GOCACHE=$cluster/cache GO111MODULE=off CGO_ENABLED=0 PATH=/usr/lib/go-1.19/bin:$PATH
    cd "$source"
    # As its build/root/Makefile.generated_files does.
    go build -o "$bin/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    local folders
    folders=$(grep --recursive --dereference-recursive --files-with-matches --include='*.go' '+k8s:openapi-gen=' pkg vendor/k8s.io |
        grep --invert-match -e /testdata/ -e code-generator/ -e sample-apiserver/ -e kube-openapi/ -e gengo/ |
        xargs -n1 dirname | LC_ALL=C sort -u | sed 's,^,k8s.io/kubernetes/,' | paste -sd,)
    "$bin/openapi-gen" -i "$folders" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
        -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$cluster/violations" --output-base "$GOPATH/src"
    local version=k8s.io/kubernetes/vendor/k8s.io/component-base/version program
    for program in kube-apiserver kube-controller-manager kube-scheduler kubelet; do
        go build -ldflags "-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20" \
            -o "$bin/$program" "./cmd/$program"
    done
}

run() { # run NAME COMMAND… : in the background
    local name=$1
    shift
    setsid "$@" >>"$cluster/$name.log" 2>&1 </dev/null &
    echo $! >"$cluster/$name.pid"
}

until_true() { # until_true WHAT COMMAND…
    local what=$1 i
    shift
    for i in $(seq 240); do "$@" >/dev/null 2>&1 && return; sleep 0.5; done
    echo "waited in vain: $what; see $cluster/*.log" >&2
    exit 1
}

end() { # end NAME
    local pid
    pid=$(cat "$cluster/$1.pid" 2>/dev/null) || return 0
    rm "$cluster/$1.pid"
    kill "$pid" 2>/dev/null || return 0
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
}

images() { ctr --address "$containerd" --namespace k8s.io images "$@"; }

kubelet() {
    run kubelet "$bin/kubelet" --config "$cluster/kubelet.yaml" --kubeconfig "$cluster/kubeconfig" --hostname-override node \
        --container-runtime remote --container-runtime-endpoint "unix://$containerd" --node-labels nvidia.com/gpu.present=true
}

configure() {
    # The container that holds a pod's namespaces.
    mkdir -p "$cluster/pause" "$cluster/cni"
    cc -static -o "$cluster/pause/pause" -x c - <<<'#include <unistd.h>
int main(void) { for (;;) pause(); }'
    printf 'FROM scratch\nCOPY pause /\nENTRYPOINT ["/pause"]\n' >"$cluster/pause/Containerfile"
    podman build --quiet --tag localhost/pause:1 "$cluster/pause" >/dev/null
    cat >"$cluster/cni/10-bridge.conf" <<'END'
{"cniVersion": "0.4.0", "name": "pods", "type": "bridge", "bridge": "nvshare-test", "isGateway": true,
 "ipam": {"type": "host-local", "subnet": "10.123.0.0/24"}}
END
    cat >"$cluster/containerd.toml" <<END
version = 2
root = "$cluster/containerd"
state = "$cluster/containerd-state"
[grpc]
  address = "$containerd"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  # Where this machine is itself a container, nothing may get a better score for the time when memory is short.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$cluster/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "${SNAPSHOTTER:-overlayfs}"
END
    openssl genrsa -out "$cluster/accounts.key" 2048 2>/dev/null
    echo 'token,admin,1,system:masters' >"$cluster/tokens"
    cat >"$cluster/kubeconfig" <<END
apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "$api", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: token}}]
contexts: [{name: test, context: {cluster: test, user: admin}}]
current-context: test
END
    cat >"$cluster/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
failSwapOn: false
clusterDNS: [10.124.0.10]
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
evictionHard: {memory.available: 64Mi, nodefs.available: 1%, imagefs.available: 1%}
imageGCHighThresholdPercent: 100
resolvConf: ""
END
}

start() {
    packages etcd-server containerd runc containernetworking-plugins iptables openssl podman gcc libc6-dev
    [ ! -e "$cluster/kubelet.pid" ] || { echo 'it runs' >&2; exit 1; }
    rm -rf "$cluster"/{etcd,certificates,*.log}
    configure
    run containerd containerd --config "$cluster/containerd.toml"
    run etcd etcd --data-dir "$cluster/etcd" --listen-peer-urls http://127.0.0.1:12380 --unsafe-no-fsync
    until_true 'containerd' images ls
    local image
    for image in localhost/pause:1 "$@"; do
        podman save --quiet "$image" | images import - >/dev/null
    done
    run apiserver "$bin/kube-apiserver" --etcd-servers http://127.0.0.1:2379 --cert-dir "$cluster/certificates" \
        --token-auth-file "$cluster/tokens" --authorization-mode AlwaysAllow --service-cluster-ip-range 10.124.0.0/24 \
        --service-account-issuer "$api" --service-account-key-file "$cluster/accounts.key" \
        --service-account-signing-key-file "$cluster/accounts.key" --bind-address 127.0.0.1 --kubelet-preferred-address-types InternalIP
    until_true 'the API server' kubectl --kubeconfig "$cluster/kubeconfig" get --raw /readyz
    run controller-manager "$bin/kube-controller-manager" --kubeconfig "$cluster/kubeconfig" \
        --service-account-private-key-file "$cluster/accounts.key"
    run scheduler "$bin/kube-scheduler" --kubeconfig "$cluster/kubeconfig"
    kubelet
    until_true 'the node' sh -c "kubectl --kubeconfig $cluster/kubeconfig get node node | grep -w Ready"
    echo "export KUBECONFIG=$cluster/kubeconfig RESTART_KUBELET='$(realpath "$0") restart-kubelet'"
}

stop() {
    local name task
    for name in kubelet scheduler controller-manager apiserver etcd; do end "$name"; done
    for task in $(ctr --address "$containerd" --namespace k8s.io tasks ls --quiet); do
        ctr --address "$containerd" --namespace k8s.io tasks delete --force "$task" >/dev/null 2>&1 || true
    done
    end containerd
    # Volumes of pods.
    awk '$2 ~ "^/var/lib/kubelet(/|$)" || $2 ~ "^'"$cluster"'/" { print $2 }' /proc/mounts | sort -r | xargs --no-run-if-empty umount
    rm -rf /var/lib/kubelet "$cluster"/{etcd,containerd,containerd-state} /var/lib/nvshare{,-simulated} /var/run/nvshare{,-admin,-seats}
    ip link delete nvshare-test 2>/dev/null || true
}

case ${1:-} in
    build | start | stop) "$@" ;;
    restart-kubelet) end kubelet; kubelet ;;
    *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
