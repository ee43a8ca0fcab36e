"""``python -m waymark``: the same as the ``waymark`` command."""

from waymark.cli import main

raise SystemExit(main())
