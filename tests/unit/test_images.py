"""docker/ and k8s/: checks of images and cluster files that need neither a build nor a cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl import cli
from mrl.commands import shared
from mrl.commands.serve import EXIT_AWAY
from mrl.config.loader import load
from mrl.config.schema import RLConfig
from mrl.plan.plan import machine_of
from mrl.resilience.protocol import EXIT_PREEMPTED

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
DEFINITION = (ROOT / "docker/mrl.def").read_text()
PINNED = re.compile(r"[a-z0-9./-]+:(?!latest)[\w.-]*\d+\.\d+[\w.-]*")  # a tag with a release number
JOBS = sorted(path.name for path in (ROOT / "k8s").glob("grpo*.yaml"))


@dataclass
class Stage:
    """A stage of the Dockerfile: its instructions as (word, rest)."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        return [rest for name, rest in self.steps if name == word]

    @property
    def commands(self) -> list[str]:
        return [part.strip() for run in self.of("RUN") for part in run.split("&&")]


def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "docker/Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = Stage(base)
        else:
            list(found.values())[-1].steps.append((word, " ".join(rest.split())))
    return found


@pytest.mark.parametrize("name", stages())
def test_an_image_is_pinned_and_made_by_the_makefile(name: str) -> None:
    stage = stages()[name]
    assert PINNED.fullmatch(stage.base), stage.base
    assert not re.search(r"https?://|curl|wget|pip ", " ".join(stage.commands)), "packages come through make"
    targets = [command.split()[1] for command in stage.commands if command.startswith("make ")]
    assert targets and all(re.search(rf"^{re.escape(target)}:", MAKEFILE, re.M) for target in targets)
    (folder,) = (re.findall(r"/opt/mrl/(\S+?)/bin", path) for path in stage.of("ENV"))
    assert folder == [{"cpu": ".venv", "gpu": ".venv-gpu"}[name]] and f"{folder[0]}/bin" in MAKEFILE
    assert all("--no-install-recommends" in each for each in stage.commands if each.startswith("apt-get install"))
    assert "rm -rf /var/lib/apt/lists/*" in stage.commands
    assert stage.of("USER") == ["mrl"] and stage.of("ENTRYPOINT") == ['["mrl"]']
    user = re.search(r"--uid (\d+) mrl", " ".join(stage.commands))
    assert user is not None
    if python := re.search(r"PYTHON=(\S+)", " ".join(stage.commands)):
        assert f"{python[1]}-venv" in " ".join(stage.commands)


@pytest.mark.parametrize("name", stages())
def test_an_image_s_files_exist_and_are_not_ignored(name: str) -> None:
    ignored, *_ = lines = (ROOT / "docker/Dockerfile.dockerignore").read_text().split()
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert ignored == "*"
    for copied in stages()[name].of("COPY"):
        *sources, target = copied.split()
        assert target.startswith("/opt/mrl/")
        for source in sources:
            assert (ROOT / source).exists() and any(fnmatch(source, each) for each in kept), source
    copied_files = {source for each in stages()[name].of("COPY") for source in each.split()[:-1]}
    assert {*kept} == copied_files, "the context has what is copied, and nothing else"


def test_the_apptainer_image_is_the_docker_image() -> None:
    gpu, base = stages()["gpu"], re.search(r"^From: (\S+)$", DEFINITION, re.M)
    assert base is not None and base[1] == gpu.base
    sections = dict(re.findall(r"^%(\w+)\n((?:    .*\n)+)", DEFINITION, re.M))
    assert {line.split()[0] for line in sections["files"].splitlines()} == {
        source for each in gpu.of("COPY") for source in each.split()[:-1]
    }
    commands = [line.strip() for line in sections["post"].splitlines()]
    commands.remove("cd /opt/mrl")
    assert commands == [each for each in gpu.commands if not each.startswith("useradd")]
    (path,) = gpu.of("ENV")
    assert sections["environment"].strip() == f"export {path}"


def documents(name: str) -> dict[str, dict[str, Any]]:
    """Returns the documents of a file by kind and name."""
    made = list(yaml.safe_load_all((ROOT / "k8s" / name).read_text()))
    return {f"{each['kind']} {each['metadata']['name']}": each for each in made}


def jobs(name: str) -> list[dict[str, Any]]:
    return [each for key, each in documents(name).items() if key.startswith("Job ")]


def command(job: dict[str, Any], node: int) -> tuple[Any, list[str]]:
    """Returns the parsed arguments, without paths of the user's storage, and all words of pod `node`."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = [word.replace("$(NODE)", str(node)) for word in container["args"]]
    args = cli._parsed([word for word in words if not word.partition("=")[2].startswith("/shared/")], True)
    return args, words


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_the_fields_that_kubernetes_requires(name: str) -> None:
    for key, each in documents(name).items():
        assert each["apiVersion"] == {"Service": "v1", "Job": "batch/v1"}[key.split()[0]]
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", each["metadata"]["name"]), "a DNS label"
    for job in jobs(name):
        spec = job["spec"]
        assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
        pod = spec["template"]["spec"]
        assert pod["restartPolicy"] == "Never", "podFailurePolicy needs it"
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        assert volumes["memory"]["emptyDir"]["medium"] == "Memory"
        assert PINNED.fullmatch(container["image"])
        assert all(("value" in each) != ("valueFrom" in each) for each in container["env"])
        assert all(isinstance(each.get("value", ""), str) for each in container["env"])
        labels = spec["template"]["metadata"]["labels"]
        rule, *_ = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rule["labelSelector"]["matchLabels"].items() <= labels.items()
        for each in spec["podFailurePolicy"]["rules"]:
            assert each["action"] in ("FailJob", "Ignore") and ("onExitCodes" in each) != ("onPodConditions" in each)
            if "onExitCodes" in each:
                assert each["onExitCodes"]["containerName"] == container["name"]
        user = re.search(r"--uid (\d+) mrl", " ".join(stages()["gpu"].commands))
        assert user is not None and pod["securityContext"]["runAsUser"] == int(user[1])


@pytest.mark.parametrize("name", JOBS)
def test_a_job_s_pods_run_a_world_that_its_configuration_has(name: str) -> None:
    trainer, *engines = jobs(name)
    (service,) = (each for key, each in documents(name).items() if key.startswith("Service "))
    pod = trainer["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"job-name": trainer["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    head = f"{trainer['metadata']['name']}-0.{pod['subdomain']}"
    for node in range(trainer["spec"]["completions"]):
        args, words = command(trainer, node)
        assert words[0] == "train"
        shared.check_node_arguments(args)
        assert (args.nodes, args.node) == (trainer["spec"]["completions"], node)
        host, port = args.head.split(":")
        assert host == head and int(port) in [each["containerPort"] for each in pod["containers"][0]["ports"]]
        cfg = load(ROOT / args.config, args.overrides, planned=machine_of)
        assert isinstance(cfg, RLConfig) and cfg.run.nodes == args.nodes
        assert cfg.run.nproc == pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        assert pod["terminationGracePeriodSeconds"] >= cfg.resilience.save_deadline_s + 60
        assert cfg.checkpoint.every_steps, "pods that fail resume"
    codes = {code for rule in trainer["spec"]["podFailurePolicy"]["rules"] for code in exit_codes(rule)}
    assert codes == {(shared.CONFIG_ERROR, "FailJob"), (EXIT_PREEMPTED, "Ignore")}
    assert (cfg.placement.nodes if cfg.placement.is_apart else 0) <= sum(job["spec"]["completions"] for job in engines)
    for job in engines:
        args, words = command(job, 1)
        assert words[0] == "serve" and (args.node, args.head) == (1, head)
        theirs = load(ROOT / args.config, args.overrides, planned=machine_of)
        assert isinstance(theirs, RLConfig) and theirs.rollout == cfg.rollout and theirs.run.name == cfg.run.name
        needs = theirs.rollout.servers * theirs.rollout.tensor
        assert needs <= job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        own = {word for word in words if "=/shared/" in word}
        assert own == {word for word in command(trainer, 0)[1] if "=/shared/" in word}, "the same run"
        codes = {code for rule in job["spec"]["podFailurePolicy"]["rules"] for code in exit_codes(rule)}
        assert codes == {(shared.CONFIG_ERROR, "FailJob"), (EXIT_PREEMPTED, "Ignore"), (EXIT_AWAY, "Ignore")}


def exit_codes(rule: dict[str, Any]) -> list[tuple[int, str]]:
    return [(code, rule["action"]) for code in rule.get("onExitCodes", {}).get("values", [])]


def test_skypilot_starts_the_same_run_as_kubernetes() -> None:
    task = yaml.safe_load((ROOT / "k8s/skypilot.yaml").read_text())
    run, (trainer,) = task["run"].replace("\\\n", " "), jobs("grpo_32b.yaml")
    variables = set(re.findall(r"\$(\w+)", run))
    given = {"SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE"}
    assert variables <= given | task["envs"].keys()
    assert task["num_nodes"] == trainer["spec"]["completions"]
    (container,) = trainer["spec"]["template"]["spec"]["containers"]
    assert task["resources"]["image_id"] == f"docker:{container['image']}"
    kind, count = task["resources"]["accelerators"].split(":")
    assert kind == "H100" and int(count) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert ".venv-gpu/bin/mrl train yaml_configs/grpo_qwen32b_16gpu.yaml" in run
    keys = {word.partition("=")[0] for word in container["args"] if "=" in word and not word.startswith("--")}
    assert keys == {word.partition("=")[0] for word in run.split() if re.match(r"[a-z_.]+=", word)}
