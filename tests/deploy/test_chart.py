"""The Helm chart: Helm takes it, Kubernetes takes what it renders, and every value in it does what it says."""

from __future__ import annotations

import copy
import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils as validation

from tests.deploy.chart import (
    CHART,
    NAMESPACE,
    REDIS,
    TABLE,
    WRITE,
    at,
    between,
    container,
    documented,
    documents,
    leaves,
    load,
    merged,
    one,
    render,
    texts,
    values_table,
    variables,
)
from tests.deploy.promql import complaints
from tests.deploy.values import ALL, REDIS_PLACES, given
from waymark import __version__
from waymark.base.settings import Settings

#: The oldest that Chart.yaml allows, and the newest whose schemas are known.
KUBERNETES = ("1.25.0", kubernetes_validate.latest_version())
#: Kinds of the Prometheus operator, of the Gateway API and of KEDA, whose schemas are not Kubernetes' own.
OPERATED = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "HTTPRoute", "ScaledObject", "InferencePool"}
# ---- Helm and Kubernetes ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_helm_finds_nothing_to_say_about_it(name: str) -> None:
    report = helm_python.lint(CHART, given(name), strict=True)
    assert report["errors"] == []
    assert {message["error"] for message in report["messages"]} <= {"icon is recommended"}


@pytest.fixture(scope="module")
def _schemas_are_read_once() -> Iterator[None]:
    """The validator reads all definitions of a version, which have megabytes, for each document."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "schema_contents", cache(validation.schema_contents))
        yield


@pytest.mark.usefixtures("_schemas_are_read_once")
@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("name", ALL)
def test_kubernetes_takes_what_it_renders(name: str, kubernetes: str) -> None:
    rendered = documents(given(name))
    assert {"Deployment", "Service", "ConfigMap", "ServiceAccount"} <= {each["kind"] for each in rendered}
    for document in rendered:
        if document["kind"] not in OPERATED:
            kubernetes_validate.validate(document, kubernetes, strict=True)


def test_every_template_renders_something_with_every_value() -> None:
    empty = {path for path, found in render(given("every value")).items() if not found}
    # Disabled on purpose, or another way to say where Redis is.
    assert empty == {"redis.yaml", "query-pdb.yaml", "ingest-pdb.yaml", "epp-pdb.yaml", "gateway-pdb.yaml"}


def test_names_stay_within_their_bounds_however_the_release_is_called() -> None:
    rendered = render(REDIS, name="a" * 53)
    for found in rendered.values():
        assert all(len(document["metadata"]["name"]) <= 63 for document in found)


def test_the_chart_is_of_the_version_it_installs() -> None:
    about = load().metadata
    assert about["appVersion"] == __version__
    assert about["annotations"]["licenses"] == "Apache-2.0"
    image = container(REDIS, "query")["image"]
    assert image.endswith(f":{__version__}")
    assert f"`docker build -t {image} .`" in (CHART / "README.md").read_text(encoding="utf-8")


def test_a_packaged_chart_has_what_it_needs_and_no_tests(tmp_path: Path) -> None:
    with tarfile.open(helm_python.package(CHART, destination=tmp_path)) as archive:
        names = {name.removeprefix("waymark/") for name in archive.getnames()}
    assert {"Chart.yaml", "values.schema.json", "files/alerts.yml", "files/dashboard.json"} <= names
    assert {"README.md", "templates/_pod.tpl", "templates/tests/smoke.yaml"} <= names
    assert [name for name in names if name.startswith("tests/")] == []


def test_without_a_word_about_redis_it_says_what_to_do() -> None:
    with pytest.raises(helm_python.HelmRenderError, match=r"set one, to say where Redis is"):
        render({})


def test_the_notes_are_short_and_name_the_service() -> None:
    notes = texts(REDIS)["NOTES.txt"]
    assert len(notes.splitlines()) <= 10
    assert "http://wm-waymark.serving:13333" in notes
    assert "http://localhost:13333/ui" in notes
    assert "exec deployment/wm-waymark-query -- waymark register http://ENGINE:8000" in notes
    assert "base_url" not in notes
    assert "WARNING" not in notes
    minimal = texts(given("minimal"))["NOTES.txt"]
    assert len(minimal.splitlines()) <= 12
    assert "http://wm-waymark-gateway.serving:80/v1 as their base_url" in minimal
    assert f"by their label {Settings().discovery_selector};" in minimal


@pytest.mark.parametrize(
    "way", [{"ingress": {"enabled": True}}, {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}}]
)
def test_the_notes_warn_of_a_way_in_without_keys(way: dict[str, Any]) -> None:
    gateway, query = {"gateway": {"enabled": True} | way}, {"query": way}
    open_gateway = texts(merged(REDIS, gateway))["NOTES.txt"]
    assert open_gateway.count("WARNING") == 1
    assert "set gateway.keysSecret.name" in open_gateway
    open_query = texts(merged(REDIS, query))["NOTES.txt"]
    assert open_query.count("WARNING") == 1
    assert "set apiToken" in open_query
    keys = {"gateway": {"keysSecret": {"name": "keys"}}, "apiToken": {"existingSecret": "token"}}
    closed = merged(merged(merged(REDIS, gateway), query), keys)
    assert "WARNING" not in texts(closed)["NOTES.txt"]


# ---- values ----------------------------------------------------------------------------------------


def test_every_value_has_a_comment_and_is_in_the_readme() -> None:
    comments = {value.path: value.comment for value in documented()}
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert sorted(set(leaves(values, set(comments))) - set(comments)) == []
    assert all(comment.endswith(".") for comment in comments.values())
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    assert between(readme, TABLE) == values_table(), WRITE


def test_every_value_is_given_in_the_tests() -> None:
    values = given("every value")
    for path, default, _ in documented():
        if not path.startswith(REDIS_PLACES):
            assert _get(values, path) != default or path == "serviceAccount.create", path


#: Without these nothing is rendered, or their own test has them; what leads to a part that is off is refused.
NEEDED = (
    "gateway.enabled",
    "epp.enabled",
    "redis.url",
    "publishers",
    "query.httpRoute.parentRefs",
    "gateway.httpRoute.parentRefs",
    *REDIS_PLACES,
)


@pytest.mark.parametrize("path", [path for path, _, _ in documented() if not path.startswith(NEEDED)])
def test_every_value_does_something(path: str) -> None:
    # With everything else given, the value's own default makes a difference; for some a switch must be the other way.
    values = merged(given("every value"), at(*SWITCHES[path]) if path in SWITCHES else {})
    default = {value.path: value.default for value in documented()}[path]
    changed = copy.deepcopy(values)
    holder = _get(changed, path.rpartition(".")[0])
    holder[path.rpartition(".")[2]] = default
    assert texts(changed) != (texts(values) if path in SWITCHES else everything())


@cache
def everything() -> Any:
    """What is rendered where every value is given: a render takes 30 ms of CPU, and there are 180 values."""
    return texts(given("every value"))


SWITCHES: dict[str, tuple[str, Any]] = {
    "nameOverride": ("fullnameOverride", ""),
    "image.tag": ("image.digest", ""),
    "query.replicas": ("query.autoscaling.enabled", False),
    "ingest.replicas": ("ingest.autoscaling.enabled", False),
    "gateway.replicas": ("gateway.autoscaling.enabled", False),
    "query.podDisruptionBudget.maxUnavailable": ("query.podDisruptionBudget.enabled", True),
    "ingest.podDisruptionBudget.maxUnavailable": ("ingest.podDisruptionBudget.enabled", True),
    "epp.podDisruptionBudget.maxUnavailable": ("epp.podDisruptionBudget.enabled", True),
    "gateway.podDisruptionBudget.maxUnavailable": ("gateway.podDisruptionBudget.enabled", True),
    "discovery.namespace": ("discovery.allNamespaces", False),
    "serviceAccount.create": ("serviceAccount.create", False),
}


def test_the_places_of_redis_and_of_publishers_each_do_something() -> None:
    bundled, by_secret = given("bundled Redis"), given("Redis by Secret")
    (deployment, _) = render(bundled)["redis.yaml"]
    (redis,) = deployment["spec"]["template"]["spec"]["containers"]
    assert redis["image"] == "valkey/valkey:8.1"
    assert "4gb" in redis["args"]
    assert redis["resources"]["limits"] == {"memory": "1536Mi"}
    assert variables(by_secret, "query")["WAYMARK_REDIS_URL"] == {"secretKeyRef": {"name": "mine", "key": "a"}}
    assert variables(by_secret, "query")["WAYMARK_REDIS_READ_URL"] == {"secretKeyRef": {"name": "mine", "key": "b"}}
    assert "publishers" not in json.dumps(render(REDIS)["ingest-deployment.yaml"])


def _get(values: dict[str, Any], path: str) -> Any:
    found: Any = values
    for name in path.split(".") if path else ():
        found = found[name]
    return found


@pytest.mark.parametrize(
    ("discovery", "kind", "namespace"),
    [
        ({}, "Role", NAMESPACE),
        ({"namespace": "engines"}, "Role", "engines"),
        ({"allNamespaces": True}, "ClusterRole", None),
    ],
    ids=["its-namespace", "another-namespace", "all-namespaces"],
)
def test_discovery_may_list_and_watch_pods_and_nothing_else(
    discovery: dict[str, Any], kind: str, namespace: str | None
) -> None:
    values = merged(REDIS, {"discovery": {"enabled": True} | discovery})
    role, binding = render(values)["discovery.yaml"]
    assert (role["kind"], binding["kind"]) == (kind, f"{kind}Binding")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    assert {each["metadata"].get("namespace") for each in (role, binding)} == {namespace}
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == (kind, role["metadata"]["name"])
    pods = {name: one(values, f"{name}-deployment.yaml")["spec"]["template"]["spec"] for name in ("ingest", "query")}
    (subject,) = binding["subjects"]
    assert subject == {
        "kind": "ServiceAccount",
        "name": pods["ingest"]["serviceAccountName"],
        "namespace": NAMESPACE,
    }
    assert {name: pod["automountServiceAccountToken"] for name, pod in pods.items()} == {"ingest": True, "query": False}
    assert variables(values, "ingest")["WAYMARK_DISCOVERY"] == "kubernetes"
    assert "WAYMARK_DELETION_COST" not in variables(values, "ingest")


def test_discovery_may_patch_pods_if_it_writes_the_worth_of_their_caches() -> None:
    values = merged(REDIS, {"discovery": {"enabled": True, "deletionCost": True}})
    (rule,) = render(values)["discovery.yaml"][0]["rules"]
    assert rule["verbs"] == ["list", "watch", "patch"]
    assert variables(values, "ingest")["WAYMARK_DELETION_COST"] == "on"
    assert "WAYMARK_DELETION_COST" not in variables(values, "query")


def test_without_discovery_nothing_may_be_read() -> None:
    rendered = render(REDIS)
    assert rendered.get("discovery.yaml", []) == []
    assert one(REDIS, "ingest-deployment.yaml")["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    assert "WAYMARK_DISCOVERY" not in variables(REDIS, "ingest")


# ---- what reaches the pods ---------------------------------------------------------------------------


def test_other_settings_or_another_url_replace_the_pods() -> None:
    def checksum(values: dict[str, Any]) -> str:
        template = one(merged(REDIS, values), "query-deployment.yaml")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    before = checksum({})
    assert checksum({"query": {"replicas": 7}}) == before
    assert checksum({"config": {"WAYMARK_LOG_LEVEL": "debug"}}) != before
    assert checksum({"redis": {"url": "redis://elsewhere:6379/0"}}) != before


def test_the_alert_rules_and_the_dashboard_arrive_unchanged() -> None:
    values = merged(given("every value"), {"runbookUrl": ""})
    rules = yaml.safe_load((CHART / "files" / "alerts.yml").read_text(encoding="utf-8"))
    assert one(values, "prometheusrule.yaml")["spec"] == rules
    dashboard = (CHART / "files" / "dashboard.json").read_text(encoding="utf-8")
    assert json.loads(one(values, "dashboard.yaml")["data"]["waymark.json"]) == json.loads(dashboard)


def test_links_to_runbooks_lead_to_where_they_are_read() -> None:
    values = merged(given("every value"), {"runbookUrl": "https://docs.example/operations.html"})
    for template, name in (("prometheusrule.yaml", "alerts.yml"), ("dashboard.yaml", "dashboard.json")):
        before = (CHART / "files" / name).read_text(encoding="utf-8")
        links = before.count("docs/operations.md#")
        assert links > 10
        after = json.dumps(one(values, template))
        assert "docs/operations.md#" not in after
        assert after.count("https://docs.example/operations.html#") == links


def test_the_lag_that_workers_are_scaled_by_is_exported() -> None:
    (trigger,) = one(given("every value"), "ingest-scaledobject.yaml")["spec"]["triggers"]
    assert list(complaints(trigger["metadata"]["query"])) == []


def test_the_chart_beside_valkey_has_values_of_this_one() -> None:
    folder = CHART.parent / "deploy" / "with-valkey"
    about = yaml.safe_load((folder / "Chart.yaml").read_text(encoding="utf-8"))
    ours, valkey = about["dependencies"]
    assert (folder / ours["repository"].removeprefix("file://")).resolve() == CHART
    assert ours["version"] == load().metadata["version"]
    assert valkey["condition"] == "valkey.enabled"
    values = yaml.safe_load((folder / "values.yaml").read_text(encoding="utf-8"))
    assert variables(values["waymark"], "query")["WAYMARK_REDIS_URL"]
    assert values["waymark"]["redis"]["url"] == f"redis://{values['valkey']['fullnameOverride']}:6379/0"
    assert "maxmemory-policy noeviction" in values["valkey"]["valkeyConfig"]


def test_the_chart_beside_valkey_is_built_and_rendered_with_this_one(tmp_path: Path) -> None:
    """Without Valkey's own chart, which comes from its repository."""
    folder = tmp_path / "deploy" / "with-valkey"
    shutil.copytree(CHART, tmp_path / "helm")
    shutil.copytree(CHART.parent / "deploy" / "with-valkey", folder)
    about = yaml.safe_load((folder / "Chart.yaml").read_text(encoding="utf-8"))
    about["dependencies"] = [each for each in about["dependencies"] if each["name"] == "waymark"]
    (folder / "Chart.yaml").write_text(yaml.safe_dump(about), encoding="utf-8")
    helm_python.dependency_build(folder)
    assert [path.name for path in (folder / "charts").iterdir()] == [f"waymark-{__version__}.tgz"]
    rendered = helm_python.Chart.load(folder).render({}, name="wm", namespace=NAMESPACE)
    (secret,) = [text for path, text in rendered.items() if path.endswith("/secret.yaml")]
    assert "redis://waymark-valkey:6379/0" in secret


def test_an_upgrade_that_keeps_the_values_renders_what_an_installation_does() -> None:
    """``--reset-then-reuse-values`` lays what was given over the defaults of the new chart."""
    config = helm_python.Config()
    try:
        for name in ALL:
            installed = config.render(load(), given(name), name="wm", namespace=NAMESPACE, is_install=True)
            upgraded = config.render(load(), given(name), name="wm", namespace=NAMESPACE, is_upgrade=True, revision=2)
            assert upgraded == installed
    finally:
        config.close()


@pytest.mark.parametrize("version", ["inference.networking.k8s.io/v1", "inference.networking.x-k8s.io/v1alpha2"])
def test_the_page_shows_the_pool_that_the_chart_makes(version: str) -> None:
    page = (CHART.parent / "docs" / "integrations.md").read_text(encoding="utf-8")
    shown = [each for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) for each in yaml.safe_load_all(text)]
    (pool,) = [
        each
        for each in shown
        if isinstance(each, dict) and each.get("kind") == "InferencePool" and each["apiVersion"] == version
    ]
    values = at("epp", {"enabled": True, "inferencePool": {"enabled": True, "apiVersion": version}})
    made = one(merged(REDIS, values, {"fullnameOverride": "waymark"}), "epp-inferencepool.yaml")
    for reference in ("endpointPickerRef", "extensionRef"):
        made["spec"].get(reference, {}).pop("failureMode", None)  # the default, said
    assert made["spec"] == pool["spec"]


def test_the_network_of_a_picker_is_open_to_clients_alone() -> None:
    policies = render(given("every value"))["networkpolicy.yaml"]
    (policy,) = [each for each in policies if each["metadata"]["name"].endswith("-epp")]
    probes, asked = policy["spec"]["ingress"]
    assert [port["port"] for port in asked["ports"]] == ["grpc", "health"]
    assert asked["from"] == given("every value")["networkPolicy"]["clients"]
    assert probes["from"] == given("every value")["networkPolicy"]["scrapers"]
    assert {"to": given("every value")["networkPolicy"]["engines"]} in policy["spec"]["egress"]
    (anywhere,) = [
        each
        for each in render(merged(REDIS, at("epp.enabled", True), at("networkPolicy.enabled", True)))[
            "networkpolicy.yaml"
        ]
        if each["metadata"]["name"].endswith("-epp")
    ]
    assert {} in anywhere["spec"]["egress"]
