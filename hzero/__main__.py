"""``python -m hzero``."""

from hzero.cli import main

raise SystemExit(main())
