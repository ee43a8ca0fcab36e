"""publishers_file: what an operator may write, and what every mistake is told as."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from waymark.api import publishers_file
from waymark.api.publishers_file import read_publishers
from waymark.base.errors import SettingsError
from waymark.cli import EXIT_USAGE, main
from waymark.domain.engines import EngineKind
from waymark.domain.names import BY_CLIENT, Origin, Registration

POD = {
    "type": "vLLM",
    "modelname": "m",
    "instance_id": "pod-1",
    "block_size": 16,
    "endpoint": "tcp://10.0.0.1:5557",
}

CONDUCTOR = {
    "http_server_port": 13333,
    "kvevent_instance": {
        "pod-1": {key: value for key, value in POD.items() if key != "instance_id"}
        | {"replay_endpoint": "", "lora_name": "", "cache_group": 0, "hash_profile": {"strategy": "vllm_v1"}},
        "rank one of pod-2": POD | {"instance_id": "pod-2", "dp_rank": 1, "lora_name": "sql"},
        "pool": {
            "ip": "10.0.0.9",
            "port": 19997,
            "type": "Mooncake",
            "modelname": "m",
            "lora_id": -1,
            "block_size": 16,
        },
        "over six": {"ip": "fd00::7", "port": 5557, "type": "vLLM", "modelname": "m", "block_size": 16},
    },
}


def written(directory: Path, content: Any, name: str = "publishers.json") -> str:
    path = directory / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def complaint(path: str, *allowed: str) -> str:
    with pytest.raises(SettingsError) as raised:
        read_publishers(path, allowed)
    return str(raised.value)


def test_a_list_holds_what_a_body_of_register_does(tmp_path: Path) -> None:
    more = {"tenant_id": "t", "dp_rank": 2, "replay_endpoint": "ipc:///run/r", "additional_salt": "s", "model": "m"}
    by_http = {"type": "STANDARD", "modelname": "m", "instance_id": "by-http", "block_size": 4}
    pods = read_publishers(written(tmp_path, [POD, POD | more, by_http]))
    assert pods[0].origin == Origin("file", f"{tmp_path / 'publishers.json'} pod-1|default|0")
    assert replace(pods[0], origin=BY_CLIENT) == Registration(
        kind=EngineKind.VLLM,
        instance_id="pod-1",
        tenant_id="default",
        dp_rank=0,
        model_name="m",
        block_size=16,
        endpoint="tcp://10.0.0.1:5557",
        replay_endpoint=None,
        lora_name=None,
        additional_salt=None,
        scope="instance",
        copies="count",
        sequence="publisher",
    )
    second = asdict(pods[1])
    assert [second[name] for name in ("tenant_id", "dp_rank", "replay_endpoint", "additional_salt")] == [
        "t", 2, "ipc:///run/r", "s",
    ]  # fmt: skip
    assert (pods[2].kind, pods[2].endpoint) == (EngineKind.STANDARD, None)


def test_yaml_says_the_same_as_json_and_may_share_what_is_equal(tmp_path: Path) -> None:
    text = """
# two pods
- &pod {type: vLLM, modelname: m, instance_id: pod-1, block_size: 16, endpoint: "tcp://10.0.0.1:5557"}
- <<: *pod
  instance_id: pod-2
"""
    expected = read_publishers(written(tmp_path, [POD, POD | {"instance_id": "pod-2"}]))
    for name in ("publishers.yaml", "publishers.yml", "publishers"):
        found = read_publishers(written(tmp_path, text, name))
        assert [replace(each, origin=BY_CLIENT) for each in found] == [
            replace(each, origin=BY_CLIENT) for each in expected
        ]


@pytest.mark.parametrize("name", ["conductor_config.json", "conductor_config.yaml"])
def test_a_configuration_of_the_conductor_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    first, second, pool, six = read_publishers(written(tmp_path, CONDUCTOR, name))
    assert (first.instance_id, first.endpoint, first.lora_name) == ("pod-1", "tcp://10.0.0.1:5557", None)
    assert (second.instance_id, second.dp_rank, second.lora_name) == ("pod-2", 1, "sql")
    assert (pool.instance_id, pool.endpoint, pool.scope) == ("pool", "tcp://10.0.0.9:19997", "shared")
    assert six.endpoint == "tcp://[fd00::7]:5557"


def test_an_empty_list_is_a_file_without_publishers(tmp_path: Path) -> None:
    assert read_publishers(written(tmp_path, [])) == []
    assert read_publishers(written(tmp_path, {"kvevent_instance": {}})) == []


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        pytest.param({"block_size": 0}, "entry 2: block_size is 0; it must be an integer of 1..65536", id="range"),
        pytest.param({"block_size": "16"}, 'entry 2: block_size is "16"; it must be an integer', id="text-for-number"),
        pytest.param({"block_size": None}, "entry 2: block_size is missing", id="missing"),
        pytest.param({"type": "TRT"}, 'entry 2: type is "TRT"; it must be one of vLLM', id="unknown-type"),
        pytest.param({"endpoint": "10.0.0.1:5557"}, 'endpoint is "10.0.0.1:5557"; it must be tcp://', id="endpoint"),
        pytest.param({"endpoint": None}, "endpoint is missing; for type vLLM", id="no-endpoint"),
        pytest.param({"instance_id": 7}, "instance_id is 7; it must be a text", id="number-for-text"),
        pytest.param({"ip": "10.0.0.1", "port": 1}, "endpoint and ip or port are both given", id="two-addresses"),
        pytest.param(
            {"endpoint": "", "ip": "10.0.0.1"}, 'ip is "10.0.0.1" and port is null; give', id="half-an-address"
        ),
        pytest.param({"lora_id": 3}, "lora_id is 3; give lora_name", id="adapter-by-number"),
        pytest.param({"additionalsalt": 5}, "additionalsalt is an integer; it must be a text", id="secret-not-shown"),
        pytest.param({"model": "other"}, "modelname and model name the same thing and differ", id="two-names"),
    ],
)
def test_a_wrong_entry_is_named_with_its_field_its_value_and_the_way_out(
    tmp_path: Path, entry: dict[str, Any], words: str
) -> None:
    path = written(tmp_path, [POD, POD | {"dp_rank": 1} | entry])
    told = complaint(path)
    assert told.startswith(f"WAYMARK_PUBLISHERS_FILE {path}, entry 2: ")
    assert words in told
    assert "\n" not in told


def test_everything_wrong_is_told_at_once_up_to_a_bound(tmp_path: Path) -> None:
    told = complaint(written(tmp_path, [POD, POD | {"block_size": 0}, 5])).splitlines()
    assert [line.partition("entry ")[2][:2] for line in told] == ["2:", "3:"]
    assert told[1].endswith("it is an integer; give an object with the fields of POST /register")
    told = complaint(written(tmp_path, [{}] * 100)).splitlines()
    assert len(told) == 21
    assert told[-1].endswith("80 more entries are wrong")


def test_one_publisher_twice_is_a_mistake(tmp_path: Path) -> None:
    told = complaint(written(tmp_path, [POD, POD | {"tenant_id": "other"}, POD | {"endpoint": "tcp://10.0.0.2:1"}]))
    assert "entry 3: instance_id, tenant_id and dp_rank are those of entry 1; give each" in told


def test_an_entry_of_the_conductor_is_called_by_its_name(tmp_path: Path) -> None:
    told = complaint(written(tmp_path, {"kvevent_instance": {"pod-1": {"ip": "10.0.0.1", "port": 5557}}}))
    assert 'kvevent_instance "pod-1": type is missing' in told


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize("path", ["/run/engines/../x", "/run/engines/./x", "/run//x", "@x"])
def test_paths_must_be_normalized_here_too(tmp_path: Path, field: str, path: str) -> None:
    told = complaint(written(tmp_path, [POD | {field: f"ipc://{path}"}]), "ipc://*", "tcp://*")
    assert f"{field} is" in told
    assert "ipc://path" in told


def test_endpoints_must_be_allowed_here_too(tmp_path: Path) -> None:
    path = written(tmp_path, [POD])
    assert len(read_publishers(path, ["10.0.0.0/8"])) == 1
    assert "entry 1: endpoint" in complaint(path, "192.168.0.0/16")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        pytest.param("p.json", "[", "the file is not JSON: ", id="json-syntax"),
        pytest.param("p.yaml", "- {", "the file is not YAML: ", id="yaml-syntax"),
        pytest.param("p.yaml", "- !!python/object/apply:os.getcwd []", "the file is not YAML: ", id="yaml-code"),
        pytest.param("p.json", '[{"a": 1, "a": 2}]', '"a" is there twice', id="json-twice"),
        pytest.param("p.yaml", "- {a: 1, a: 2}", '"a" is there twice', id="yaml-twice"),
        pytest.param("p.yaml", "kvevent_instance: {pod: {}, pod: {}}", '"pod" is there twice', id="yaml-entry-twice"),
        pytest.param("p.yaml", "- {[1]: 2}", "line 1: a name is no text", id="yaml-list-for-a-name"),
        pytest.param(
            "p.yaml", "kvevent_instance: {1: {}}", "put names and other strings in quotes", id="number-for-name"
        ),
        pytest.param("p.json", f'[{{"block_size": {2**70}}}]', "it holds what JSON has not", id="more-than-64-bits"),
        pytest.param("p.json", f"[{'1' * 5000}]", "the file is not JSON: ", id="thousands-of-digits"),
        pytest.param("p.json", '[{"instance_id": "\\ud800"}]', "it holds what JSON has not", id="half-a-character"),
        pytest.param("p.json", "[" * 100_000, "the file is not JSON: ", id="too-deep"),
        pytest.param("p.json", '{"publishers": []}', "give a list of registrations, or an object", id="no-publishers"),
        pytest.param("p.yaml", "", "give a list of registrations, or an object", id="empty"),
        pytest.param("p.json", '{"kvevent_instance": []}', "an object with kvevent_instance", id="list-for-an-object"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_what_is_wrong(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    path = written(tmp_path, text, name)
    told = complaint(path)
    assert told.startswith(f"WAYMARK_PUBLISHERS_FILE {path} cannot be used: ")
    assert words in told
    assert "\n" not in told


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    assert "No such file" in complaint(str(tmp_path / "p.json"))
    assert "Is a directory" in complaint(str(tmp_path))
    (tmp_path / "p.yaml").write_bytes(b"\xff\xfe\xff")
    assert "the file is not YAML: " in complaint(str(tmp_path / "p.yaml"))


def test_a_file_has_a_ceiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, [POD])
    monkeypatch.setattr(publishers_file, "_FILE_BYTES_MAX", Path(path).stat().st_size)
    assert len(read_publishers(path)) == 1
    monkeypatch.setattr(publishers_file, "_FILE_BYTES_MAX", Path(path).stat().st_size - 1)
    assert "it is longer than" in complaint(path)


@pytest.mark.outside
def test_a_wrong_file_stops_the_start_of_a_worker(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, [POD | {"block_size": 0}])
    monkeypatch.setenv("WAYMARK_PORT", str(free_port))
    monkeypatch.setenv("WAYMARK_PUBLISHERS_FILE", path)
    for role in (["serve"], ["ingest", "--redis-url", "redis://127.0.0.1:1"]):
        assert main(role) == EXIT_USAGE
        assert f"WAYMARK_PUBLISHERS_FILE {path}, entry 1: block_size is 0" in capsys.readouterr().err
