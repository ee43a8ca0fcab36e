"""docker-compose.yml: the Compose specification takes it, what it mounts is there, and its commands work together."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.conftest import wait_until
from tests.deploy.processes import ended, started
from tests.e2e.conftest import starting
from tests.patience import patient
from tests.ports import unused_port
from waymark.api.activity import SILENT_SECONDS
from waymark.base.settings import Settings
from waymark.cli.parser import parse
from waymark.runtime.http_server import SHUTDOWN_SECONDS
from waymark.simulator.options import options_of

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def mounts(service: str) -> dict[str, str]:
    """Paths of the repository by where they are in the container."""
    parts = [volume.split(":") for volume in SERVICES[service].get("volumes", ()) if volume.startswith("./")]
    assert all(mode == "ro" for _, _, mode in parts)
    return {target: source for source, target, _ in parts}


def config(name: str) -> Any:
    return yaml.safe_load((ROOT / "deploy" / name).read_text(encoding="utf-8"))


def test_it_is_as_the_compose_specification_says() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*command, ROOT / "docker-compose.yml"], capture_output=True, text=True, check=False, timeout=patient(60)
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_images_of_others_have_a_version_and_ours_is_built() -> None:
    for name, service in SERVICES.items():
        if service["image"] == "waymark":
            assert service["build"] == ".", name
        else:
            image = re.sub(r"\$\{\w+:-(.*)\}", r"\1", service["image"])
            assert re.fullmatch(r"[\w/-]+:v?\d+\.\d+[\w.-]*", image), name


def test_every_service_has_a_health_check_of_its_own_or_says_that_it_has_none() -> None:
    """An image that podman builds in its own format has no health check, so it stands here for each of ours."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    of_image = re.search(r"HEALTHCHECK ([^\\]+)\\\n\s+CMD (.+)", dockerfile)
    assert of_image is not None
    for name, service in SERVICES.items():
        if service["image"] != "waymark":
            continue
        check = service["healthcheck"]
        if check.get("disable") or name == "gateway":
            continue
        assert check["test"] == ["CMD", *json.loads(of_image[2])], name
        flags = dict(flag.removeprefix("--").split("=") for flag in of_image[1].split())
        names = {"interval": "interval", "timeout": "timeout", "start_period": "start-period", "retries": "retries"}
        assert {ours: str(check[ours]) for ours in names} == {ours: flags[flag] for ours, flag in names.items()}, name


def test_what_is_mounted_is_there() -> None:
    for name in SERVICES:
        for source in mounts(name).values():
            assert (ROOT / source).exists(), f"{name} mounts {source}"


def test_the_roles_run_twice_and_only_nginx_is_reached_from_outside() -> None:
    assert {name for name, service in SERVICES.items() if service.get("deploy") == {"replicas": 2}} == {
        "query",
        "ingest",
    }
    default = {name: service.get("ports") for name, service in SERVICES.items() if "profiles" not in service}
    assert {name: ports for name, ports in default.items() if ports} == {"nginx": ["127.0.0.1:13333:13333"]}
    conf = (ROOT / mounts("nginx")["/etc/nginx/nginx.conf"]).read_text(encoding="utf-8")
    assert "listen 13333;" in conf
    assert "server query:13333 " in conf
    # A silent stream of GET /activity is not ended.
    assert int(re.findall(r"proxy_read_timeout (\d+)s;", conf)[0]) > SILENT_SECONDS


def test_what_can_run_on_a_read_only_root_without_capabilities_does() -> None:
    for name, service in SERVICES.items():
        if name != "redis":
            assert service["read_only"] is True, name
            assert service["cap_drop"] == ["ALL"], name


def test_the_gateway_knows_the_engines_beside_it() -> None:
    engines, gateway = SERVICES["answering-engines"], SERVICES["gateway"]
    options = options_of(parse(engines["command"]))
    assert (options.prompts, options.stay, options.http_port) == (0, True, 8000)
    ports = range(8000, 8000 + options.engines)
    given = parse(gateway["command"])
    assert given.engine == [f"http://answering-engines:{port}" for port in ports]
    assert gateway["ports"] == [f"127.0.0.1:{given.port}:{given.port}"]
    assert engines["profiles"] == gateway["profiles"] == ["gateway"]


def test_prometheus_finds_every_container_of_each_role_and_the_rules() -> None:
    scraped = config("prometheus/prometheus.yml")
    found = {job["job_name"]: job["dns_sd_configs"][0] for job in scraped["scrape_configs"]}
    assert set(found) == {"waymark-query", "waymark-ingest", "waymark-gateway"}
    for role, port in (("query", 13333), ("ingest", 13333), ("gateway", 8080)):
        assert {"names": [role], "type": "A", "port": port}.items() <= found[f"waymark-{role}"].items()
    assert mounts("prometheus")[scraped["rule_files"][0]] == "./helm/files/alerts.yml"


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = config("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = config("grafana/provisioning/dashboards/waymark.yml")["providers"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])
    assert json.loads((ROOT / mounts("grafana")[home]).read_text(encoding="utf-8"))["panels"]


async def test_the_commands_work_together(redis_url: str, tmp_path: Path) -> None:
    """Each as it stands in the file, with the hosts of this machine."""
    port = unused_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}

    def command(service: str) -> list[str]:
        given = [word.replace("nginx:13333", f"127.0.0.1:{port}") for word in SERVICES[service]["command"]]
        here = {"0.0.0.0": "127.0.0.1", "engines": "127.0.0.1"}
        return [sys.executable, "-m", "waymark", *(here.get(word, word) for word in given)]

    assert set(SERVICES["query"]["environment"]) == set(SERVICES["ingest"]["environment"]) == {"WAYMARK_REDIS_URL"}
    async with starting(tmp_path) as start, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        (role,) = SERVICES["query"]["command"]
        await start(role, redis_url, port=port)
        (role,) = SERVICES["ingest"]["command"]
        await start(role, redis_url)

        async def registered() -> set[str]:
            services = (await client.get("/services")).json()["services"]
            return {f"{service['TenantID']}/{service['InstanceID']}" for service in services}

        async def has_engines() -> bool:
            return await registered() == {"default/engine-0", "default/engine-1"}

        # Ports that are free here.
        engines, log = [*command("engines"), "--base-port", "0"], tmp_path / "engines"
        async with started(engines, clean, ROOT, log) as process:
            await wait_until(has_engines, "the simulated engines are registered", 20)
            code, printed, complaints = await ended(command("demo"), clean, ROOT)
            assert code == 0, complaints
            assert "Checked: every number agrees with the cache of the engine." in printed
            # It has taken its own engines away, and no others.
            assert await has_engines()
        assert process.returncode == 0, log.read_text()


def test_a_process_that_ends_is_not_killed_while_its_requests_may_still_end() -> None:
    """The image's command has the defaults of the settings, and the other roles end their requests within 5 s."""
    for name, seconds in (("query", SHUTDOWN_SECONDS), ("gateway", Settings().finish_seconds)):
        grace = re.fullmatch(r"(\d+)s", SERVICES[name]["stop_grace_period"])
        assert grace is not None
        assert int(grace[1]) >= seconds + 10, name
