"""``python -m tools.sanitize``: every test of the C module, with the address and undefined-behaviour sanitizers.

The tests run twice: with the code for this machine, and with the code for any machine. Arguments are passed to pytest.
"""

from __future__ import annotations

import re
import sys

from tools.sanitize.build import ROOT, Variant, build, run

#: Matches a test that runs with each implementation, or selects one.
USES_THE_MODULE = re.compile(r"\bimplementation: str|implementation_kept|native\.select")


#: Tests that use the module through the decoders, without naming it.
THROUGH_THE_DECODERS = "tests/engines"


def names_of_tests() -> list[str]:
    """Return the names of the tests of the C module."""
    names = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    return [
        name
        for name, path in names.items()
        if name.startswith(THROUGH_THE_DECODERS) or USES_THE_MODULE.search(path.read_text(encoding="utf-8"))
    ]


def main() -> int:
    names = names_of_tests()
    for variant in Variant:
        print(f"{variant.value}: {' '.join(names)}", flush=True)
        # A sanitizer ends the process, so its report must not be captured by pytest.
        pytest = ["-m", "pytest", "-q", "--capture=sys", "-p", "tools.sanitize.plugin", "-p", "no:cacheprovider"]
        done = run(build(variant), [*pytest, *sys.argv[1:], *names])
        if done.returncode != 0:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
