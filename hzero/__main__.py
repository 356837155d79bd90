"""``python -m hzero``."""

from hzero.tools.cli import main

raise SystemExit(main())
