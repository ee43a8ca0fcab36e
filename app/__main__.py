"""``python -m app``: the same as the ``waymark`` command."""

from app.cli import main

raise SystemExit(main())
