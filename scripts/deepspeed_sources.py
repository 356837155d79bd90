#!/usr/bin/env python3
"""Adds releases of DeepSpeed to hzero/deepspeed/releases.json: scripts/deepspeed_sources.py VERSION=FOLDER...

FOLDER holds the package ``deepspeed``, as an unpacked source archive or site-packages does. Read what has changed first: the
methods that are listed are those that hzero overrides, wraps or calls.
"""

import json
import sys
from pathlib import Path

from hzero.deepspeed.versions import RELEASES, _numbers, sources


def main() -> None:
    """Adds the releases that the command line names."""
    for argument in sys.argv[1:]:
        version, folder = argument.split("=", 1)
        for part in RELEASES["methods"].values():
            for place, known in part.items():
                module, name = place.split(":")
                file = Path(folder, "deepspeed", *module.split(".")).with_suffix(".py")
                found = sources(file).get(name) if file.exists() else None
                by_hash = {
                    key: [one for one in releases.split() if one != version]
                    for key, releases in known.get("sources", {}).items()
                }
                if found is None:
                    print(f"{version} has no {name}")
                else:
                    by_hash.setdefault(found, []).append(version)
                known["sources"] = {
                    key: " ".join(sorted(releases, key=_numbers)) for key, releases in by_hash.items() if releases
                }
    path = Path(__file__).parent.parent / "hzero/deepspeed/releases.json"
    path.write_text(json.dumps(RELEASES, indent=1) + "\n")


if __name__ == "__main__":
    main()
