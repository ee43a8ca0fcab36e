"""The tutorial for Kubernetes: a cluster takes its manifests, and what its commands name is what the chart makes.

There is no cluster in the tests. What a cluster would do is done here: the API server is a stub that lists the pod, and
the engine of the tutorial runs with the arguments of its manifest.
"""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from tests import forked
from tests.conftest import wait_until
from tests.deploy.chart import CHART, container, documents, merged, render
from tests.deploy.values import minimal
from tests.discovery.api_server import ApiServerStub, pod
from tests.live import start
from tests.ports import unused_port
from waymark.base.settings import Settings
from waymark.discovery.pods import PodPorts

PAGE = (CHART.parent / "docs" / "tutorial-kubernetes.md").read_text(encoding="utf-8")
YAML = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
DEPLOYMENTS = {each["metadata"]["name"]: each for each in YAML if "kind" in each}
OUTSIDE = [each for each in YAML if "gateway" in each]
(REDIS,) = (each for each in YAML if "redis" in each)
(REGISTRY,) = (each for each in YAML if "image" in each)
COMMANDS = "\n".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL))


def engine(name: str) -> dict[str, Any]:
    (found,) = DEPLOYMENTS[name]["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def options(name: str) -> dict[str, str]:
    return dict(re.findall(r"^--([\w-]+)=(.*)$", "\n".join(engine(name)["args"]), re.MULTILINE))


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_cluster_takes_the_engines_and_discovery_finds_them(name: str) -> None:
    deployment, settings = DEPLOYMENTS[name], Settings()
    kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)
    pod_of = deployment["spec"]["template"]
    labels = pod_of["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    label, _, value = settings.discovery_selector.partition("=")
    assert labels[label] == value
    ports = {port["name"]: port["containerPort"] for port in engine(name)["ports"]}
    assert ports["http"] == PodPorts(**settings.discovery_ports).api
    assert engine(name)["readinessProbe"]["httpGet"]["port"] == "http"


def test_the_flags_of_vllm_publish_on_the_ports_of_its_pod() -> None:
    flags, ports = options("vllm"), {port["name"]: port["containerPort"] for port in engine("vllm")["ports"]}
    events = json.loads(flags["kv-events-config"])
    assert (events["enable_kv_cache_events"], events["publisher"]) == (True, "zmq")
    assert events["endpoint"] == f"tcp://*:{ports['events']}"
    assert events["replay_endpoint"] == f"tcp://*:{ports['replay']}"
    assert int(flags["port"]) == ports["http"]


@pytest.mark.parametrize("outside", OUTSIDE, ids=["ingress", "http-route"])
def test_the_values_of_the_page_make_what_it_says(outside: dict[str, Any]) -> None:
    (way,) = set(outside["gateway"]) - {"keysSecret"}
    rendered = documents(merged(minimal(), outside))
    kinds = {"ingress": "Ingress", "httpRoute": "HTTPRoute"}
    (made,) = (each for each in rendered if each["kind"] == kinds[way])
    assert made["metadata"]["name"].endswith("-gateway")
    for document in rendered:
        if document["kind"] != "HTTPRoute":
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_what_the_commands_name_is_there() -> None:
    rendered = [each for found in render(minimal(), name="waymark").values() for each in found]
    made = {(each["kind"].lower(), each["metadata"]["name"]) for each in rendered}
    named = set(re.findall(r"(service|deployment)/([\w-]+)", PAGE))
    assert named
    assert named <= made
    ports = {
        each["metadata"]["name"]: each["spec"]["ports"][0]["port"] for each in rendered if each["kind"] == "Service"
    }
    forwarded = dict(re.findall(r"port-forward service/([\w-]+) \d+:(\d+)", PAGE))
    assert {name: ports[name] for name in forwarded} == {name: int(port) for name, port in forwarded.items()}
    (copied,) = re.findall(r"^\$ cp (\S+) my-values.yaml$", COMMANDS, re.MULTILINE)
    assert CHART.parent / copied == CHART / "values-minimal.yaml"
    commands = re.findall(r"^\$ helm (?:install|upgrade) .*", COMMANDS, re.MULTILINE)
    assert [re.findall(r"--values (\S+)", each) for each in commands] == [
        ["my-values.yaml"], ["my-values.yaml", "outside.yaml"],
    ]  # fmt: skip
    image = container(minimal(), "query")["image"]
    assert engine("simulated")["image"] == image
    assert f"docker build -t {image} ." in COMMANDS


@pytest.mark.parametrize("outside", [{}, *OUTSIDE])
def test_with_a_registry_every_step_pulls_from_it(outside: dict[str, Any]) -> None:
    values = merged(merged(minimal(), REGISTRY), outside)
    image = f"{REGISTRY['image']['registry']}/{engine('simulated')['image']}"
    assert f"such as `{image}`" in PAGE
    assert {container(values, role)["image"] for role in ("query", "ingest", "gateway")} == {image}


def test_with_the_redis_of_the_registry_no_pod_pulls_from_elsewhere() -> None:
    values = merged(merged(minimal(), REGISTRY), REDIS)
    assert REDIS["redis"].keys() == minimal()["redis"].keys(), "the section takes the place of the other one"
    pods = [each for each in documents(values) if each["kind"] in ("Deployment", "StatefulSet")]
    images = {found["image"] for each in pods for found in each["spec"]["template"]["spec"]["containers"]}
    assert len(images) == 2
    assert {image.partition("/")[0] for image in images} == {REGISTRY["image"]["registry"]}
    bundled = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["redis"]["bundled"]["image"]
    assert f"push `{bundled}` to your registry" in PAGE
    assert f"{REGISTRY['image']['registry']}/{bundled}" in images


def test_each_file_that_a_command_takes_is_written_before() -> None:
    taken = set(re.findall(r"--(?:filename|values) (\S+)", COMMANDS))
    assert taken == {"my-values.yaml", "engines.yaml", "outside.yaml"}
    for name in taken:
        written = re.search(rf"^\$ cp \S+ {name}$|`{name}`:\n\n```yaml$", PAGE, re.MULTILINE)
        assert written is not None, name
        assert written.start() < re.search(rf"--(?:filename|values) {name}", PAGE).start(), name  # type: ignore[union-attr]


def test_what_asks_a_forwarded_port_tries_until_it_is_open() -> None:
    lines = COMMANDS.splitlines()
    after = [then for line, then in pairwise(lines) if line.endswith("&")]
    assert ["--retry-connrefused" in line for line in after] == [True, True]


def test_the_page_says_how_much_room_the_pods_need() -> None:
    pods, cpu, memory = 0, 0.0, 0.0
    for document in documents(minimal()):
        if document["kind"] in ("Deployment", "StatefulSet"):
            count = document["spec"].get("replicas", 1)
            pods += count
            for each in document["spec"]["template"]["spec"]["containers"]:
                requests = each["resources"]["requests"]
                cpu += count * float(requests["cpu"].removesuffix("m")) / 1000
                memory += count * float(requests["memory"].removesuffix("Mi")) / 1024
    words = {6: "six", 7: "seven", 8: "eight"}
    said = f"These are {words[pods]} pods, which request {cpu:g} processors and {memory:g} GiB of memory together."
    assert said in PAGE.replace("\n", " ")


@pytest.mark.outside
async def test_the_engine_of_the_page_is_found_and_answers(tmp_path: Path) -> None:
    (body,) = re.findall(r"/v1/chat/completions .* -d '(.*)'$", COMMANDS, re.MULTILINE)
    model = json.loads(body)["model"]
    assert options("simulated")["model-name"] == model
    port, api_server = unused_port(), ApiServerStub()
    here = {"--host=0.0.0.0": "--host=127.0.0.1", "--http-port=8000": f"--http-port={port}"}
    words = [here.get(word, word).replace("$(POD_IP)", "127.0.0.1") for word in engine("simulated")["args"]]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    (tmp_path / "token").write_text("t")
    await api_server.start()
    with (tmp_path / "engine.log").open("wb") as output:
        process = forked.start([*words, "--base-port=0"], environ, output, Path.cwd())
    try:

        async def is_up() -> bool:
            try:
                async with httpx.AsyncClient(trust_env=False) as kubelet:
                    return (await kubelet.get(f"http://127.0.0.1:{port}/health")).status_code == 200
            except httpx.TransportError:
                return False

        await wait_until(is_up, "the engine is ready", 60)
        api_server.put(pod("simulated-0", "127.0.0.1"))
        async with (
            start(
                "gateway",
                "memory://",
                tmp_path / "log",
                discovery="kubernetes",
                discovery_url=f"{api_server.url}?token_file={tmp_path}/token",
                discovery_namespace="serving",
                discovery_ports=f"api={port}",
            ) as live,
            live.client() as client,
        ):

            async def is_there() -> bool:
                listed = (await client.get("/v1/models")).json()["data"]
                return [each["id"] for each in listed] == [model]

            await wait_until(is_there, "the model of the pod is there", 60)
            headers = {"Content-Type": "application/json"}
            answer = await client.post("/v1/chat/completions", content=body, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-waymark-engine"] == "serving/simulated-0"
            assert answer.json()["choices"][0]["message"]["content"]
    finally:
        process.kill()
        process.wait()
        await api_server.stop()
