"""Loads `hzero.autoload` at the end of torch's own import, and never breaks that import.

torch raises if it cannot import the module that an entry point ``torch.backends`` names. An editable installation is a
path to a checkout, which may have been moved, deleted or half written since. So the entry point names this module, which
every kind of installation copies into site-packages, and which imports hzero itself.
"""

import os
import sys


def autoload() -> None:
    """The entry point of torch. It never raises: a script that imports torch may not want hzero at all."""
    if os.environ.get("HZERO_AUTOLOAD", "1").strip().lower() in ("0", "false", "no", "off"):
        return
    try:
        from hzero import autoload as installed

        installed.autoload()
    except Exception as error:
        # The processes that this one starts would say the same again.
        os.environ["HZERO_AUTOLOAD"] = "0"
        print(
            f"hzero: cannot be imported, so it is off: {type(error).__name__}: {error}; install it again, or remove it with "
            f"{sys.executable} -m pip uninstall hzero",
            file=sys.stderr,
        )
