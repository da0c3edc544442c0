"""Checks manifests/ without a cluster: schemas, and what schemas cannot say. Run by check.sh."""

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath

import kubernetes_validate
import yaml
from kubernetes_validate import utils
from recipes import check_recipes

VERSIONS = ("1.29", "1.33", "1.37")
# The oldest version that has resource.k8s.io/v1, and the newest. Their schemas have the fields behind feature gates as well.
CLAIMS = ("1.34", "1.37")

# The fast one, where it is built.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

STATE = "/var/lib/nvshare"
LIBRARY_ON_HOST = f"{STATE}/lib"
LIBRARY_IN_IMAGE = "/usr/lib/nvshare/libnvshare.so"
# The kubelet makes these; whether a container may only read them.
KUBELET = {"/var/lib/kubelet/device-plugins": False, "/var/lib/kubelet/pod-resources": True}
CDI = {"/var/run/cdi": False, "/etc/cdi": True}
# Where the clean-up finds the host's /var/run.
RUN_IN_CLEAN_UP = "/host/run"
# The component dra/ has this one as well.
REGISTRY = "/var/lib/kubelet/plugins_registry"
READY = "nvidia.com/gpu.present"

# Every document that each folder is to have: nothing unseen, nothing lost.
EXPECTED = {
    "manifests": ["DaemonSet/nvshare-device-plugin", "DaemonSet/nvshare-scheduler", "Namespace/nvshare", "ResourceQuota/critical"],
    "manifests/clean-up": ["DaemonSet/nvshare-clean-up", "Namespace/nvshare-clean-up"],
    "manifests/dra/cluster": [
        "DeviceClass/gpu.nvshare.com", "ValidatingAdmissionPolicy/nvshare-dra", "ValidatingAdmissionPolicyBinding/nvshare-dra",
    ],
    "manifests/dra/examples": [
        "Namespace/nvshare-claims", "Pod/common-one", "Pod/common-two", "Pod/pair", "Pod/quarter", "ResourceClaim/common",
        "ResourceClaimTemplate/pair", "ResourceClaimTemplate/quarter",
    ],
    "manifests/examples": [
        "ConfigMap/multiply", "Namespace/nvshare-examples", "Pod/limited", "Pod/unlimited", "ResourceQuota/slots",
    ],
    "manifests/sizes/examples": ["Namespace/nvshare-sizes", "Pod/high", "ResourceQuota/high"],
}  # fmt: skip

# The level of Pod Security that each folder's namespace has.
LEVELS = {
    "manifests": "privileged", "manifests/clean-up": "privileged", "manifests/examples": "restricted",
    "manifests/dra/examples": "restricted", "manifests/sizes/examples": "restricted",
}  # fmt: skip
# Folders that need claims.
OF_CLAIMS = ("manifests/dra/cluster", "manifests/dra/examples")

# Volume types that the Pod Security level "restricted" allows.
RESTRICTED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip


class Unusable(Exception):
    """The check cannot be made."""


class Sources:
    """What the programs' sources say."""

    def __init__(self, root):
        def text(path):
            return (root / path).read_text()

        def one(pattern, path):
            found = re.findall(pattern, text(path), re.MULTILINE)
            if len(found) != 1:
                raise Unusable(f"{path}: {len(found)} matches of {pattern}, not one")
            return found[0]

        self.socket = one(r'const SYSTEM_SOCKET: &str = "(.+)";', "proto/src/paths.rs")
        self.admin_socket = one(r'const SYSTEM_ADMIN_SOCKET: &str = "(.+)";', "proto/src/paths.rs")
        self.seats = one(r'const SEATS: &str = "(.+)";', "proto/src/paths.rs")
        self.resource = one(r'const KIND: &str = "(.+)";', "proto/src/cdi.rs")
        # With the further ones that the component sizes/ offers.
        rows = re.findall(r"value: --also=([a-z0-9-]+)=", text("manifests/sizes/kustomization.yaml"))
        self.resources = [self.resource, *(f"{self.resource}.{row}" for row in rows)]
        self.driver = one(r'const DRIVER: &str = "(.+)";', "nvshare-device-plugin/src/dra/mod.rs")
        parameters = text("nvshare-device-plugin/src/dra/parameters.rs")
        self.parameters = {"apiVersion", "kind", *re.findall(r"^    (\w+): Option<", parameters, re.MULTILINE)}
        slices = text("nvshare-device-plugin/src/dra/slices.rs")
        self.capacities = set(re.findall(r'^pub const \w+: &str = "(\w+)";', slices, re.MULTILINE))
        self.attributes = set(re.findall(r'^        \("(\w+)", ', slices, re.MULTILINE))
        self.variables = set(re.findall(r'&str = "(NVSHARE_\w+)";', text("proto/src/env.rs")))
        self.options = self.options_in(text("nvshare-scheduler/src/settings/options.rs"))
        self.plugin_options = self.options_in(text("nvshare-device-plugin/src/options.rs"))
        self.version = one(r'\[workspace\.package\]\nversion = "(.+)"', "Cargo.toml")
        if not self.variables or not self.options or not self.plugin_options:
            raise Unusable("no variables in proto/src/env.rs, or no options in an options.rs")

    @staticmethod
    def options_in(text):
        names = re.findall(r"#\[arg\(\s*long\b[^\]]*\]\n\s+(?:pub(?:\(\w+\))? )?(\w+):", text)
        return {"--" + name.replace("_", "-") for name in names}


def directory_of(path):
    return str(PurePosixPath(path).parent)


@functools.lru_cache(maxsize=16)
def render(root, folder):
    """The documents of a folder, which no check changes, and why there are none. Each component is compared with all without it."""
    done = subprocess.run(["kubectl", "kustomize", root / folder], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        return [], [f"{folder}: does not render: {done.stderr.strip()}"]
    return [document for document in yaml.load_all(done.stdout, LOADER) if document], []


def title(document):
    return f"{document.get('kind')}/{document.get('metadata', {}).get('name')}"


def check_schema(document, versions):
    return schema_findings(json.dumps(document, sort_keys=True, default=str), tuple(versions))


@functools.cache
def schema_findings(text, versions):
    """What is wrong with a document, as JSON. Many documents are the same in all folders, and in all runs of the self-test."""
    return list(of_wrong_shape(json.loads(text), versions))


def of_wrong_shape(document, versions):
    for version in versions:
        # An older schema would be taken in silence for a version that is not there.
        if version not in map(utils.major_minor, utils.all_versions()):
            yield f"kubernetes-validate has no schemas of Kubernetes {version}"
            continue
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"Kubernetes {version}: {'.'.join(map(str, error.path))}: {error.message[:300]}"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield error.message


def containers_of(pod):
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        yield from pod.get(kind) or []


def host_paths(pod):
    """Host path and declared type of each volume that has one."""
    volumes = pod.get("volumes") or []
    return {v["name"]: (v["hostPath"].get("path"), v["hostPath"].get("type")) for v in volumes if "hostPath" in v}


def mounts_of(pod, container):
    """Host path → (path in the container, read-only)."""
    paths = host_paths(pod)
    return {
        paths[mount["name"]][0]: (mount["mountPath"], mount.get("readOnly", False))
        for mount in container.get("volumeMounts") or []
        if mount["name"] in paths
    }


def environment(container):
    return {entry["name"]: entry.get("value") for entry in container.get("env") or []}


def check_pod(pod):
    """What holds for every pod."""
    for field in ("hostPID", "hostIPC", "hostNetwork", "shareProcessNamespace"):
        if pod.get(field):
            yield f"{field} is on"
    if pod.get("automountServiceAccountToken") is not False:
        yield "a service account token is mounted"
    volumes = {volume["name"]: volume for volume in pod.get("volumes") or []}
    for name, volume in volumes.items():
        for source in volume.get("projected", {}).get("sources", []):
            if "serviceAccountToken" in source:
                yield f"volume {name} has a service account token"
    for path, kind in host_paths(pod).values():
        if kind not in ("Directory", "DirectoryOrCreate"):
            yield f"hostPath {path} is not declared a directory ({kind})"
        if PurePosixPath(path).suffix in (".sock", ".so"):
            yield f"hostPath {path} is a file, not its directory"
    used = set()
    for container in containers_of(pod):
        where = f"container {container['name']}"
        for mount in container.get("volumeMounts") or []:
            used.add(mount["name"])
            if mount["name"] not in volumes:
                yield f"{where}: no volume {mount['name']}"
            if "subPath" in mount or "subPathExpr" in mount:
                yield f"{where}: {mount['mountPath']} mounts a part of a volume, which may be a file"
            if mount.get("mountPropagation", "None") != "None":
                yield f"{where}: {mount['mountPath']} propagates mounts"
        yield from (f"{where}: {finding}" for finding in check_container(pod, container))
    for name in volumes.keys() - used:
        yield f"volume {name} is not used"
    for toleration in pod.get("tolerations") or []:
        if toleration.get("key") == "nvidia.com/gpu" and toleration.get("operator") == "Exists":
            break
    else:
        yield "nvidia.com/gpu is not tolerated"
    for finding in check_nodes(pod):
        yield finding


def check_nodes(pod):
    """The resource or a claim chooses the node, or a label does."""
    if pod.get("resourceClaims"):
        return
    limits = [container.get("resources", {}).get("limits", {}) for container in containers_of(pod)]
    if any(name.startswith("nvshare.com/") for names in limits for name in names):
        return
    node = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = node.get("nodeSelectorTerms") or []
    wanted = {"key": READY, "operator": "In", "values": ["true"]}
    if not terms or any(wanted not in (term.get("matchExpressions") or []) for term in terms):
        yield f"nodes without {READY} are not excluded"


def check_container(pod, container):
    security = container.get("securityContext", {})
    capabilities = security.get("capabilities", {})
    if security.get("privileged"):
        yield "privileged"
    if security.get("allowPrivilegeEscalation") is not False:
        yield "privilege escalation is allowed"
    if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
        yield "does not drop all capabilities"
    if security.get("procMount", "Default") != "Default":
        yield "/proc is not masked"
    seccomp = security.get("seccompProfile", pod.get("securityContext", {}).get("seccompProfile", {}))
    if seccomp.get("type") != "RuntimeDefault":
        yield "seccomp is not RuntimeDefault"
    resources = container.get("resources", {})
    for group, names in (("requests", ("cpu", "memory")), ("limits", ("memory",))):
        for name in names:
            if name not in resources.get(group, {}):
                yield f"resources: no {group} of {name}"
    if any(port.get("hostPort") for port in container.get("ports") or []):
        yield "takes a port of the host"
    tag = container["image"].rpartition("/")[2].partition(":")[2]
    if tag in ("", "latest"):
        yield f"image {container['image']} has no fixed tag"


def check_daemon(daemon, sources, surge):
    """What holds for both daemons. `surge`: how many of its pods may be there beside the one that they replace."""
    spec = daemon["spec"]
    template = spec["template"]
    pod = template["spec"]
    labels = template["metadata"]["labels"]
    if not spec["selector"]["matchLabels"].items() <= labels.items():
        yield "the selector does not match the pods' labels"
    for label in ("name", "component", "part-of"):
        for place, found in (("DaemonSet", daemon["metadata"].get("labels", {})), ("pods", labels)):
            if f"app.kubernetes.io/{label}" not in found:
                yield f"{place}: no label app.kubernetes.io/{label}"
    strategy = spec.get("updateStrategy", {})
    if strategy.get("type") != "RollingUpdate" or strategy.get("rollingUpdate", {}).get("maxSurge", 0) != surge:
        yield f"updates do not replace one pod by the next (RollingUpdate, maxSurge {surge})"
    if pod.get("priorityClassName") != "system-node-critical":
        yield "the priority is not system-node-critical"
    if pod.get("enableServiceLinks") is not False:
        yield "services' variables are put into the environment"

    images = {container["image"] for container in containers_of(pod)}
    if images != {f"nvshare:{sources.version}"}:
        yield f"images {sorted(images)}, and the workspace is nvshare:{sources.version}"
    for container in containers_of(pod):
        if container.get("securityContext", {}).get("readOnlyRootFilesystem") is not True:
            yield f"container {container['name']}: the root file system can be written"
        if environment(container).get("NVIDIA_VISIBLE_DEVICES") != "void":
            yield f"container {container['name']}: NVIDIA's runtime may change its read-only root file system"


def check_plugin(daemon, sources):
    yield from check_daemon(daemon, sources, 1)
    pod = daemon["spec"]["template"]["spec"]
    made = {STATE: False, directory_of(sources.admin_socket): True, **CDI}
    wanted = {path: "DirectoryOrCreate" for path in made} | {path: "Directory" for path in KUBELET}
    if dict(host_paths(pod).values()) != wanted:
        yield f"host directories {dict(host_paths(pod).values())}, not {wanted}"
    if [container["name"] for container in containers_of(pod)] != ["device-plugin"]:
        yield "there is not one container, the device plugin"
        return
    plugin = pod["containers"][0]
    if plugin.get("command") != ["nvshare-device-plugin"]:
        yield "the device plugin's container runs something else"
    options = options_of(plugin.get("args") or [])
    for name in options.keys() - sources.plugin_options:
        yield f"the device plugin has no option {name}"
    if options.get("--library") != LIBRARY_IN_IMAGE:
        yield f"--library is {options.get('--library')}, and the image has {LIBRARY_IN_IMAGE}"
    if options.get("--admin-socket") != sources.admin_socket:
        yield f"--admin-socket is {options.get('--admin-socket')}, and paths.rs says {sources.admin_socket}"
    # By the paths of the host: the kubelet and the engine get them.
    mounts = {path: (path, read_only) for path, read_only in (made | KUBELET).items()}
    if mounts_of(pod, plugin) != mounts:
        yield f"the device plugin mounts {mounts_of(pod, plugin)}, not {mounts}"


def check_scheduler(daemon, sources):
    yield from check_daemon(daemon, sources, 0)
    pod = daemon["spec"]["template"]["spec"]
    clients, administrators = directory_of(sources.socket), directory_of(sources.admin_socket)
    if clients == administrators:
        yield "both sockets are in one directory"
    own = (clients, administrators, sources.seats, STATE)
    wanted = {path: "DirectoryOrCreate" for path in (*own, LIBRARY_ON_HOST)}
    if dict(host_paths(pod).values()) != wanted:
        yield f"host directories {dict(host_paths(pod).values())}, not {wanted}"

    if [container["name"] for container in pod["containers"]] != ["scheduler"]:
        yield "there is not one container, the scheduler"
        return
    scheduler = pod["containers"][0]
    if scheduler.get("command") != ["nvshare-scheduler"]:
        yield "the scheduler's container runs something else"
    options = options_of(scheduler.get("args") or [])
    for name in options.keys() - sources.options:
        yield f"the scheduler has no option {name}"
    if options.get("--socket") != sources.socket:
        yield f"--socket is {options.get('--socket')}, and paths.rs says {sources.socket}"
    if options.get("--admin-socket") != sources.admin_socket:
        yield f"--admin-socket is {options.get('--admin-socket')}, and paths.rs says {sources.admin_socket}"
    if directory_of(options.get("--state") or "/") != STATE:
        yield f"--state is {options.get('--state')}, not in {STATE}"
    if mounts_of(pod, scheduler) != {path: (path, False) for path in own}:
        yield f"the scheduler mounts {mounts_of(pod, scheduler)}, not {own}"

    probe = ["nvshare-ctl", "--socket", sources.admin_socket, "status", "--json"]
    for kind in ("livenessProbe", "readinessProbe"):
        found = scheduler.get(kind, {})
        if found.get("exec", {}).get("command") != probe:
            yield f"{kind} is not {' '.join(probe)}"
        if found.get("timeoutSeconds", 1) <= 5:
            yield f"{kind} gives up before nvshare-ctl does (5 s)"

    init = pod.get("initContainers") or []
    if [container["name"] for container in init] != ["library"]:
        yield "there is not one init container, the library's"
        return
    if mounts_of(pod, init[0]) != {LIBRARY_ON_HOST: (LIBRARY_ON_HOST, False)}:
        yield f"the init container mounts {mounts_of(pod, init[0])}, not {LIBRARY_ON_HOST}"
    yield from (f"the library's installation {finding}" for finding in check_install(init[0]))


def check_clean_up(daemon, sources):
    """It sees all that the two daemons may leave, and does nothing else."""
    pod = daemon["spec"]["template"]["spec"]
    mounts = {path: (path, False) for path in (STATE, REGISTRY)} | {path: (path, only) for path, only in KUBELET.items()}
    # It removes folders in this one.
    run = PurePosixPath(sources.seats).parent
    mounts[str(run)] = (RUN_IN_CLEAN_UP, False)
    init = pod.get("initContainers") or []
    if [container["name"] for container in init] != ["clean-up"]:
        yield "there is not one init container, which cleans up"
        return
    command = init[0].get("command") or []
    if command[:2] != ["nvshare-device-plugin", "--clean-up"]:
        yield f"the init container does not clean up: {command}"
    options = options_of([word for word in command[1:] if word != "--clean-up"])
    for name in {"--clean-up", *options} - sources.plugin_options:
        yield f"the device plugin has no option {name}"
    inside = PurePosixPath(RUN_IN_CLEAN_UP)
    places = {
        "--run-dir": inside,
        "--cdi-dir": inside / "cdi",
        "--admin-socket": inside / PurePosixPath(sources.admin_socket).relative_to(run),
    }
    if options != {name: str(place) for name, place in places.items()}:
        yield f"the clean-up has the options {options}"
    if PurePosixPath(directory_of(sources.socket)).parent != run:
        yield f"the clean-up does not reach {sources.socket}"
    # A closed network has no other image.
    images = {container["image"] for container in containers_of(pod)}
    if images != {f"nvshare:{sources.version}"}:
        yield f"images {sorted(images)}, and the workspace is nvshare:{sources.version}"
    if mounts_of(pod, init[0]) != mounts:
        yield f"the clean-up mounts {mounts_of(pod, init[0])}, not {mounts}"
    if any(container.get("volumeMounts") for container in pod["containers"]):
        yield "what waits behind the clean-up mounts something"


def check_device_class(found, sources):
    spec = found["spec"]
    if found["metadata"]["name"] != sources.driver or spec.get("extendedResourceName") != sources.resource:
        yield f"{spec.get('extendedResourceName')} is not {sources.resource} of {sources.driver}"
    if spec.get("selectors") != [{"cel": {"expression": f'device.driver == "{sources.driver}"'}}]:
        yield f"selects {spec.get('selectors')}, not the devices of {sources.driver}"


def check_policy(found, sources):
    expressions = " ".join(one["expression"] for one in found["spec"]["validations"])
    if f'driver == "{sources.driver}"' not in expressions or "nodeName" not in expressions:
        yield "lets a driver write slices of others"
    wanted = 'request.userInfo.username == "system:serviceaccount:nvshare:nvshare-dra"'
    if [one["expression"] for one in found["spec"]["matchConditions"]] != [wanted]:
        yield "is for others than the driver"


def check_claim(spec, sources):
    """What a claim or a template of claims asks for, by names that the driver knows."""
    devices = spec["devices"]
    for request in devices["requests"]:
        exactly = request["exactly"]
        if exactly.get("deviceClassName") != sources.driver:
            yield f"asks for the class {exactly.get('deviceClassName')}, not {sources.driver}"
        for name in exactly.get("capacity", {}).get("requests", {}).keys() - sources.capacities:
            yield f"the driver has no capacity {name}"
        distinct = {constraint.get("distinctAttribute") for constraint in devices.get("constraints", [])}
        if exactly.get("count", 1) > 1 and distinct != {f"{sources.driver}/uuid"}:
            yield "several shares may be of one GPU"
        if "uuid" not in sources.attributes:
            yield "the driver has no attribute uuid"
    for config in devices.get("config", []):
        parameters = config["opaque"]["parameters"]
        if config["opaque"]["driver"] != sources.driver or parameters.keys() - sources.parameters:
            yield f"the driver does not know the parameters {parameters}"


def check_claims_pod(pod):
    """A pod whose containers have all claims that it names, and no slot beside them."""
    names = {claim["name"] for claim in pod.get("resourceClaims") or []}
    for container in containers_of(pod):
        resources = container.get("resources", {})
        if {claim["name"] for claim in resources.get("claims") or []} != names:
            yield f"container {container['name']}: has other claims than its pod"
        if names and any(name.startswith("nvshare.com/") for name in resources.get("limits", {})):
            yield f"container {container['name']}: has a slot beside a claim"


def check_quota(quota, sources):
    """One counts slots, and one lets the daemons have their priority."""
    names = list(quota["spec"].get("hard", {}))
    scopes = quota["spec"].get("scopeSelector", {}).get("matchExpressions", [])
    counted = ["pods"] if scopes else [f"requests.{resource}" for resource in sources.resources]
    if names not in [[name] for name in counted]:
        yield f"counts {names}, not one of {counted}"
    critical = {"scopeName": "PriorityClass", "operator": "In", "values": ["system-node-critical"]}
    if scopes and scopes != [critical]:
        yield f"is for {scopes}, not for the daemons' priority"


def options_of(words):
    options = {}
    words = iter(words)
    for word in words:
        name, equals, value = word.partition("=")
        options[name] = value if equals else next(words, None)
    return options


def check_install(container):
    """The image's own command puts the library in place; its tests say how."""
    words = [*container.get("command", []), *container.get("args", [])]
    if words != ["nvshare-ctl", "install-library", LIBRARY_ON_HOST]:
        yield f"is not: nvshare-ctl install-library {LIBRARY_ON_HOST}"


def check_example(pod, sources):
    """A pod that asks for a slot or a claim, and for nothing that the level restricted refuses."""
    security = pod.get("securityContext", {})
    for volume in pod.get("volumes") or []:
        for kind in volume.keys() - {"name"} - RESTRICTED_VOLUMES:
            yield f"volume {volume['name']}: {kind} is more than restricted allows"
    for container in containers_of(pod):
        where = f"container {container['name']}"
        own = container.get("securityContext", {})
        if own.get("runAsNonRoot", security.get("runAsNonRoot")) is not True:
            yield f"{where}: may run as root"
        if own.get("runAsUser", security.get("runAsUser")) == 0:
            yield f"{where}: runs as root"
        limits = container.get("resources", {}).get("limits", {})
        if "nvidia.com/gpu" in limits:
            yield f"{where}: has a GPU to itself"
        resource = next((name for name in limits if name in sources.resources), sources.resource)
        if not pod.get("resourceClaims") and str(limits.get(resource)) != "1":
            yield f"{where}: asks for {limits.get(resource)} of {resource}, not 1"
        found = environment(container)
        for name in found:
            if name.startswith("NVSHARE_") and name not in sources.variables:
                yield f"{where}: env.rs has no {name}"
        for name in ("LD_PRELOAD", "NVSHARE_SOCKET", "NVIDIA_VISIBLE_DEVICES"):
            if name in found:
                yield f"{where}: {name} is the plugin's to set"


def check_kustomization(root):
    """The image is set in one place."""
    folder = root / "manifests"
    images = {image["name"] for image in yaml.safe_load((folder / "kustomization.yaml").read_text()).get("images", [])}
    for file in ("scheduler.yaml", "device-plugin.yaml"):
        daemon = yaml.safe_load((folder / file).read_text())
        for container in containers_of(daemon["spec"]["template"]["spec"]):
            if container["image"] not in images:
                yield f"manifests: kustomize does not set image {container['image']}"


def with_component(root, name, daemon="DaemonSet/nvshare-scheduler", *behind):
    """All documents with a component, and those behind it, switched on, the daemon that it changes among them, all without it, and what is wrong."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(root / "manifests", Path(place) / "manifests")
        kustomization = Path(place) / "manifests/kustomization.yaml"
        switched_on = "".join(f"  - {one}\n" for one in (name, *behind))
        switched = re.sub(rf"^# components:\n(?:#.*\n)*# +- {name}\n", f"components:\n{switched_on}", kustomization.read_text(), flags=re.MULTILINE)
        kustomization.write_text(switched)
        documents, failures = render(Path(place), "manifests")
    changed = {title(document): document for document in documents}.get(daemon)
    if changed is None and not failures:
        failures = [f"manifests/{name}: there is no {daemon} to change"]
    plain, more = render(root, "manifests")
    return documents, changed, plain, failures + more


def check_host_memory(root, versions, sources):
    """The component of the scheduler that hands out memory of the host changes what it says, and nothing else."""
    documents, scheduler, plain, failures = with_component(root, "host-memory")
    if failures:
        yield from failures
        return
    for finding in check_schema(scheduler, versions):
        yield f"manifests/host-memory: {finding}"
    container = scheduler["spec"]["template"]["spec"]["containers"][0]
    resources = container["resources"]
    arguments = container["args"]
    added = arguments[-2:]
    if "--host-memory" not in sources.options or added[:1] != ["--host-memory"]:
        yield f"manifests/host-memory: adds {added}, not --host-memory SIZE"
    if "memory" in resources.get("limits", {}):
        yield "manifests/host-memory: the scheduler has a limit of memory, and what it hands out is charged to it"
    sizes = [re.fullmatch(r"(\d+)Gi", size) for size in (added[-1], resources["requests"]["memory"])]
    if not all(sizes) or int(sizes[0].group(1)) >= int(sizes[1].group(1)):
        yield f"manifests/host-memory: asks the node for {resources['requests']['memory']} and hands out {added[-1]}"
    base = {title(document): document for document in plain}.get("DaemonSet/nvshare-scheduler", {})
    del arguments[-2:]
    container["resources"] = base["spec"]["template"]["spec"]["containers"][0]["resources"] if base else {}
    if documents != plain:
        yield "manifests/host-memory: changes more than that"


def check_nvml(root, versions):
    """The component of the scheduler with NVML changes what it says, and nothing else."""
    with_nvml, scheduler, plain, failures = with_component(root, "nvml")
    if failures:
        yield from failures
        return
    for finding in check_schema(scheduler, versions):
        yield f"manifests/nvml: {finding}"
    pod = scheduler["spec"]["template"]["spec"]
    container = pod["containers"][0]
    changed = {
        "hostPID": pod.pop("hostPID", None),
        "runtimeClassName": pod.pop("runtimeClassName", None),
        "NVIDIA_VISIBLE_DEVICES": environment(container).get("NVIDIA_VISIBLE_DEVICES"),
        "NVIDIA_DRIVER_CAPABILITIES": environment(container).get("NVIDIA_DRIVER_CAPABILITIES"),
        "readOnlyRootFilesystem": container.get("securityContext", {}).get("readOnlyRootFilesystem"),
    }
    wanted = {
        "hostPID": True,
        "runtimeClassName": "nvidia",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "utility",
        "readOnlyRootFilesystem": False,
    }
    if changed != wanted:
        yield f"manifests/nvml: sets {changed}, not {wanted}"
    container["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    container["securityContext"]["readOnlyRootFilesystem"] = True
    if with_nvml != plain:
        yield "manifests/nvml: changes more than that"


def check_features(root, versions, sources):
    """The component for Node Feature Discovery gives the plugin one more folder, and changes nothing else."""
    documents, plugin, plain, failures = with_component(root, "nfd", "DaemonSet/nvshare-device-plugin")
    if failures:
        yield from failures
        return
    for finding in check_schema(plugin, versions):
        yield f"manifests/nfd: {finding}"
    pod = plugin["spec"]["template"]["spec"]
    container = pod["containers"][0]
    option, volume, mount = container["args"].pop(), pod["volumes"].pop(), container["volumeMounts"].pop()
    folder = volume.get("hostPath", {}).get("path")
    if option != f"--features-dir={folder}" or mount.get("mountPath") != folder or mount["name"] != volume["name"]:
        yield f"manifests/nfd: {option}, {volume} and {mount} do not go together"
    if "--features-dir" not in sources.plugin_options:
        yield "manifests/nfd: the device plugin has no option --features-dir"
    if documents != plain:
        yield "manifests/nfd: changes more than that"


def check_sizes(root, versions, sources):
    """The component for further resources gives the plugin a row of each, and changes nothing else."""
    documents, plugin, plain, failures = with_component(root, "sizes", "DaemonSet/nvshare-device-plugin")
    if failures:
        yield from failures
        return
    for finding in check_schema(plugin, versions):
        yield f"manifests/sizes: {finding}"
    rows = len(sources.resources) - 1
    arguments = plugin["spec"]["template"]["spec"]["containers"][0]["args"]
    added = arguments[len(arguments) - rows :]
    del arguments[len(arguments) - rows :]
    names = [re.fullmatch(r"--also=([a-z0-9-]+)=.+", argument) for argument in added]
    if "--also" not in sources.plugin_options or not rows or not all(names):
        yield f"manifests/sizes: adds {added}, not --also=NAME=KEY=VALUE"
    if documents != plain:
        yield "manifests/sizes: changes more than that"


# The node's name, for the components that need it.
NODE_NAME = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}


def check_gpus(root, versions, sources):
    """The component for the GPUs of each node gives the plugin a map of them, and changes nothing else."""
    documents, plugin, plain, failures = with_component(root, "gpus", "DaemonSet/nvshare-device-plugin")
    if failures:
        yield from failures
        return
    maps = [document for document in documents if document["kind"] == "ConfigMap"]
    for document in [plugin, *maps]:
        for finding in check_schema(document, versions):
            yield f"manifests/gpus: {title(document)}: {finding}"
    gpu = r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    if len(maps) != 1 or not all(re.fullmatch(f"{gpu}(,{gpu})*", gpus) for gpus in maps[0]["data"].values()):
        yield "manifests/gpus: there is not one ConfigMap with UUIDs of each node"
        return
    pod = plugin["spec"]["template"]["spec"]
    container = pod["containers"][0]
    option = container["args"].pop()
    node = next((entry for entry in container["env"] if entry["name"] == NODE_NAME["name"]), {"name": None})
    volume, mount = pod["volumes"].pop(), container["volumeMounts"].pop()
    name = maps[0]["metadata"]["name"]
    wanted = {
        "option": f"--gpus-of={mount.get('mountPath')}/$({node['name']})",
        "node": {"fieldRef": {"fieldPath": "spec.nodeName"}},
        "volume": {"name": mount["name"], "configMap": {"name": name}},
        "namespace": plugin["metadata"].get("namespace"),
    }
    found = {"option": option, "node": node.get("valueFrom"), "volume": volume, "namespace": maps[0]["metadata"].get("namespace")}
    if found != wanted or "--gpus-of" not in sources.plugin_options:
        yield f"manifests/gpus: {found}, not {wanted}"
    if [document for document in documents if document["kind"] != "ConfigMap"] != plain:
        yield "manifests/gpus: changes more than that"


def check_monitoring(root, versions, sources):
    """The component for metrics opens a port, looks for pods that there are, and changes nothing else."""
    documents, scheduler, plain, failures = with_component(root, "monitoring")
    if failures:
        yield from failures
        return
    for finding in check_schema(scheduler, versions):
        yield f"manifests/monitoring: {finding}"
    monitors = [document for document in documents if document["kind"] == "PodMonitor"]
    labels = scheduler["spec"]["template"]["metadata"]["labels"]
    container = scheduler["spec"]["template"]["spec"]["containers"][0]
    ports = container.pop("ports", [])
    option = container["args"].pop()
    if "--metrics" not in sources.options or [option] != [f"--metrics=0.0.0.0:{port['containerPort']}" for port in ports]:
        yield f"manifests/monitoring: {option} is not at the port {ports}"
    if len(monitors) != 1:
        yield f"manifests/monitoring: there are {len(monitors)} monitors"
        return
    spec = monitors[0]["spec"]
    if not spec["selector"]["matchLabels"].items() <= labels.items():
        yield "manifests/monitoring: the monitor looks for other pods"
    if [endpoint.get("port") for endpoint in spec["podMetricsEndpoints"]] != [port["name"] for port in ports]:
        yield "manifests/monitoring: the monitor looks for another port"
    if [document for document in documents if document["kind"] != "PodMonitor"] != plain:
        yield "manifests/monitoring: changes more than that"


def check_dra(root, versions, sources):
    """The component for claims gives the plugin another API, a token with a least role and NVML, and changes nothing else."""
    documents, plugin, plain, failures = with_component(root, "dra", "DaemonSet/nvshare-device-plugin")
    if failures:
        yield from failures
        return
    added = [document for document in documents if document not in plain and document is not plugin]
    if sorted(map(title, added)) != ["ClusterRole/nvshare-dra", "ClusterRoleBinding/nvshare-dra", "ServiceAccount/nvshare-dra"]:
        yield f"manifests/dra: adds {sorted(map(title, added))}"
        return
    by_title = {title(document): document for document in added}
    for document in (plugin, *added):
        for finding in check_schema(document, versions):
            yield f"manifests/dra: {title(document)}: {finding}"
    rules = {
        (*rule["apiGroups"], *rule["resources"]): rule["verbs"] for rule in by_title["ClusterRole/nvshare-dra"]["rules"]
    }
    # What the driver asks an API server that is played: nvshare-device-plugin/tests/dra.rs.
    wanted = {
        ("", "nodes"): ["get"],
        ("resource.k8s.io", "resourceclaims"): ["get"],
        ("resource.k8s.io", "resourceslices"): ["list", "watch", "create", "update", "delete"],
    }
    if rules != wanted:
        yield f"manifests/dra: the role allows {rules}, not {wanted}"
    subjects = [(one["kind"], one["namespace"], one["name"]) for one in by_title["ClusterRoleBinding/nvshare-dra"]["subjects"]]
    if subjects != [("ServiceAccount", "nvshare", "nvshare-dra")]:
        yield f"manifests/dra: {subjects} have the role"
    pod = plugin["spec"]["template"]["spec"]
    daemon = {title(document): document for document in plain}["DaemonSet/nvshare-device-plugin"]
    base = daemon["spec"]["template"]["spec"]
    container, before = pod["containers"][0], base["containers"][0]
    nvml = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"}]
    changed = {
        "updates": plugin["spec"].pop("updateStrategy")["rollingUpdate"],
        "--api": container["args"].pop() if "--api" in sources.plugin_options else None,
        "env": sorted(map(str, container["env"])),
        "account": (pod.pop("serviceAccountName", None), pod["automountServiceAccountToken"]),
        "runtimeClassName": pod.pop("runtimeClassName", None),
        "readOnlyRootFilesystem": container["securityContext"]["readOnlyRootFilesystem"],
        "folder": (container["volumeMounts"].pop()["mountPath"], pod["volumes"].pop().get("hostPath")),
    }
    wanted = {
        "updates": {"maxSurge": 0, "maxUnavailable": 1},
        "--api": "--api=dra",
        "env": sorted(map(str, [NODE_NAME, *nvml])),
        "account": ("nvshare-dra", True),
        "runtimeClassName": "nvidia",
        "readOnlyRootFilesystem": False,
        "folder": (REGISTRY, {"path": REGISTRY, "type": "Directory"}),
    }
    if changed != wanted:
        yield f"manifests/dra: sets {changed}, not {wanted}"
    pod["automountServiceAccountToken"] = base["automountServiceAccountToken"]
    container["env"], container["securityContext"] = before["env"], before["securityContext"]
    plugin["spec"]["updateStrategy"] = daemon["spec"]["updateStrategy"]
    if [document for document in documents if document not in added] != plain:
        yield "manifests/dra: changes more than that"
    _, both, _, failures = with_component(root, "dra", "DaemonSet/nvshare-device-plugin", "gpus")
    yield from failures
    names = [entry["name"] for entry in both["spec"]["template"]["spec"]["containers"][0]["env"]] if both else []
    if len(names) != len(set(names)):
        yield f"manifests/dra with manifests/gpus: a variable is there twice: {names}"


def check_priorities(root, versions, sources):
    """The component for PriorityClasses adds the right to get pods, and options; it stands behind dra/."""
    documents, plugin, _, failures = with_component(root, "dra", "DaemonSet/nvshare-device-plugin", "dra/priorities")
    before, _, _, more = with_component(root, "dra", "DaemonSet/nvshare-device-plugin")
    if failures or more:
        yield from failures + more
        return
    for document in documents:
        for finding in check_schema(document, versions):
            yield f"manifests/dra/priorities: {title(document)}: {finding}"
    roles = [document for document in documents if document["kind"] == "ClusterRole"]
    added = roles[0]["rules"].pop()
    if added != {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}:
        yield f"manifests/dra/priorities: allows {added}"
    arguments = plugin["spec"]["template"]["spec"]["containers"][0]["args"]
    old = next(document for document in before if title(document) == title(plugin))
    count = len(old["spec"]["template"]["spec"]["containers"][0]["args"])
    options = arguments[count:]
    del arguments[count:]
    names = [re.fullmatch(r"--priority-of-class=[a-z0-9.-]+=(low|normal|high)", option) for option in options]
    if "--priority-of-class" not in sources.plugin_options or not options or not all(names):
        yield f"manifests/dra/priorities: adds {options}, not --priority-of-class=NAME=PRIORITY"
    if documents != before:
        yield "manifests/dra/priorities: changes more than that"


def check_simulated(root, versions, sources):
    """The component for nodes without a GPU changes what it says, and nothing else."""
    documents, _, plain, failures = with_component(root, "simulated")
    if failures:
        yield from failures
        return
    gpus = [document for document in documents if document["kind"] == "ConfigMap"]
    documents = [document for document in documents if document["kind"] != "ConfigMap"]
    if [list(gpu["data"]) for gpu in gpus] != [["information"]]:
        yield f"manifests/simulated: has {[title(gpu) for gpu in gpus]}, not one ConfigMap with what is said of a GPU"
    base = {title(document): document for document in plain}
    for document in documents:
        for finding in check_schema(document, versions):
            yield f"manifests/simulated: {title(document)}: {finding}"
        if document["kind"] != "DaemonSet":
            continue
        pod = document["spec"]["template"]["spec"]
        was = base[title(document)]["spec"]["template"]["spec"]
        container, before = pod["containers"][0], was["containers"][0]
        for finding in check_pod({**pod, "affinity": was["affinity"]}):
            yield f"manifests/simulated: {title(document)}: {finding}"
        known = sources.plugin_options if before["name"] == "device-plugin" else sources.options
        for name in options_of(container["args"]).keys() - known:
            yield f"manifests/simulated: {before['name']} has no option {name}"
        if "affinity" in pod:
            yield f"manifests/simulated: {title(document)}: chooses nodes with GPUs"
        pod["affinity"] = was["affinity"]
        for place, old, name in ((pod, was, "volumes"), (container, before, "volumeMounts"), (container, before, "args"), (pod, was, "initContainers")):
            if name in old:
                del place[name][len(old[name]):]
    if documents != plain:
        yield "manifests/simulated: changes more than that"


CLAIM_KINDS = {
    "DeviceClass": check_device_class,
    "ResourceClaim": lambda found, sources: check_claim(found["spec"], sources),
    "ResourceClaimTemplate": lambda found, sources: check_claim(found["spec"]["spec"], sources),
    "ValidatingAdmissionPolicy": check_policy,
    "ValidatingAdmissionPolicyBinding": lambda found, sources: (),
}

DAEMONS = {
    "DaemonSet/nvshare-clean-up": check_clean_up,
    "DaemonSet/nvshare-device-plugin": check_plugin,
    "DaemonSet/nvshare-scheduler": check_scheduler,
}


def check(root, versions=VERSIONS):
    """All that is wrong, as it is found."""
    sources = Sources(root)
    for folder, expected in EXPECTED.items():
        documents, failures = render(root, folder)
        if failures:
            yield from failures
            return
        # The generator of a ConfigMap appends a hash.
        found = sorted(re.sub(r"^(ConfigMap/.+)-[a-z0-9]{10}$", r"\1", title(document)) for document in documents)
        if found != expected:
            yield f"{folder}: has {found}, not {expected}"
        limits = []
        namespace = next((d["metadata"]["name"] for d in documents if d["kind"] == "Namespace"), None)
        for document in documents:
            where = f"{folder}: {title(document)}"
            found = check_schema(document, CLAIMS if folder in OF_CLAIMS and versions == VERSIONS else versions)
            yield from (f"{where}: {finding}" for finding in found)
            if found:
                # Of the wrong shape.
                continue
            if document["kind"] == "Namespace":
                labels = document["metadata"].get("labels", {})
                level = labels.get("pod-security.kubernetes.io/enforce")
                if level != LEVELS[folder]:
                    yield f"{where}: the level of Pod Security is {level}, not {LEVELS[folder]}"
                continue
            if document["metadata"].get("namespace") != namespace:
                yield f"{where}: is not in the namespace {namespace}"
            if document["kind"] in CLAIM_KINDS:
                yield from (f"{where}: {finding}" for finding in CLAIM_KINDS[document["kind"]](document, sources))
                continue
            own = []
            if document["kind"] == "DaemonSet":
                own += check_pod(document["spec"]["template"]["spec"])
                own += DAEMONS[title(document)](document, sources)
            elif document["kind"] == "ResourceQuota":
                own += check_quota(document, sources)
            elif document["kind"] == "Pod":
                own += check_pod(document["spec"])
                own += check_claims_pod(document["spec"])
                own += check_example(document["spec"], sources)
                limits += [environment(c).get("NVSHARE_MEM_LIMIT") for c in containers_of(document["spec"])]
            yield from (f"{where}: {finding}" for finding in own)
        if folder == "manifests/examples" and sorted(map(str, limits)) != ["8GiB", "None"]:
            yield f"{folder}: not one pod with NVSHARE_MEM_LIMIT=8GiB and one without: {limits}"
    yield from check_kustomization(root)
    yield from check_nvml(root, versions)
    yield from check_host_memory(root, versions, sources)
    yield from check_features(root, versions, sources)
    yield from check_monitoring(root, versions, sources)
    yield from check_sizes(root, versions, sources)
    yield from check_gpus(root, versions, sources)
    yield from check_dra(root, versions, sources)
    yield from check_priorities(root, versions, sources)
    yield from check_recipes(root)
    yield from check_simulated(root, versions, sources)


def main():
    try:
        findings = list(check(Path(__file__).resolve().parents[2]))
        for finding in findings:
            print(f"manifests: {finding}", file=sys.stderr)
        if findings:
            return 1
        plain = [folder for folder in EXPECTED if folder not in OF_CLAIMS]
        print(f"manifests: {', '.join(plain)} are good for Kubernetes {', '.join(VERSIONS)}")
        print(f"manifests: {', '.join(OF_CLAIMS)} are good for Kubernetes {', '.join(CLAIMS)}")
    except (Unusable, OSError, subprocess.SubprocessError) as error:
        print(f"manifests: cannot be checked: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
