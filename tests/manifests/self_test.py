"""Breaks copies of the manifests on purpose: check.py must find each break. Run by check.sh --self-test."""

import multiprocessing
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from check import Unusable, check

SCHEDULER = "manifests/scheduler.yaml"
KUSTOMIZATION = "manifests/kustomization.yaml"
PLUGIN = "manifests/device-plugin.yaml"
NVML = "manifests/nvml/kustomization.yaml"
HOST_MEMORY = "manifests/host-memory/kustomization.yaml"
SIMULATED = "manifests/simulated/kustomization.yaml"
LIMITED = "manifests/examples/limited.yaml"
UNLIMITED = "manifests/examples/unlimited.yaml"
CLEAN_UP = "manifests/clean-up/clean-up.yaml"
QUOTA = "manifests/examples/quota.yaml"
DRA = "manifests/dra/kustomization.yaml"
ACCESS = "manifests/dra/access.yaml"
PRIORITIES = "manifests/dra/priorities/kustomization.yaml"
CLASS = "manifests/dra/cluster/device-class.yaml"
POLICY = "manifests/dra/cluster/policy.yaml"
CLAIMS = "manifests/dra/examples/claims.yaml"
CLAIM_PODS = "manifests/dra/examples/pods.yaml"
FEATURES = "manifests/nfd/kustomization.yaml"
MONITORING = "manifests/monitoring/kustomization.yaml"
MONITOR = "manifests/monitoring/pod-monitor.yaml"
PROFILES = "docs/recipes/jupyterhub/values.yaml"
SIZES = "docs/recipes/jupyterhub/kustomization.yaml"
GITHUB = "docs/recipes/ci/github.yml"
GITLAB = "docs/recipes/ci/gitlab.yml"
ROWS = "manifests/sizes/kustomization.yaml"
GPUS = "manifests/gpus/kustomization.yaml"
DROP = '            capabilities:\n              drop: ["ALL"]\n'
# What is broken, in which file, from what, to what, and what must be found.
BREAKS = [
    ("broken YAML", SCHEDULER, "kind: DaemonSet", "kind: [DaemonSet", "does not render"),
    ("a missing file", KUSTOMIZATION, "  - scheduler.yaml\n", "  - planner.yaml\n", "does not render"),
    ("a document lost", KUSTOMIZATION, "  - scheduler.yaml\n", "", "not ['DaemonSet/nvshare-device-plugin'"),
    ("a field that does not exist", SCHEDULER,
     "terminationGracePeriodSeconds", "terminationGraceSeconds", "Kubernetes 1.29"),
    ("a field of the wrong type", SCHEDULER, "maxSurge: 0", "maxSurge: [0]", "Kubernetes 1.33"),
    ("a kind that does not exist", SCHEDULER,
     "kind: DaemonSet", "kind: DemonSet", "Couldn't find schema for kind DemonSet"),
    ("an API that does not exist", SCHEDULER, "apps/v1", "apps/v1beta2", "Couldn't find schema"),
    ("privileged", SCHEDULER, DROP, DROP + "            privileged: true\n", "container library: privileged"),
    ("escalation", SCHEDULER,
     "allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true", "privilege escalation"),
    ("capabilities kept", SCHEDULER, DROP, "", "does not drop all capabilities"),
    ("a capability dropped", SCHEDULER, 'drop: ["ALL"]', 'drop: ["NET_RAW"]', "does not drop all capabilities"),
    ("a capability added", SCHEDULER,
     DROP, DROP + '              add: ["SYS_ADMIN"]\n', "does not drop all capabilities"),
    ("capabilities of an example", LIMITED, 'drop: ["ALL"]', "drop: []", "does not drop all capabilities"),
    ("no seccomp", SCHEDULER, "type: RuntimeDefault", "type: Unconfined", "seccomp is not RuntimeDefault"),
    ("a writable root", SCHEDULER, "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "root file system"),
    ("the component is not named", KUSTOMIZATION, "#   - nvml", "#   - nvm", "manifests/nvml: sets {'hostPID': None"),
    ("the component without process numbers", NVML, "value: true", "value: false", "manifests/nvml: sets {'hostPID': False"),
    ("the component without NVML", NVML, "value: all", "value: void", "'NVIDIA_VISIBLE_DEVICES': 'void'"),
    ("the component changes more", NVML, "patches:", "nameSuffix: -nvml\npatches:", "manifests/nvml"),
    ("memory of the host under a limit", HOST_MEMORY,
     "op: remove\n        path: /spec/template/spec/containers/0/resources/limits/memory",
     "op: replace\n        path: /spec/template/spec/containers/0/resources/limits/memory\n        value: 1Gi",
     "has a limit of memory"),
    ("memory of the host that the node does not know of", HOST_MEMORY, "value: 65Gi", "value: 1Gi", "asks the node for 1Gi"),
    ("memory of the host by another option", HOST_MEMORY, "--host-memory\n", "--host-mem\n", "not --host-memory SIZE"),
    ("memory of the host is not named", KUSTOMIZATION, "#   - host-memory", "#   - host-mem", "manifests/host-memory: adds"),
    ("memory of the host changes more", HOST_MEMORY, "patches:", "nameSuffix: -x\npatches:", "manifests/host-memory"),
    ("labels from elsewhere", FEATURES, "mountPath: /etc/kubernetes", "mountPath: /etc", "do not go together"),
    ("labels by another option", FEATURES, "--features-dir=", "--features=", "do not go together"),
    ("labels are not named", KUSTOMIZATION, "#   - nfd", "#   - nf", "manifests/nfd"),
    ("labels change more", FEATURES, "patches:", "nameSuffix: -x\npatches:", "manifests/nfd"),
    ("metrics at another port", MONITORING, "containerPort: 9464", "containerPort: 9465", "is not at the port"),
    ("a monitor of nothing", MONITOR, "      app.kubernetes.io/component: scheduler\n  pod", "      app.kubernetes.io/component: none\n  pod",
     "looks for other pods"),
    ("a monitor of another port", MONITOR, "port: metrics", "port: http", "looks for another port"),
    ("metrics change more", MONITORING, "patches:", "nameSuffix: -x\npatches:", "manifests/monitoring"),
    ("a row by another option", ROWS, "--also=low=", "--row=low=", "manifests/sizes: changes more"),
    ("rows are not named", KUSTOMIZATION, "#   - sizes", "#   - size", "manifests/sizes"),
    ("GPUs of each node by another option", GPUS, "--gpus-of=", "--gpus-off=", "manifests/gpus: {'option': '--gpus-off="),
    ("GPUs of another name than the node's", PLUGIN, "spec.nodeName", "spec.hostname", "manifests/gpus: {"),
    ("GPUs from another map", GPUS, "            name: nvshare-gpus", "            name: nvshare-cards", "manifests/gpus: {"),
    ("GPUs without UUIDs", GPUS, "=GPU-5160", "=5160", "UUIDs of each node"),
    ("GPUs of each node are not named", KUSTOMIZATION, "#   - gpus", "#   - gpu", "manifests/gpus"),
    ("GPUs of each node change more", GPUS, "patches:", "nameSuffix: -x\npatches:", "manifests/gpus"),
    ("a row that is not offered", "manifests/sizes/examples/high.yaml", "gpu.high: 1", "gpu.huge: 1", "asks for None of nvshare.com/gpu, not 1"),
    ("a quota of a row that is not offered", "manifests/sizes/examples/quota.yaml", "gpu.high", "gpu.huge", "counts ['requests.nvshare.com/gpu.huge']"),
    ("slots that nobody counts", QUOTA, "requests.nvshare.com/gpu", "requests.nvidia.com/gpu", "counts ['requests.nvidia.com/gpu']"),
    ("a clean-up of nothing", CLEAN_UP, "            - --clean-up\n", "", "does not clean up"),
    ("a quota for another priority", "manifests/quota.yaml", "system-node-critical", "system-cluster-critical", "not for the daemons' priority"),
    ("a clean-up with an image of others", CLEAN_UP, '          image: nvshare\n          imagePullPolicy: IfNotPresent\n          command: ["nvshare-device-plugin", "--kubelet"',
     '          image: registry.k8s.io/pause:3.10\n          imagePullPolicy: IfNotPresent\n          command: ["nvshare-device-plugin", "--kubelet"', "and the workspace is nvshare"),
    ("a clean-up that leaves seats", CLEAN_UP, "--run-dir=/host/run", "--run-dir=/var/run", "the clean-up has the options"),
    ("a clean-up of other folders", CLEAN_UP, "path: /var/run\n", "path: /var\n", "the clean-up mounts"),
    ("a clean-up of another version", "manifests/clean-up/kustomization.yaml", "newTag: 0.1.0", "newTag: 0.0.9", "and the workspace is"),
    ("more rights for what waits", CLEAN_UP, "          securityContext: *security\n", "          securityContext: {privileged: true}\n",
     "container done: privileged"),
    ("the simulated card is not named", KUSTOMIZATION, "#   - simulated", "#   - simulate", "manifests/simulated: has []"),
    ("a simulated card with more rights", SIMULATED, DROP, DROP + "            privileged: true\n", "container card: privileged"),
    ("a simulated card by another option", SIMULATED, "--gpu-descriptions", "--gpu-description", "has no option --gpu-description"),
    ("a simulated card that changes more", SIMULATED, "patches:", "nameSuffix: -x\npatches:", "manifests/simulated"),
    ("host processes", SCHEDULER, "      terminationG", "      hostPID: true\n      terminationG", "hostPID is on"),
    ("host network", LIMITED,
     "  restartPolicy: Never", "  restartPolicy: Never\n  hostNetwork: true", "hostNetwork is on"),
    ("a token", SCHEDULER,
     "automountServiceAccountToken: false", "automountServiceAccountToken: true", "token is mounted"),
    ("a token by default", LIMITED, "  automountServiceAccountToken: false\n", "", "token is mounted"),
    ("a token by projection", LIMITED,
     "configMap:\n        name: multiply", "projected: {sources: [{serviceAccountToken: {path: t}}]}",
     "has a service account"),
    ("services' variables", SCHEDULER, "enableServiceLinks: false", "enableServiceLinks: true", "services' variables"),
    ("an open /proc", LIMITED,
     '          drop: ["ALL"]\n', '          drop: ["ALL"]\n        procMount: Unmasked\n', "/proc"),
    ("a host port", LIMITED,
     "      resources:", "      ports: [{containerPort: 1, hostPort: 1}]\n      resources:", "port of the host"),
    ("a directory of no type", SCHEDULER,
     "path: /var/run/nvshare\n            type: DirectoryOrCreate", "path: /var/run/nvshare", "(None)"),
    ("one host directory too many", SCHEDULER,
     "path: /var/run/nvshare-admin\n", "path: /var/run\n", "host directories"),
    ("copied over the library", SCHEDULER,
     '"install-library", "/var', '"cp", "/usr/lib/nvshare/libnvshare.so", "/var', "is not: nvshare-ctl install-library"),
    ("installed elsewhere", SCHEDULER,
     '"/var/lib/nvshare/lib"]', '"/var/lib/nvshare"]', "is not: nvshare-ctl install-library"),
    ("the wrong init container", SCHEDULER,
     "- name: library\n          image", "- name: lib\n          image", "init container"),
    ("the sockets, while installing", SCHEDULER,
     "            - name: library\n              mountPath: /var/lib/nvshare/lib\n",
     "            - name: library\n              mountPath: /var/lib/nvshare/lib\n"
     "            - name: clients\n              mountPath: /var/run/nvshare\n", "the init container mounts"),
    ("no requests", SCHEDULER, "memory: 16Mi", "ephemeral-storage: 16Mi", "no requests of memory"),
    ("no requests in an example", LIMITED, "cpu: 500m", "ephemeral-storage: 1Gi", "no requests of cpu"),
    ("no limit", SCHEDULER, "              memory: 128Mi\n", "", "no limits of memory"),
    ("another socket", SCHEDULER,
     "- /var/run/nvshare/scheduler.sock", "- /var/run/nvshare/nvshare.sock", "--socket is"),
    ("another administrators' socket", SCHEDULER,
     "- /var/run/nvshare-admin/admin.sock", "- /var/run/nvshare/admin.sock", "--admin-socket is"),
    ("sockets moved in the sources", "proto/src/paths.rs",
     "/var/run/nvshare/scheduler.sock", "/run/nvshare.d/scheduler.sock", "paths.rs says"),
    ("an unknown option", SCHEDULER,
     "- --admin-socket", "- --administrators-socket", "no option --administrators-socket"),
    ("an unknown variable", LIMITED, "NVSHARE_MEM_LIMIT", "NVSHARE_MEMORY_LIMIT", "env.rs has no NVSHARE_MEMORY_LIMIT"),
    ("another limit", LIMITED, "value: 8GiB", "value: 8 GB", "not one pod with NVSHARE_MEM_LIMIT=8GiB"),
    ("root in an example", LIMITED, "runAsUser: 1000", "runAsUser: 0", "runs as root"),
    ("perhaps root", UNLIMITED, "  runAsNonRoot: true", "  runAsNonRoot: false", "may run as root"),
    ("a GPU to itself", LIMITED,
     "          memory: 12Gi", "          memory: 12Gi\n          nvidia.com/gpu: 1", "has a GPU to itself"),
    ("a volume that restricted refuses", LIMITED,
     "configMap:\n        name: multiply", "nfs:\n        server: s\n        path: /p", "nfs is more"),
    ("another program", SCHEDULER, '["nvshare-scheduler"]', '["sh"]', "runs something else"),
    ("another container", SCHEDULER,
     "- name: scheduler\n          image", "- name: main\n          image", "not one container"),
    ("sockets together", "proto/src/paths.rs", "/var/run/nvshare-admin/", "/var/run/nvshare/", "in one directory"),
    ("no options in the sources", "nvshare-scheduler/src/settings/options.rs", "#[arg(long", "#[arg(short", "no options in"),
    ("another probe", SCHEDULER, "admin.sock, status, --json]", "admin.sock, clients]", "livenessProbe is not"),
    ("an impatient probe", SCHEDULER, "timeoutSeconds: 6", "timeoutSeconds: 1", "gives up before"),
    ("two schedulers at once", SCHEDULER,
     "maxSurge: 0\n      maxUnavailable: 1", "maxSurge: 1\n      maxUnavailable: 0", "maxSurge 0"),
    ("updated by hand", SCHEDULER, "type: RollingUpdate", "type: OnDelete", "RollingUpdate"),
    ("no priority", SCHEDULER,
     "priorityClassName: system-node-critical", "priorityClassName: high", "system-node-critical"),
    ("a toleration lost", SCHEDULER, "key: nvidia.com/gpu\n", "key: gpu\n", "nvidia.com/gpu is not tolerated"),
    ("every node", SCHEDULER, "key: nvidia.com/gpu.present", "key: gpu.present", "are not excluded"),
    ("NVIDIA's hooks", SCHEDULER, "value: void", "value: all", "NVIDIA's runtime"),
    ("another pod's labels", SCHEDULER,
     "app.kubernetes.io/component: scheduler\n    spec:", "app.kubernetes.io/component: planner\n    spec:",
     "selector"),
    ("a label lost", KUSTOMIZATION, "app.kubernetes.io/part-of", "part-of", "no label app.kubernetes.io/part-of"),
    ("another version", KUSTOMIZATION, "newTag: 0.1.0", "newTag: 0.0.9", "and the workspace is"),
    ("no tag", "manifests/examples/kustomization.yaml",
     "    newTag: 2.5.1-cuda12.4-cudnn9-runtime\n", "", "no fixed tag"),
    ("an image that is not set", SCHEDULER, "image: nvshare\n", "image: nvshare:0.1.0\n", "does not set image"),
    ("hostPath refused", "manifests/namespace.yaml", "enforce: privileged", "enforce: restricted", "is restricted, not privileged"),
    ("examples that may more", "manifests/examples/namespace.yaml",
     "enforce: restricted", "enforce: privileged", "is privileged, not restricted"),
    ("a hostPath in an example", LIMITED,
     "configMap:\n        name: multiply", "hostPath:\n        path: /srv\n        type: Directory", "hostPath is more"),
    ("the socket's file", SCHEDULER, "path: /var/run/nvshare\n            type: DirectoryOrCreate",
     "path: /var/run/nvshare/scheduler.sock\n            type: Socket", "scheduler.sock is a file"),
    ("the kubelet's socket by subPath", PLUGIN, "mountPath: /var/lib/kubelet/pod-resources\n",
     "mountPath: /var/lib/kubelet/pod-resources/kubelet.sock\n              subPath: kubelet.sock\n", "a part of a volume"),
    ("a file as a directory", PLUGIN, "path: /etc/cdi\n            type: DirectoryOrCreate",
     "path: /etc/cdi\n            type: File", "is not declared a directory (File)"),
    ("a volume that is not there", LIMITED,
     "        - name: program\n", "        - name: programme\n", "no volume programme"),
    ("propagation", PLUGIN,
     "mountPath: /var/run/cdi\n", "mountPath: /var/run/cdi\n              mountPropagation: HostToContainer\n",
     "propagates"),
    ("the plugin makes the kubelet's directories", PLUGIN, "type: Directory\n", "type: DirectoryOrCreate\n", "host directories"),
    ("the plugin sees the clients", PLUGIN, "path: /var/run/nvshare-admin\n", "path: /var/run/nvshare\n", "host directories"),
    ("the plugin's CDI elsewhere", PLUGIN, "mountPath: /var/run/cdi", "mountPath: /run/cdi", "the device plugin mounts"),
    ("the plugin may change NVIDIA's CDI", PLUGIN,
     "mountPath: /etc/cdi\n              readOnly: true", "mountPath: /etc/cdi", "the device plugin mounts"),
    ("an option that the plugin has not", PLUGIN, "- --slots", "- --replicas", "the device plugin has no option --replicas"),
    ("another socket for the plugin", PLUGIN,
     "- /var/run/nvshare-admin/admin.sock", "- /var/run/nvshare/admin.sock", "--admin-socket is"),
    ("a library that the image has not", PLUGIN, "/usr/lib/nvshare/libnvshare.so", "/opt/libnvshare.so", "the image has"),
    ("another program for the plugin", PLUGIN, '["nvshare-device-plugin"]', '["sh"]', "runs something else"),
    ("another container for the plugin", PLUGIN,
     "- name: device-plugin\n          image", "- name: main\n          image", "not one container, the device plugin"),
    ("the plugin with more rights", PLUGIN, DROP, DROP + "            privileged: true\n", "device-plugin: privileged"),
    ("no plugin while one is replaced", PLUGIN,
     "maxSurge: 1\n      maxUnavailable: 0", "maxSurge: 0\n      maxUnavailable: 1", "maxSurge 1"),
    ("a driver beside a plugin", DRA, "maxSurge: 0\n          maxUnavailable: 1", "maxSurge: 1\n          maxUnavailable: 0", "manifests/dra: sets"),
    ("a plugin that comes late", PLUGIN,
     "priorityClassName: system-node-critical", "priorityClassName: high", "system-node-critical"),
    ("the plugin on every node", PLUGIN, "key: nvidia.com/gpu.present", "key: gpu.present", "are not excluded"),
    ("seats in the sources", "proto/src/paths.rs", "/var/run/nvshare-seats", "/var/run/seats", "host directories"),
    ("records of seats that a start loses", SCHEDULER,
     "- /var/lib/nvshare/state.toml", "- /var/run/nvshare-admin/state.toml", "--state is"),
    ("no slot", UNLIMITED, "          nvshare.com/gpu: 1\n", "", "asks for None of nvshare.com/gpu, not 1"),
    ("several slots", LIMITED, "nvshare.com/gpu: 1", "nvshare.com/gpu: 2", "asks for 2 of nvshare.com/gpu"),
    ("another resource in the sources", "proto/src/cdi.rs", '"nvshare.com/gpu"', '"nvshare.com/slot"', "of nvshare.com/slot, not 1"),
    ("a preload by hand", UNLIMITED, "name: HOME", "name: LD_PRELOAD", "LD_PRELOAD is the plugin's to set"),
    ("another driver in the sources", "nvshare-device-plugin/src/dra/mod.rs", '"gpu.nvshare.com"', '"gpu.example.com"', "is not nvshare.com/gpu of"),
    ("a class of another resource", CLASS, "extendedResourceName: nvshare.com/gpu", "extendedResourceName: nvshare.com/slot", "is not nvshare.com/gpu of"),
    ("a field of a class that does not exist", CLASS, "extendedResourceName", "extendedResource", "Kubernetes 1.34"),
    ("a class for all devices", CLASS, 'device.driver == "gpu.nvshare.com"', "true == true", "not the devices of gpu.nvshare.com"),
    ("slices of others", POLICY, 'variables.slice.driver == "gpu.nvshare.com"', "true == true", "write slices of others"),
    ("a role that allows more", ACCESS, 'verbs: ["list", ', 'verbs: ["*", ', "the role allows"),
    ("a role for another account", ACCESS, "  - kind: ServiceAccount\n    name: nvshare-dra", "  - kind: ServiceAccount\n    name: default", "have the role"),
    ("claims are not named", KUSTOMIZATION, "#   - dra", "#   - dr", "manifests/dra: adds []"),
    ("claims without a token", DRA, "automountServiceAccountToken\n        value: true", "automountServiceAccountToken\n        value: false", "manifests/dra: sets"),
    ("claims by another option", DRA, "--api=dra", "--api=slots", "manifests/dra: sets"),
    ("a right to read all pods at once", PRIORITIES, 'verbs: ["get"]', 'verbs: ["list"]', "priorities: allows"),
    ("priorities by another option", PRIORITIES, "--priority-of-class=batch", "--class=batch", "priorities: adds"),
    ("a variable twice", DRA, "NVIDIA_DRIVER_CAPABILITIES", "NODE_NAME", "a variable is there twice"),
    ("claims change more", DRA, "patches:", "nameSuffix: -dra\npatches:", "manifests/dra"),
    ("a capacity that the driver has not", CLAIMS, 'compute: "25"', 'cores: "25"', "has no capacity cores"),
    ("a parameter that the driver does not know", CLAIMS, "weight: 50", "share: 50", "does not know the parameters"),
    ("two shares of one GPU", CLAIMS, "distinctAttribute: gpu.nvshare.com/uuid", "matchAttribute: gpu.nvshare.com/uuid", "may be of one GPU"),
    ("a claim of another class", CLAIMS, "deviceClassName: gpu.nvshare.com", "deviceClassName: gpu", "asks for the class gpu"),
    ("a container without its claim", CLAIM_PODS, "        claims:\n          - name: gpu\n", "", "other claims than its pod"),
    ("no options of the plugin in the sources", "nvshare-device-plugin/src/options.rs", "#[arg(long", "#[arg(short", "no options in"),
    ("another namespace", KUSTOMIZATION, "namespace: nvshare\n", "", "is not in the namespace"),
    ("a size that nobody offers", PROFILES, "nvshare.com/gpu.small", "nvshare.com/gpu.tiny", "is not offered"),
    ("a size that nobody asks for", SIZES, "--also=small", "--also=tiny", "the plugin offers"),
    ("a size of nothing known", SIZES, "memory=8Gi", "size=8Gi", "size is no key"),
    ("a setting that KubeSpawner lacks", PROFILES, "extra_resource_limits", "resource_limits", "are no settings"),
    ("a memory limit of Kubernetes", PROFILES, "mem_limit: 4G", "mem_limit: 4Gi", "does not read mem_limit"),
    ("a GitHub job without nvshare", GITHUB, " --device nvshare.com/gpu=all", "", "options are"),
    ("a GitLab job without a limit", GITLAB, "--env NVSHARE_MEM_LIMIT=8GiB", "", "the job is given"),
]  # fmt: skip


def copy(root, place):
    for folder in ("manifests", "docs/recipes"):
        shutil.copytree(root / folder, place / folder)
    sources = ("paths.rs", "env.rs", "cdi.rs")
    options = ("nvshare-scheduler/src/settings/options.rs", "nvshare-device-plugin/src/options.rs")
    driver = (f"nvshare-device-plugin/src/dra/{name}.rs" for name in ("mod", "parameters", "slices"))
    for path in (*(f"proto/src/{name}" for name in sources), *options, *driver, "Cargo.toml"):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / path, place / path)


def expect(name, findings, wanted):
    """What is missed, if no finding says what is wanted."""
    seen = []
    for finding in findings:
        if wanted in finding:
            return []
        seen.append(finding)
    return [f"{name}: nothing says “{wanted}” in {seen}"]


def find(root, name, path, old, new, wanted):
    """What is missed of one break."""
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        copy(root, place)
        text = (place / path).read_text()
        if old not in text:
            return [f"{name}: {path} has no “{old}”"]
        (place / path).write_text(text.replace(old, new))
        try:
            return expect(name, check(place), wanted)
        except Unusable as error:
            return expect(name, [str(error)], wanted)


def self_test(root):
    """Which breaks are not found."""
    missed = []
    with tempfile.TemporaryDirectory() as place:
        copy(root, Path(place))
        missed += [f"a copy with no break: {finding}" for finding in check(Path(place))]

    # Forked, each process knows the schemas of all documents that have no break.
    with multiprocessing.get_context("fork").Pool() as pool:
        missed += sum(pool.starmap(find, [(root, *one) for one in BREAKS], chunksize=1), [])

    missed += expect("a version without schemas", check(root, ("1.99",)), "no schemas of Kubernetes 1.99")

    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        copy(root, place)
        (place / "proto/src/paths.rs").write_text("")
        try:
            list(check(place))
            missed.append("sources without sockets: accepted")
        except Unusable:
            pass

    missed += [finding for tool in ("kubectl", "python3", "pip") for finding in without(tool)]
    return missed, len(BREAKS) + 5


def without(tool):
    """check.sh on a machine that lacks a tool."""
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        (place / "bin").mkdir()
        for name in {"dirname", "mktemp", "mkdir", "rm", "cp", "cmp", "kubectl", "python3"} - {tool}:
            (place / "bin" / name).symlink_to(shutil.which(name))
        if tool == "pip":
            # As on Debian without python3-venv.
            (place / "bin/python3").unlink()
            (place / "bin/python3").write_text('#!/bin/sh\n[ "$2" != venv ]\n')
            (place / "bin/python3").chmod(0o755)
        script = Path(__file__).with_name("check.sh")
        command = ["/bin/sh", script, place / "environment"]
        alone = {"PATH": str(place / "bin")}
        done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=60)
        wanted = "virtual environment" if tool == "pip" else f"{tool} is missing"
        if done.returncode == 0 or wanted not in done.stderr:
            yield f"without {tool}: check.sh exits {done.returncode} and says: {done.stderr.strip()}"


def main():
    missed, number = self_test(Path(__file__).resolve().parents[2])
    for finding in missed:
        print(f"self-test: {finding}", file=sys.stderr)
    if missed:
        return 1
    print(f"self-test: all of {number} breaks are found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
