#!/usr/bin/env bash
# Runs nvshare on a Kubernetes: pods that ask for a slot and for nothing else, restarts and an upgrade under them, removal, a
# Deployment, a drain of its node, and the clean-up. It makes the namespaces nvshare, nvshare-test and nvshare-clean-up, and
# removes them at the end; the drain touches their pods alone.
#
#   tests/e2e/kubernetes.sh IMAGE WORKLOAD [NEXT]           on nodes without a GPU, with the component manifests/simulated
#   tests/e2e/kubernetes.sh --gpus IMAGE WORKLOAD [NEXT]    on GPUs; $STRATEGY: another --device-list-strategy than cdi-cri. Then
#                                                           by claims as well, where the server has resource.k8s.io/v1
#
# IMAGE is that of `cargo image`, and NEXT, to which it upgrades, that of another build; WORKLOAD is that of
# tests/e2e/workload-image.sh, on GPUs without the simulated driver. Nodes must have them, or get them by these names. It needs
# kubectl (1.22), python3, and a cluster: $KUBECONFIG. With $RESTART_KUBELET, a command that restarts the kubelets, that is tried
# too. tests/e2e/cluster.sh makes a cluster where there is none.
set -euo pipefail
gpus=
[ "${1:-}" != --gpus ] || { gpus=yes; shift; }
image=${1:?the image} workload=${2:?the image of the workload} next=${3:-}
: "${KUBECONFIG:?the cluster}"
manifests=$(realpath "$(dirname "$0")/../../manifests")
here=$(mktemp -d)
drained=
trap 'rm -rf "$here"; [ -z "$drained" ] || kubectl uncordon "$drained"' EXIT
begin=$SECONDS
step() { printf '%3d s  %s\n' $((SECONDS - begin)) "$*"; }
fail() {
    echo "FAILED: $*"
    kubectl get pods --all-namespaces --output wide || true
    for part in scheduler device-plugin; do kubectl -n nvshare logs "daemonset/nvshare-$part" --tail 15 2>&1 || true; done
    kubectl -n nvshare-clean-up logs daemonset/nvshare-clean-up --container clean-up --tail 5 2>&1 || true
    kubectl -n nvshare-test get events --field-selector type=Warning 2>&1 | tail -5 || true
    exit 1
}
until_true() { # until_true SECONDS WHAT COMMAND…
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || fail "waited in vain: $what"
        sleep 0.2
    done
}

# A card of 1 GiB, for which two programs with 640 MiB take turns, and a container has 768 MiB.
option() { # option DAEMON OPTION
    cat <<END
  - target: {kind: DaemonSet, name: $1}
    patch: |
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: $2}
END
}
folder=$(realpath --relative-to "$here" "$manifests")
substitute() { echo "{name: nvshare, newName: \"${1%:*}\", newTag: \"${1##*:}\"}"; }
cat >"$here/kustomization.yaml" <<END
resources: [$folder]
components: [$([ "$gpus" ] || echo "$folder/simulated")]
images:
  - $(substitute "$image")
  - {name: nvshare-workload, newName: "${workload%:*}", newTag: "${workload##*:}"}
patches:
$(option nvshare-scheduler --gpu-memory=1GiB)
$(option nvshare-scheduler --tq=1)
$(option nvshare-device-plugin --slot-memory=768MiB)
$([ -z "$gpus" ] || [ -z "${STRATEGY:-}" ] || option nvshare-device-plugin "--device-list-strategy=$STRATEGY")
END
sed -i 's/^components: \[\]$//' "$here/kustomization.yaml"
# Before 1.22 no pod of a DaemonSet is there beside the one that it replaces.
minor=$(kubectl version --output json 2>/dev/null | python3 -c 'import json, sys; print(json.load(sys.stdin)["serverVersion"]["minor"].rstrip("+") or 0)')
[ "$minor" -ge 22 ] || cat >>"$here/kustomization.yaml" <<END
  - target: {kind: DaemonSet, name: nvshare-device-plugin}
    patch: |
      - {op: replace, path: /spec/updateStrategy/rollingUpdate, value: {maxUnavailable: 1}}
END
# Old clusters do not know `maxSurge: 0`, which is their way.
put() { kubectl apply --validate=false -k "$1" >/dev/null; }
apply() {
    put "$here"
    for part in scheduler device-plugin; do
        kubectl -n nvshare rollout status "daemonset/nvshare-$part" --timeout 120s >/dev/null || fail "the $part does not start"
    done
}

# All pods of the test are on one node.
slots() { kubectl get nodes --output json | python3 -c '
import json, sys
nodes = json.load(sys.stdin)["items"]
slots = {node["metadata"]["name"]: int(node["status"]["allocatable"].get("nvshare.com/gpu", 0)) for node in nodes}
print(max(slots.items(), key=lambda item: item[1]))' | tr -d "(),'"; }
has_slots() { [ "$(slots | cut -d ' ' -f 2)" != 0 ]; }
on_node() { kubectl -n "${2:-nvshare}" get pods --selector "app.kubernetes.io/component=$1" --field-selector "spec.nodeName=$node" --output name; }
# What the scheduler says: a Python expression of `all`, of `named`, pods that have seats, and of `of`, the seat of a pod.
ask() {
    kubectl -n nvshare exec "$(on_node scheduler | head -n 1)" --container scheduler -- nvshare-ctl status --json 2>/dev/null | python3 -c '
import json, sys
all = json.load(sys.stdin)
pods = {"/".join(seat["holder"].values()): seat for seat in all["seats"] if seat["holder"]}
of = lambda pod: pods[f"nvshare-test/{pod}/main"]
named = lambda prefix: sorted(pod.split("/")[1] for pod in pods if pod.startswith("nvshare-test/" + prefix))
gated = lambda pod: sum(c["counters"]["gated"] for c in all["clients"] if c["client"] in of(pod)["clients"] and not c["gone"])
turns = sum(gpu["turns"] for gpu in all["gpus"])
print(eval(sys.argv[1]))' "$1"
}
is() { [ "$(ask "$1")" = True ]; }

pod() { # pod NAME LIMITS COMMAND… : the description of a pod, or of a pod in a Job, with what the level restricted demands. $claim: its claim
    local name=$1 limits=$2 words uses='' claims=''
    shift 2
    [ -z "$claim" ] || { uses=', claims: [{name: gpu}]' claims="resourceClaims: [{name: gpu, $claim}]"; }
    words=$(printf '"%s", ' "$@")
    cat <<END
metadata: {name: $name, labels: {app: $name, app.kubernetes.io/part-of: nvshare-test}}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: "$node"}
  tolerations: [{key: nvidia.com/gpu, operator: Exists}]
  securityContext: {runAsNonRoot: true, runAsUser: 1000, runAsGroup: 1000, seccompProfile: {type: RuntimeDefault}}
  containers:
    - name: main
      image: "$workload"
      imagePullPolicy: IfNotPresent
      command: [${words%, }]
      env: [{name: STOP, value: /tmp/stop}]
      resources: {requests: {cpu: 10m, memory: 32Mi}, limits: {$limits}$uses}
      securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: ["ALL"]}}
      volumeMounts: [{name: tmp, mountPath: /tmp}$([ "$gpus" ] || echo ", {name: card, mountPath: /sim, subPath: $card}")]
  $claims
  volumes:
    - {name: tmp, emptyDir: {}}
$([ "$gpus" ] || echo '    - {name: card, persistentVolumeClaim: {claimName: card}}')
END
}
slot='nvshare.com/gpu: 1' claim=
# A card for this run alone: it keeps the memory of programs that ended in containers.
card=card-$(date +%s)
start() { # start NAME LIMITS COMMAND…
    { echo 'apiVersion: v1'; echo 'kind: Pod'; pod "$@"; } | kubectl -n nvshare-test create --filename - >/dev/null
}
# The program goes on until it is told to stop; it says when its first kernels are done by a file.
program() { echo "/opt/nvshare-workload $1 --memory 640MiB --block 64MiB --kernel-us 1000 --full-check"; }
inside() { kubectl -n nvshare-test exec "$@" 2>/dev/null; }
first_kernel() { # first_kernel NAME LIMITS : seconds from the pod's creation until its first kernels are done
    local began
    began=$(date +%s.%N)
    start "$1" "$2" sh -c "env -u STOP /opt/nvshare-workload $1 --memory 2MiB --block 2MiB --steps 1 && date +%s.%N"
    until_true 60 "$1 has ended" ended "$1" >&2
    kubectl -n nvshare-test logs "$1" 2>/dev/null | python3 -c "import sys; print(f'{float(sys.stdin.read().split()[-1]) - $began:.2f}')"
    kubectl -n nvshare-test delete pod "$1" >/dev/null
}
done_all() { [ "$(kubectl -n nvshare-test get job many --output 'jsonpath={.status.succeeded}')" = $((count + 2)) ]; }
ended() { [ "$(kubectl -n nvshare-test get pod "$1" --output 'jsonpath={.status.phase}')" = Succeeded ]; }

step "Kubernetes $(kubectl version --output json 2>/dev/null | python3 -c 'import json, sys; print(json.load(sys.stdin)["serverVersion"]["gitVersion"])')"
# Of a run that failed.
kubectl delete namespace/nvshare-test namespace/nvshare-clean-up persistentvolume/nvshare-test-card --ignore-not-found >/dev/null
apply
until_true 60 'a node has slots' has_slots
read -r node count <<<"$(slots)"
about=$(kubectl get node "$node" --output 'jsonpath={.status.nodeInfo.kubeletVersion}, {.status.nodeInfo.containerRuntimeVersion}')
step "the plugin is registered: node $node ($about) has $count slots"

kubectl apply --filename - >/dev/null <<'END'
apiVersion: v1
kind: Namespace
metadata: {name: nvshare-test, labels: {pod-security.kubernetes.io/enforce: restricted}}
END
[ "$gpus" ] || kubectl apply --filename - >/dev/null <<'END'
apiVersion: v1
kind: PersistentVolume
metadata: {name: nvshare-test-card}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteMany]
  storageClassName: nvshare-test
  hostPath: {path: /var/lib/nvshare-simulated, type: Directory}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: card, namespace: nvshare-test}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: nvshare-test
  resources: {requests: {storage: 1Gi}}
END
until_true 60 'the namespace has an account' kubectl -n nvshare-test get serviceaccount default

# A kubelet that is busy with pods replaces the scheduler slowly. Pods that come meanwhile run as if alone: nothing else is on the card.
kubectl -n nvshare rollout restart daemonset/nvshare-scheduler >/dev/null
mapfile -t came < <(seq --format 'came-%g' 24)
for name in "${came[@]}"; do
    start "$name" "$slot" env -u STOP /opt/nvshare-workload "$name" --memory 16MiB --block 16MiB --seconds 0.3
    sleep 0.3
done
phases() { kubectl -n nvshare-test get pods "${came[@]}" --output 'jsonpath={range .items[*]}{.status.phase}{"\n"}{end}'; }
are_over() { [ -z "$(phases | grep -e Pending -e Running)" ]; }
until_true 180 'the pods that came are over' are_over
for name in "${came[@]}"; do
    ended "$name" || fail "$name, of the pods that came: $(kubectl -n nvshare-test get pod "$name" --output 'jsonpath={.status.message}') $(
        kubectl -n nvshare-test logs "$name" 2>&1)"
done
kubectl -n nvshare-test delete pod "${came[@]}" >/dev/null
kubectl -n nvshare rollout status daemonset/nvshare-scheduler --timeout 120s >/dev/null || fail 'the scheduler does not start'
step "the scheduler was replaced while ${#came[@]} pods came: each had a seat at once, and ended well"

for name in a b; do
    # shellcheck disable=SC2046
    start $name "$slot" $(program $name)
done
for name in a b; do until_true 60 "$name is a client" is "gated('$name') > 0"; done
step "a pod that asks for $slot and nothing else is a client, by the name $(ask "'/'.join(of('a')['holder'].values())")"
[ "$(ask "of('a')['seat']['given']['memory'] == of('b')['seat']['given']['memory'] == 768 << 20")" = True ] || fail 'the limit of a seat'
[ "$(ask "of('a')['name'] != of('b')['name']")" = True ] || fail 'both have one seat'

both_run() { # both_run WHAT : both go on with the seats, names and limits that they had, and by turns
    local turns a b
    for name in a b; do until_true 60 "$1: $name is a client" is "len(of('$name')['clients']) > 0"; done
    read -r turns a b <<<"$(ask "f'{turns} {gated(\"a\")} {gated(\"b\")}'")"
    until_true 60 "$1: turns" is "turns >= $turns + 3 and gated('a') > $a and gated('b') > $b"
    [ "$(ask "of('a')['name'] + of('b')['name']")" = "$seats" ] || fail "$1: other seats"
    [ "$(kubectl -n nvshare-test get pods a b --output 'jsonpath={.items[*].status.phase} {.items[*].status.containerStatuses[0].restartCount}')" = \
        'Running Running 0 0' ] || fail "$1: a pod does not run on"
    limited "$1"
}
limited() { # limited WHAT : a second process of a container, with the first one, has no more than the limit
    local out
    out=$(inside a -- env -u STOP /opt/nvshare-workload second --memory 64MiB --block 32MiB --steps 2 --full-check) || fail "$1: a second process: $out"
    if out=$(inside a -- env -u STOP /opt/nvshare-workload third --memory 192MiB --block 32MiB --steps 2); then fail "$1: more than the limit: $out"; fi
    grep -q 'CUDA error 2"' <<<"$out" || fail "$1: not for the limit: $out"
}
seats=$(ask "of('a')['name'] + of('b')['name']")
both_run 'at first'
step 'two that do not fit take turns; all processes of a container share its limit'

for i in 1 2 3; do
    native+=("$(first_kernel "native-$i" '')")
    slotted+=("$(first_kernel "slot-$i" "$slot")")
done
step "from a pod's creation to its first kernel, in seconds: natively ${native[*]}, with a slot ${slotted[*]}"

# More pods than slots, so a slot that a pod leaves is given to the next one.
{
    printf 'apiVersion: batch/v1\nkind: Job\nmetadata: {name: many}\nspec:\n'
    printf '  completions: %d\n  parallelism: %d\n  backoffLimit: 0\n  template:\n' $((count + 2)) $((count - 2))
    pod many "$slot" env -u STOP /opt/nvshare-workload many --memory 32MiB --block 16MiB --seconds 1 --full-check | sed 's/^/    /'
} | kubectl -n nvshare-test create --filename - >/dev/null
until_true 180 'the Job is complete' done_all
until_true 30 'ended pods have no seat' is "not named('many-')"
step "a Job of $((count + 2)) pods with $count slots: each had a seat, and gave it back"

restarted() { # restarted WHAT COMMAND… : under both, and a new pod gets a seat afterwards
    local what=$1
    shift
    "$@" >/dev/null
    until_true 60 "$what: slots" has_slots
    both_run "$what"
    start new "$slot" env -u STOP /opt/nvshare-workload new --memory 32MiB --block 16MiB --steps 1
    until_true 60 "$what: a new pod has ended" ended new
    kubectl -n nvshare-test delete pod new >/dev/null
    step "restarted under both: $what"
}
again() { # again PART : its pod is replaced
    kubectl -n nvshare rollout restart "daemonset/nvshare-$1"
    kubectl -n nvshare rollout status "daemonset/nvshare-$1" --timeout 120s
}
killed() { # killed PART : its pod goes without notice
    kubectl -n nvshare delete --grace-period 0 --force "$(on_node "$1")"
    kubectl -n nvshare rollout status "daemonset/nvshare-$1" --timeout 120s
}
all_again() {
    for part in scheduler device-plugin; do kubectl -n nvshare delete --grace-period 0 --force "$(on_node $part)"; done
    for part in scheduler device-plugin; do kubectl -n nvshare rollout status "daemonset/nvshare-$part" --timeout 120s; done
    [ -z "${RESTART_KUBELET:-}" ] || $RESTART_KUBELET
}
restarted 'the device plugin' again device-plugin
restarted 'the scheduler' again scheduler
restarted 'the device plugin, killed' killed device-plugin
restarted 'the scheduler, killed' killed scheduler
if [ -n "${RESTART_KUBELET:-}" ]; then
    restarted 'the kubelet' $RESTART_KUBELET
else
    step 'NOT TRIED: a restart of the kubelet, as RESTART_KUBELET is not set'
fi
restarted 'all at once' all_again

# Which file the program of a pod has as the library, and what a program that starts in it now gets.
mapped() { inside "$1" -- cat /proc/1/maps | awk '/libnvshare\.so/ { file = $4 " " $5 } END { print file }'; }
library() { inside "$1" -- sh -c 'cat "$LD_PRELOAD"' | cksum; }
upgraded() {
    local before file
    before=$(library a) file=$(mapped a)
    [ -n "$file" ] || fail 'the program of a has no library'
    sed -i "s|{name: nvshare, .*|$(substitute "$next")|" "$here/kustomization.yaml"
    apply
    until_true 60 'the next: slots' has_slots
    both_run 'the next'
    [ "$(mapped a)" = "$file" ] || fail "the next: a has another file than $file: $(mapped a)"
    # shellcheck disable=SC2046
    start new "$slot" $(program new | sed 's/640MiB/32MiB/')
    until_true 60 'the next: a new pod is a client' is "gated('new') > 0"
    [ "$(mapped new)" != "$file" ] || fail 'the next: a new pod has the old library'
    [ "$(library new)" != "$before" ] || fail "$next has the same library as $image"
    inside new -- touch /tmp/stop
    until_true 60 'the next: a new pod has ended' ended new
    kubectl -n nvshare-test delete pod new >/dev/null
    step "upgraded under both, to $next: they keep the library that they have, and their seats; a new pod has the new library"
}
if [ "$next" ]; then upgraded; else step 'NOT TRIED: an upgrade, as no NEXT is given'; fi

kubectl delete -k "$here" >/dev/null
sleep 3
for name in a b; do
    [ "$(kubectl -n nvshare-test get pod $name --output 'jsonpath={.status.phase}')" = Running ] || fail "removed: $name does not run on"
done
step 'removed: both run on'
apply
until_true 60 'a node has slots again' has_slots
both_run 'applied again'
step 'applied again: both are clients with the seats that they had'

kubectl delete -k "$here" >/dev/null
for name in a b; do inside $name -- touch /tmp/stop; done
for name in a b; do
    until_true 60 "$name has ended" ended $name
    out=$(kubectl -n nvshare-test logs $name 2>/dev/null)
    grep -q '"wrong_words":0,.*"error":null' <<<"$out" || fail "$name: $out"
done
step 'both ended, and all that they computed is right'

# A Deployment makes its pods anew, wherever they went. Each has a simulated card of its own, as its program will be killed.
apply
until_true 60 'a node has slots for a Deployment' has_slots
{
    printf 'apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: served}\nspec:\n'
    printf '  replicas: 3\n  selector: {matchLabels: {app: served}}\n  template:\n'
    pod served "$slot" sh -c "$(program served | sed 's/640MiB/16MiB/; s/64MiB/16MiB/') --host-ms 20; exit 1" |
        sed 's/restartPolicy: Never/restartPolicy: Always/; s/persistentVolumeClaim: .*}}/emptyDir: {}}/; s/^/    /'
} | kubectl -n nvshare-test create --filename - >/dev/null
of_served() { kubectl -n nvshare-test get pods --selector app=served --output "jsonpath={range .items[*]}$1{'\n'}{end}"; }
run_on() { [ "$(of_served '{.status.phase} {.status.containerStatuses[0].restartCount}' | sort -u)" = 'Running 0' ]; }
were=[]
serves() { # serves WHAT : its pods are others than they were, of which each has a seat with the limit, and is a client; none failed
    kubectl -n nvshare-test rollout status deployment/served --timeout 120s >/dev/null || fail "$1: the Deployment is not there"
    until_true 60 "$1: three others have seats" is "len(named('served-')) == 3 and not set(named('served-')) & set($were)"
    were=$(ask "named('served-')")
    until_true 60 "$1: each is a client" is "min(gated(pod) for pod in $were) > 0"
    [ "$(ask "len({of(pod)['name'] for pod in $were if of(pod)['seat']['given']['memory'] == 768 << 20})")" = 3 ] || fail "$1: seats"
    until_true 30 "$1: no pod failed" run_on
}
serves 'a Deployment'
killed_inside() { # a program that was killed starts again in its pod, by what the kubelet kept of the plugin's answer
    local one
    one=$(python3 -c "print($were[0])")
    seats=$(ask "of('$one')['name']")
    inside "$one" -- sh -c 'kill -9 -1' || true
    has_restarted() { [ "$(kubectl -n nvshare-test get pod "$one" --output 'jsonpath={.status.containerStatuses[0].restartCount}')" = 1 ]; }
    until_true 60 "$one: its container starts again" has_restarted
    until_true 60 "$one is a client again" is "gated('$one') > 0"
    [ "$(ask "of('$one')['name']")" = "$seats" ] || fail "$one has another seat after a restart of its container"
}
killed_inside
kubectl -n nvshare-test rollout restart deployment/served >/dev/null
serves 'restarted'
step 'a Deployment of 3 pods: each has a seat, keeps it when its program is killed, and gives it to the next when it is replaced'

kubectl drain "$node" --ignore-daemonsets --delete-emptydir-data --timeout 120s \
    --pod-selector 'app.kubernetes.io/part-of in (nvshare, nvshare-test)' >/dev/null 2>&1 || fail "the drain of $node"
drained=$node
until_true 60 'drained: no pod has a seat' is 'not pods'
[ "$(of_served '{.status.phase}' | sort -u)" = Pending ] || fail 'drained: a pod of the Deployment does not wait'
kubectl uncordon "$node" >/dev/null
drained=
serves 'uncordoned'
step 'drained: its pods left, and no seat had a holder; uncordoned, all are back'

# It refuses while containers have seats, and removes nothing.
mkdir "$here/clean-up"
cat >"$here/clean-up/kustomization.yaml" <<END
resources: [../$folder/clean-up]
images:
  - $(substitute "${next:-$image}")
END
[ "$gpus" ] || cat >>"$here/clean-up/kustomization.yaml" <<END
patches:
  - target: {kind: DaemonSet}
    patch: |
      - {op: remove, path: /spec/template/spec/affinity}
END
refused() {
    kubectl -n nvshare-clean-up logs "$(on_node clean-up nvshare-clean-up)" --container clean-up |
        grep 'containers that have seats: 3, such as nvshare-test/served-'
}
left() { # what nvshare has left on the node
    kubectl create --filename - >/dev/null <<END
apiVersion: v1
kind: Pod
metadata: {name: left, namespace: nvshare-clean-up}
spec:
  restartPolicy: Never
  nodeSelector: {kubernetes.io/hostname: "$node"}
  tolerations: [{operator: Exists}]
  containers:
    - name: main
      image: "$workload"
      imagePullPolicy: IfNotPresent
      command:
        - sh
        - -c
        - >
          for file in /node/var/lib/nvshare/* /node/var/lib/nvshare/.??* /node/var/run/nvshare*
          /node/var/run/cdi/*nvshare* /node/var/run/cdi/.*nvshare* /node/var/lib/kubelet/*/*nvshare*;
          do if [ -e "\$file" ]; then echo "\$file"; fi; done
      volumeMounts: [$(printf '{name: f%d, mountPath: /node%s, readOnly: true}, ' $(numbered))]
  volumes: [$(printf '{name: f%d, hostPath: {path: %s}}, ' $(numbered))]
END
    until_true 60 'what is left has been listed' sh -c \
        "kubectl -n nvshare-clean-up get pod left --output 'jsonpath={.status.phase}' | grep -x Succeeded" >&2
    kubectl -n nvshare-clean-up logs left
    kubectl -n nvshare-clean-up delete pod left >/dev/null
}
numbered() {
    printf '%s\n' /var/lib/nvshare /var/run /var/lib/kubelet/{device-plugins,plugins_registry} |
        cat --number
}
cleaned() {
    local files
    kubectl -n nvshare-clean-up rollout status daemonset/nvshare-clean-up --timeout 900s >/dev/null || fail 'the clean-up is not done'
    files=$(left)
    [ -z "$files" ] || fail "the clean-up leaves: $files"
    kubectl delete -k "$here/clean-up" >/dev/null
}
kubectl delete -k "$here" >/dev/null
put "$here/clean-up"
until_true 60 'the clean-up refuses' refused
left | grep /lib/nvshare/lib >/dev/null || fail 'the clean-up has removed the library under pods'
more='-u STOP /opt/nvshare-workload more --memory 800MiB --block 32MiB --steps 1'
# shellcheck disable=SC2086
inside deployment/served -- env -u LD_PRELOAD $more >/dev/null || fail 'without the library, there is not more than the limit'
# shellcheck disable=SC2086
out=$(inside deployment/served -- env $more) && fail "the clean-up has removed a limit under pods: $out"
grep -q 'CUDA error 2"' <<<"$out" || fail "the clean-up refused, and a program in a pod failed: $out"
step 'the clean-up refuses while pods have seats, and removes nothing'
kubectl -n nvshare-test delete deployment served >/dev/null
cleaned
step 'the clean-up has removed all that was on the node'

# Claims of Dynamic Resource Allocation. NVIDIA's CDI devices bring the GPU, so the simulated card will not do.
template() { # template NAME CAPACITIES
    kubectl -n nvshare-test create --filename - >/dev/null <<END
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: $1}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvshare.com, capacity: {requests: {$2}}}}]}}}
END
}
published() {
    kubectl get resourceslices --field-selector "spec.driver=gpu.nvshare.com,spec.nodeName=$node" --output json | python3 -c '
import json, sys
devices = [device for item in json.load(sys.stdin)["items"] for device in item["spec"].get("devices") or []]
assert devices and all(device.get("allowMultipleAllocations") for device in devices), devices'
}
phase() { kubectl -n nvshare-test get pod "$1" --output 'jsonpath={.status.phase}'; }
has_phase() { [ "$(phase "$1")" = "$2" ]; }
claimed() { # claimed WHAT COMMAND… : the three go on with the seats that they had, and a new one gets one
    local what=$1
    shift
    "$@" >/dev/null
    for name in a b c; do until_true 60 "$what: $name is a client" is "len(of('$name')['clients']) > 0"; done
    [ "$(ask "of('a')['name'] + of('b')['name'] + of('c')['name']")" = "$seats" ] || fail "$what: other seats"
    start new '' env -u STOP /opt/nvshare-workload new --memory 32MiB --block 16MiB --steps 1
    until_true 60 "$what: a new pod has ended" ended new
    kubectl -n nvshare-test delete pod new >/dev/null
    step "claims, restarted under three pods: $what"
}
claims() {
    kubectl apply -k "$manifests/dra/cluster" >/dev/null
    sed -i "s|^components: .*||; \$a components: [$folder/dra]" "$here/kustomization.yaml"
    apply
    until_true 120 'the GPUs are published, as ones that many may have' published
    template part 'memory: 256Mi, compute: "30"'
    claim='resourceClaimTemplateName: part'
    # shellcheck disable=SC2046
    for name in a b c; do start $name '' $(program $name | sed 's/640MiB/192MiB/'); done
    for name in a b c; do until_true 60 "$name is a client" is "gated('$name') > 0"; done
    [ "$(ask "[(of(p)['seat']['given']['memory'], of(p)['seat']['given']['compute']) for p in 'abc'] == 3 * [(256 << 20, 30)]")" = True ] ||
        fail 'the limits of the claims'
    seats=$(ask "of('a')['name'] + of('b')['name'] + of('c')['name']")
    step 'three pods share GPUs by claims, with the limits that they ask for'

    # Places run out long before: one asks for all of a GPU.
    template whole "slots: \"$count\""
    claim='resourceClaimTemplateName: whole'
    for n in $(seq 1 "$(kubectl get resourceslices --field-selector "spec.nodeName=$node" --output json | grep -c allowMultipleAllocations)"); do
        start "whole-$n" '' sleep 300
    done
    sleep 10
    kubectl -n nvshare-test get pods --output 'jsonpath={.items[*].status.phase}' | grep -q Pending || fail 'capacity that runs out does not stay Pending'
    kubectl -n nvshare-test get pods --output name | grep whole- | xargs kubectl -n nvshare-test delete >/dev/null
    step 'a claim for more than is left stays Pending'

    claim='resourceClaimTemplateName: part'
    claimed 'the driver' again device-plugin
    claimed 'the scheduler' again scheduler
    claimed 'the driver, killed' killed device-plugin
    if [ -n "${RESTART_KUBELET:-}" ]; then claimed 'the kubelet' $RESTART_KUBELET; else step 'NOT TRIED: a restart of the kubelet'; fi
    kubectl -n nvshare-test delete pod c --grace-period 0 --force >/dev/null 2>&1
    until_true 60 'a pod that is removed by force has no seat' is "'nvshare-test/c/main' not in pods and len(all['seats']) == 2"
    step 'a pod that is removed by force gives its seat back'

    claim=
    start extended "$slot" env -u STOP /opt/nvshare-workload extended --memory 32MiB --block 16MiB --steps 1
    until_true 60 "a pod that asks for $slot has ended" ended extended
    step "a pod that asks for $slot runs as it is"
    for name in a b; do
        inside $name -- touch /tmp/stop
        until_true 60 "$name has ended" ended $name
    done
    kubectl -n nvshare-test delete pods --all >/dev/null
    until_true 60 'no seat is left' is "len(all['seats']) == 0"
    kubectl delete -k "$here" >/dev/null
    kubectl delete -k "$manifests/dra/cluster" >/dev/null
    put "$here/clean-up"
    cleaned
    step 'claims: all seats are given back, and nothing is left on the node'
}
if [ -z "$gpus" ]; then
    step 'NOT TRIED: claims, which need GPUs'
elif [ "${STRATEGY:-cdi-cri}" != cdi-cri ]; then
    step 'NOT TRIED: claims, which come by CDI devices alone'
elif kubectl get --raw /apis/resource.k8s.io/v1 >/dev/null 2>&1; then
    kubectl -n nvshare-test delete pods --all >/dev/null
    claims
else
    step 'NOT TRIED: claims, as the server has no resource.k8s.io/v1'
fi
kubectl delete namespace/nvshare-test persistentvolume/nvshare-test-card --ignore-not-found >/dev/null
step 'removed'
