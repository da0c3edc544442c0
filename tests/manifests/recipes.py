"""Checks the files of docs/recipes that are data: what JupyterHub's chart, kustomize and CI systems are given."""

import re

import yaml

# Settings of KubeSpawner that profiles may change here.
OVERRIDES = {"cpu_guarantee", "cpu_limit", "extra_resource_limits", "mem_guarantee", "mem_limit"}
RESOURCE = "nvshare.com/gpu"
KEYS = {"slots", "memory", "compute", "weight", "priority"}
DEVICES = ("nvidia.com/gpu=all", "nvshare.com/gpu=all")


def load(root, name):
    return yaml.safe_load((root / "docs/recipes" / name).read_text())


def offered(root):
    """The resources that the plugin offers with the recipe's component."""
    component = load(root, "jupyterhub/kustomization.yaml")
    names = {RESOURCE}
    for patch in component["patches"]:
        if patch["target"] != {"kind": "DaemonSet", "name": "nvshare-device-plugin"}:
            yield f"a patch of {patch['target']}"
        for step in yaml.safe_load(patch["patch"]):
            size = re.fullmatch(r"--also=([a-z]+)=(.+)", step["value"])
            if not size or step["path"] != "/spec/template/spec/containers/0/args/-":
                yield f"{step} adds no size"
                continue
            for pair in size[2].split(","):
                key = pair.split("=")[0]
                if key not in KEYS:
                    yield f"{step['value']}: {key} is no key of a size"
            names.add(f"{RESOURCE}.{size[1]}")
    yield names


def check_jupyterhub(root):
    *findings, names = offered(root)
    yield from findings
    values = load(root, "jupyterhub/values.yaml")
    if list(values) != ["singleuser"] or set(values["singleuser"]) != {"image", "profileList"}:
        yield "values.yaml has other settings than singleuser.image and singleuser.profileList"
    profiles = values["singleuser"]["profileList"]
    slugs = [profile["slug"] for profile in profiles]
    if len(set(slugs)) != len(slugs) or sum(profile.get("default", False) for profile in profiles) != 1:
        yield f"profiles are not told apart, or not one is the default: {slugs}"
    asked = set()
    for profile in profiles:
        if not set(profile) <= {"display_name", "description", "slug", "default", "kubespawner_override"}:
            yield f"{profile['slug']}: {sorted(profile)}"
        override = profile["kubespawner_override"]
        if not set(override) <= OVERRIDES:
            yield f"{profile['slug']}: {sorted(set(override) - OVERRIDES)} are no settings of KubeSpawner"
        if not re.fullmatch(r"\d+[KMGT]", override["mem_limit"]):
            yield f"{profile['slug']}: KubeSpawner does not read mem_limit {override['mem_limit']}"
        for name, number in override.get("extra_resource_limits", {}).items():
            asked.add(name)
            if name not in names or number != "1":
                yield f"{profile['slug']}: {name}: {number!r} is not offered"
    if asked != names:
        yield f"profiles ask for {sorted(asked)}, and the plugin offers {sorted(names)}"


def check_ci(root):
    job = load(root, "ci/github.yml")["jobs"]["test"]
    container = job["container"]
    if container["options"].split() != [word for device in DEVICES for word in ("--device", device)]:
        yield f"github.yml: options are {container['options']}"
    if "self-hosted" not in job["runs-on"]:
        yield f"github.yml: runs on {job['runs-on']}"
    (command,) = load(root, "ci/gitlab.yml")["gpu"]["script"]
    words = command.split()
    told = dict(word.split("=", 1) for flag, word in zip(words, words[1:], strict=False) if flag == "--env")
    if [word for flag, word in zip(words, words[1:], strict=False) if flag == "--device"] != list(DEVICES):
        yield f"gitlab.yml: {command}"
    for place, variables in (("github.yml", container["env"]), ("gitlab.yml", told)):
        if variables != {"NVSHARE_MEM_LIMIT": "8GiB", "NVSHARE_PRIORITY": "low"}:
            yield f"{place}: the job is given {variables}"


def check_recipes(root):
    for finding in [*check_jupyterhub(root), *check_ci(root)]:
        yield f"docs/recipes: {finding}"
