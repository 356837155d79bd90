"""Writes the tables of keys, presets, constants and results into the pages, from the code that they describe.

    python -m docs.tables            writes them between `<!-- table: NAME ... -->` and `<!-- end -->`
    python -m docs.tables --check    fails if a page has another table

They are committed, so that pages can be read without being built.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from griffe import Docstring
from pydantic import BaseModel

from benchmarks.report.results import STOCK, read
from benchmarks.report.tables import ratio
from benchmarks.rows import StepsRow
from hzero.codecs.formats import TRAITS
from hzero.comm import CommunicatorConfig
from hzero.config import DEFAULT_PRESET, DIMENSIONS, PRESET_NAMES, PRESETS, ROLES, TIERS, HZeroConfig, parse_config
from hzero.program.collectives import Scheme
from hzero.tools.cli import COMMANDS
from hzero.tools.experiment import Configuration, compose, key_lines
from hzero.tools.plan.command import against_dict, plan_dict
from hzero.tools.plan.machine import CONSTANTS, load_profile, profile_names
from hzero.tools.plan.memory import footprint
from hzero.tools.plan.scenario import read_scenario

ROOT = Path(__file__).parents[1]
#: A table between its marks: the first one with the name, and both with it.
MARKED = re.compile(r"(<!-- table: (\w+) .*?-->\n).*?(<!-- end -->)", re.DOTALL)
#: States that the column `states` of presets adds up.
STATES = ("primary weights", "secondary partition", "gradient shard", "gradient accumulation buffers", "optimizer")
#: Engines of README's table, as `hzero plan` names them alone and beside others.
ENGINES = {
    "FSDP2 with hzero `lossless`": ("FSDP2, lossless", "FSDP2, hzero lossless"),
    "FSDP2 with hzero `topo`": ("FSDP2, topo", "FSDP2, hzero topo"),
    "HSDP over the node": ("HSDP, node", "HSDP, node"),
    "TP x PP x ZeRO-1": ("", "TP x PP x ZeRO-1"),
    "FSDP2": ("FSDP2", "FSDP2"),
    "DeepSpeed ZeRO++": ("ZeRO++", "ZeRO++"),
    "DeepSpeed ZeRO-3": ("ZeRO-3", "ZeRO-3"),
}
#: Keys that users do not write.
HIDDEN = ("preset_shard", "preset_gradients", "preset_dimensions")


def main() -> int:
    """Writes all tables, or compares them. Returns the exit status."""
    stale = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text()
        written = MARKED.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n\n{mark[3]}", text)
        if written != text:
            stale.append(page.relative_to(ROOT))
            if "--check" not in sys.argv:
                page.write_text(written)
    if stale and "--check" in sys.argv:
        print(f"{', '.join(map(str, stale))}: other tables than the code's; run python -m docs.tables")
        return 1
    return 0


def block_table() -> str:
    """All keys of the ``"hzero"`` block. A preset's value is no default: it says so."""
    schema = HZeroConfig.model_json_schema()
    presets = [parse_config({"preset": preset}).model_dump(mode="json") for preset in PRESETS]
    rows: dict[tuple[str, str], tuple[list[str], dict[str, Any], bool]] = {}
    for path, owner, key, field, required in _leaves(schema, schema, "HZeroConfig"):
        rows.setdefault((owner, key), ([], field, required))[0].append(path)
    lines = []
    for (owner, key), (paths, field, required) in rows.items():
        found = [value for start in presets for path in paths for value in _at(start, path)]
        default = _written(DEFAULT_PRESET) if key == "preset" else _common(found, field, required)
        lines.append((_pattern(paths), _values(field), default, _meanings(owner).get(key, "")))
    return _table(lines)


def trainer_table() -> str:
    """All keys of the trainer, with the values of the main job and the comments of the YAML files."""
    schema = Configuration.model_json_schema()
    main, comments = compose([]).config, {key: comment for key, _, comment in key_lines()}
    lines = []
    for path, owner, key, field, _ in _leaves(schema, schema, "Configuration"):
        if path.partition(".")[0] not in ("zero", "topology", "trainer", "deepspeed"):
            meaning = _meanings(owner).get(key) or comments.get(path, "")
            lines.append((path, _values(field), ", ".join(map(_written, _at(main, path))), meaning))
    return _table(lines)


def constants_table() -> str:
    """All constants of the performance model, with the values and sources of the profile frontier-2026."""
    profile = load_profile("frontier-2026")
    head = "| constant | meaning | frontier-2026 | kind | source, date, stack |"
    lines = [head, "|---|---|---|---|---|"]
    for name, meaning in CONSTANTS.items():
        constant = profile.constants[name]
        source = profile.sources[constant.source]
        where = f"{source.what}; {source.date}; {source.stack}"
        lines.append(f"| `{name}` | {meaning} | {constant.value:g} | {source.kind} | {where} |")
    return "\n".join(lines)


def presets_table() -> str:
    """Bytes into a node and memory of GPT-NeoX-20B on 48 Frontier nodes, by preset, as `hzero plan` computes them."""
    job = ["model=gpt_neox_20b", "topology=frontier", "topology.nodes=48", "train.micro_batch=1"]
    cells: dict[str, list[str]] = {name: [] for name in ("ZeRO-3", *PRESETS)}
    for count in (1, 8):
        scenario = read_scenario([*job, f"train.grad_accumulation={count}"])
        planned = plan_dict(scenario)["schemes"]
        for name, row in cells.items():
            plan = Scheme("deepspeed") if name == "ZeRO-3" else scenario.shard_plan(name)
            states = footprint(plan, scenario.grid, scenario.job).states
            held = sum(states[state].bytes for state in STATES if state in states)
            row += [
                f"{size / 1e9:.1f} GB" for size in (planned[name]["node_bytes"], held, planned[name]["memory_bytes"])
            ]
    head = [f"{what}, {count}" for count in ("1 micro-batch", "8") for what in ("bytes into a node", "states", "peak")]
    lines = [f"| | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    lines += [f"| {name if name == 'ZeRO-3' else f'`{name}`'} | {' | '.join(row)} |" for name, row in cells.items()]
    return "\n".join(lines)


def results_table() -> str:
    """Predicted rate, memory and bytes of 20B on Frontier by engine. Bold: the fastest, and what is equal to it."""
    job, nodes = ["experiment=paper_20b"], (48, 512, 1024)
    planned = plan_dict(read_scenario([*job, "topology.nodes=48"]))["schemes"]
    found = against_dict(read_scenario([*job, f"topology.nodes={nodes[-1]}"]), nodes)
    head = ["", "memory per GCD, of 64 GB", "bytes into a node per step", *(f"{count:,} nodes" for count in nodes)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for label, (alone, beside) in ENGINES.items():
        cells = [label, "", ""]
        if one := planned.get(alone):
            cells[1:] = f"{one['memory_bytes'] / 1e9:.1f} GB", f"{one['node_bytes'] / 1e9:.3g} GB"
        for point, winner in zip(found["curves"][beside], found["winners"]):
            mark = "**" * (beside in (winner["best"], *winner["equal"]))
            cells.append(f"{mark}{point['tflops']:.1f}{mark}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measured_table() -> str:
    """Steps of suite main of 29 November beside ZeRO-3's, with intervals."""
    (result,) = read([ROOT / "benchmarks" / "reports" / "2026-11-29-comparison.jsonl"]).of("main")
    stock = result.row(STOCK)
    assert stock is not None
    rows = sorted(((ratio(stock, row), row) for row in result.rows), key=lambda one: one[0], reverse=True)
    lines = ["| | rounds | times faster than ZeRO-3 | states of a rank |", "|---|---|---|---|"]
    for (middle, low, high), row in rows:
        times = f"{middle:.1f} ({low:.1f} to {high:.1f})" if row is not stock else "1"
        lines.append(f"| {row.label} | {_rounded(row)} | {times} | {row.memory.states / 1e6:.0f} MB |")
    return "\n".join(lines)


def _rounded(row: StepsRow) -> str:
    """The states that a scheme's block rounds."""
    if "block" not in row.scheme_config:
        return "nothing"
    codecs = parse_config(row.scheme_config["block"]).codecs
    roles = {role: getattr(codecs, role).model_dump(exclude_none=True).values() for role in ROLES}
    lossy = [role for role, tiers in roles.items() if any(not TRAITS[one["codec"]].exact for one in tiers)]
    return " and ".join(lossy) or "nothing"


def layouts_table() -> str:
    """Scopes and codecs of all presets."""
    lines = ["| preset | weights, gradients over | codecs of weights, gradients | purpose |", "|---|---|---|---|"]
    for name in PRESET_NAMES:
        cells = ["chosen", "`exact` or `none`, `none`"]
        if preset := PRESETS.get(name):
            codecs = [f"`{codec}`" for codec in (preset.weights_codec, preset.gradients_codec)]
            between = f", between nodes `{preset.between_nodes}`" if preset.between_nodes else ""
            cells = [f"{preset.weights}, {preset.gradients}", ", ".join(codecs) + between]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {_comment('zero', name)} |")
    return "\n".join(lines)


def settings_table() -> str:
    """The files of the group ``zero`` that are no presets."""
    names = sorted(path.stem for path in (ROOT / "conf" / "zero").glob("*.yaml"))
    lines = [f"| `{name}` | {_comment('zero', name)} |" for name in names if name not in (*PRESET_NAMES, "stock")]
    return "\n".join(["| `zero=` | meaning |", "|---|---|", *lines])


def profiles_table() -> str:
    """The machines that the performance model knows."""
    profiles = map(load_profile, profile_names())
    return "\n".join(["| profile | machine |", "|---|---|", *(f"| `{one.name}` | {one.about} |" for one in profiles)])


def prepare_table() -> str:
    """All keys of `hzero data prepare`, with the comments of its file."""
    group, lines = "", ["| key | default | meaning |", "|---|---|---|"]
    for line in (ROOT / "conf" / "prepare.yaml").read_text().splitlines():
        if head := re.fullmatch(r"(\w+):", line):
            group = f"{head[1]}."
        elif needed := re.fullmatch(r"( *)# (\w+): required, (.*)", line):
            lines.append(f"| `{group if needed[1] else ''}{needed[2]}` | required | {needed[3]} |")
        elif key := re.fullmatch(r" +(\w+): (\S+) # (.*)", line):
            lines.append(f"| `{group}{key[1]}` | `{key[2]}` | {key[3]} |")
    return "\n".join(lines)


def commands_table() -> str:
    """All commands."""
    lines = [f"| `hzero {name}` | {text} |" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["| command | does |", "|---|---|", *lines])


def communicator_table() -> str:
    """All keys of a communicator."""
    schema = CommunicatorConfig.model_json_schema()
    lines = []
    for key, field in schema["properties"].items():
        default = _written(field["default"]) if isinstance(field.get("default"), (bool, int, str)) else ""
        lines.append((key, _values(field), default, _meanings("CommunicatorConfig")[key]))
    return _table(lines)


TABLES = {
    "block": block_table,
    "commands": commands_table,
    "communicator": communicator_table,
    "constants": constants_table,
    "layouts": layouts_table,
    "measured": measured_table,
    "prepare": prepare_table,
    "presets": presets_table,
    "profiles": profiles_table,
    "results": results_table,
    "settings": settings_table,
    "trainer": trainer_table,
}


def _comment(group: str, name: str) -> str:
    """The comment at the beginning of a file of ``conf/``, as one sentence."""
    lines = (ROOT / "conf" / group / f"{name}.yaml").read_text().splitlines()
    return " ".join(line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines)).removesuffix(".")


def _leaves(root: dict[str, Any], node: dict[str, Any], owner: str, prefix: str = "") -> Iterator[Any]:
    """Path, model, key, schema and whether it is required, of every key that is not only a block of others."""
    for key, field in node["properties"].items():
        if key in HIDDEN:
            continue
        path, required = f"{prefix}{key}", key in node.get("required", ())
        options = field.get("anyOf", [field])
        blocks = [option["$ref"].rpartition("/")[2] for option in options if "$ref" in option]
        if len(blocks) < len(options):
            yield path, owner, key, field, required
        for block in blocks:
            yield from _leaves(root, root["$defs"][block], block, f"{path}.")


def _values(field: dict[str, Any]) -> str:
    """Type and possible values of a JSON schema."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(map(_values, field["anyOf"])))
    if "$ref" in field:
        return "a block"
    if "enum" in field or "const" in field:
        return ", ".join(f"`{_written(value).strip('`')}`" for value in field.get("enum", [field.get("const")]))
    signs = {
        "minimum": "≥",
        "exclusiveMinimum": ">",
        "maximum": "≤",
        "exclusiveMaximum": "<",
        "multipleOf": "multiple of",
    }
    bounds = [f"{sign} {field[name]:g}" for name, sign in signs.items() if name in field]
    kind = {"string": "text", "boolean": "`true`, `false`", "null": "`null`", "object": "a block"}.get(
        field.get("type", ""), field.get("type", "see its meaning")
    )
    if kind == "array":
        items = field.get("items") or field["prefixItems"][0]
        kind = f"list of {_values(items)}"
    return ", ".join([" ".join([kind, *bounds[:1]]), *bounds[1:]])


def _written(value: Any) -> str:
    return f"`{json.dumps(value).strip(chr(34))}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _common(found: list[Any], field: dict[str, Any], required: bool) -> str:
    values = {_written(value) for value in found}
    if len(values) == 1:
        return values.pop()
    return "the preset's" if found else "required" if required else _written(field.get("default"))


def _at(values: Any, path: str) -> list[Any]:
    """The value at a dotted path, if there is one."""
    for part in path.split("."):
        if not isinstance(values, dict) or part not in values:
            return []
        values = values[part]
    return [values]


def _pattern(paths: list[str]) -> str:
    """One name for the paths of all roles and tiers: ``codecs.ROLE.TIER.rotation``."""
    names = {(*ROLES, *DIMENSIONS): "ROLE", TIERS: "TIER"}
    parts = (tuple(dict.fromkeys(part)) for part in zip(*(path.split(".") for path in paths)))
    return ".".join(part[0] if len(part) == 1 else names[part] for part in parts)


@cache
def _meanings(model: str) -> dict[str, str]:
    """The attributes of a model's docstring, by the keys that users write."""
    found = [of for of in _models() if of.__name__ == model]
    sections = chain.from_iterable(Docstring(of.__doc__ or "").parse("google", warnings=False) for of in found)
    written = {name: field.alias for of in found for name, field in of.model_fields.items() if field.alias}
    return {
        written.get(item.name, item.name): " ".join(item.description.split()).replace("``", "`")
        for section in sections
        if section.kind.value == "attributes"
        for item in section.value
    }


def _models() -> Iterable[type[BaseModel]]:
    waiting: list[type[BaseModel]] = [BaseModel]
    for model in waiting:
        waiting += model.__subclasses__()
        yield model


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{key}` | {values} | {default} | {meaning.replace(' | ', ', ')} |" for key, values, default, meaning in rows
    ]
    return '<div class="keys" markdown>\n\n' + "\n".join(lines) + "\n\n</div>"


if __name__ == "__main__":
    sys.exit(main())
