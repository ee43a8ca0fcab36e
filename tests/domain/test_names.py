"""Media in all their spellings, endpoints that may be opened, names as people read them."""

from __future__ import annotations

import pytest

from tests.factories import registration
from waymark.domain.media import normal_medium
from waymark.domain.names import GroupName, HolderName, PublisherName, Unit, is_endpoint

SPELLINGS = {
    "GPU": "device GPU HBM NPU XPU",
    "CPU": "CPU CPU_PINNED CPU_TIER1 HOST DRAM MEMORY",
    "DISK": "DISK SSD NVME CPU_TIER2 FS NFS DFS 3FS OBJ OBJECT_STORE SHARED_STORAGE EXTERNAL STORAGE REMOTE L3",
}


@pytest.mark.parametrize(
    ("spelling", "medium"), [(word, medium) for medium, words in SPELLINGS.items() for word in words.split()]
)
def test_a_medium_in_any_case(spelling: str, medium: str) -> None:
    cases = (spelling, spelling.lower(), spelling.upper(), spelling.title())
    assert {normal_medium(each) for each in cases} == {medium}


@pytest.mark.parametrize("absent", [None, ""])
def test_no_medium_is_the_gpu(absent: str | None) -> None:
    assert normal_medium(absent) == "GPU"


@pytest.mark.parametrize(("spelling", "medium"), [("cxl_2", "CXL_2"), ("7", "7"), ("x" * 32, "X" * 32), ("DP0", "DP0")])
def test_a_new_medium_keeps_its_name(spelling: str, medium: str) -> None:
    assert normal_medium(spelling) == medium


@pytest.mark.parametrize("spelling", ["DP", "dp", "x" * 33, "a b", "a-b", "CPU ", " ", "CPU\n", "gpü", "a|b", "é"])
def test_what_is_no_name_of_a_medium(spelling: str) -> None:
    assert normal_medium(spelling) is None


# A sharp s, a dotless i, a long s and a ligature: upper case makes SS, DISK, NFS and FF of these.
@pytest.mark.parametrize("spelling", ["\u00df", "d\u0131sk", "nf\u017f", "\ufb00"])
def test_letters_that_are_not_ascii_make_no_known_medium(spelling: str) -> None:
    assert spelling.upper().isascii()
    assert normal_medium(spelling) is None


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://10.0.0.1:5557",
        "tcp://pod-0.svc_a.cluster.local:1",
        "tcp://[::1]:65535",
        "tcp://[fe80::1%eth0]:5557",
        "ipc:///run/kv.sock",
        "ipc://relative",
        "ipc://relative/..x/.y",
        "ipc:///run/a..b/...",
    ],
)
def test_endpoints_that_may_be_opened(endpoint: str) -> None:
    assert is_endpoint(endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "10.0.0.1:5557",
        "tcp://10.0.0.1",
        "tcp://10.0.0.1:",
        "tcp://10.0.0.1:0",
        "tcp://10.0.0.1:65536",
        "tcp://10.0.0.1:5557/",
        "tcp://10.0.0.1:5557\n",
        "tcp://:5557",
        "tcp://*:5557",
        "tcp://a b:5557",
        "tcp://user@host:5557",
        "tcp://host:\uff15\uff15",
        "tcp://eth0;10.0.0.1:5557",
        "TCP://10.0.0.1:5557",
        "http://10.0.0.1:5557",
        "inproc://x",
        "udp://10.0.0.1:5557",
        "ipc://",
        "ipc://a b",
        "ipc://a\x00b",
        "ipc:///run/engines/../x",
        "ipc:///run/engines/..",
        "ipc://..",
        "ipc://../x",
        "ipc:///../x",
        "ipc:///run/./x",
        "ipc://./x",
        "ipc:///run//x",
        "ipc:////run/x",
        "ipc:///run/x/",
        "ipc:///",
        "ipc://@abstract",
        "ipc:///run/@x",
        "ipc://" + "x" * 101,
    ],
)
def test_endpoints_that_may_not(endpoint: str) -> None:
    assert not is_endpoint(endpoint)


def test_a_publisher_reads_as_instance_tenant_rank() -> None:
    assert str(PublisherName("pod-1", "default", 3)) == "pod-1|default|3"


def test_a_registration_knows_its_publisher_and_its_group() -> None:
    of = registration(tenant_id="t", dp_rank=2)
    assert of.name == PublisherName("pod-1", "t", 2)
    assert of.group == GroupName("t", "m")


# ---- holders ---------------------------------------------------------------------------------------

NAMES = {
    "0 GPU": HolderName(0, "GPU"),
    "12 CXL_2": HolderName(12, "CXL_2"),
    "0 DISK #7": HolderName(0, "DISK", epoch=7),
    "3 DISK 0123456789abcdef": HolderName(3, "DISK", "0123456789abcdef"),
    "3 DISK 0123456789abcdef #0": HolderName(3, "DISK", "0123456789abcdef", 0),
}


@pytest.mark.parametrize(("text", "name"), NAMES.items())
def test_the_name_of_a_holder_and_its_text_form(text: str, name: HolderName) -> None:
    assert HolderName.parse(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    ["", "0", "0 ", "GPU", "GPU 0", "00 GPU", "-1 GPU", "٣ GPU", "0  GPU", " 0 GPU", "0 GPU ", "0 GPU #", "0 GPU #07"]
    + ["0 GPU #x", "0 GPU a b", "0 GPU #1 #2", "0 GPU\n #1 ", "0 GPU a #1 b", "12345678901 GPU"],
)
def test_what_is_no_name_of_a_holder(text: str) -> None:
    with pytest.raises(ValueError, match="not a holder's name"):
        HolderName.parse(text)


@pytest.mark.parametrize("name", NAMES.values(), ids=str)
def test_a_holder_ends_with_its_rank_its_name_and_what_its_name_begins_with(name: HolderName) -> None:
    """As in ``new_life.lua``, where a unit is a text and ends the names that are it or begin with it and a space."""
    others: list[Unit] = ["*", 0, 1, 3, 12, HolderName(3, "DISK"), HolderName(0, "DISK"), HolderName(0, "CPU")]
    others += [HolderName(0, "DISK", epoch=8), HolderName(3, "DISK", "fedcba9876543210"), *NAMES.values()]
    for unit in others:
        text = str(unit)
        assert name.is_of(unit) == (unit == "*" or f"{name} ".startswith(f"{text} ")), unit


def test_the_epochs_of_a_holder_have_one_lasting_name() -> None:
    lasting = {str(name.lasting) for name in NAMES.values()}
    assert lasting == {text.partition(" #")[0] for text in NAMES}
