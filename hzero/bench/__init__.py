"""``hzero bench``: measures the machine that it runs on, and reports what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from hzero.config import one_of

COMMANDS = {
    "links": "bandwidth and latency of every tier, and of each hop with and without codec",
    "report": "the dated report of a comparison, from the rows that it left",
}
_HELP = """usage: hzero bench COMMAND ...

Measures the machine that it runs on, and reports what was measured.

commands:
{commands}

`hzero bench COMMAND --help` says more."""


def run_bench(arguments: Sequence[str]) -> int:
    """Runs a subcommand on its arguments. Raises `ConfigError` for input that cannot be used."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP.format(commands="\n".join(f"  {name:8}{text}" for name, text in COMMANDS.items())))
        return 0 if arguments else 2
    if arguments[0] == "links":
        from hzero.bench.links import run_links

        return run_links(arguments[1:])
    if arguments[0] == "report":
        from hzero.bench.report import run_report

        return run_report(arguments[1:])
    raise one_of("hzero bench", arguments[0], COMMANDS, "command")
