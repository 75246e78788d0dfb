"""`volley trajectories`: list, show and export the episodes that a run has trained on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from shared.errors import ConfigError, NotFound
from shared.visible import visible
from volley.printing import complain, join_lines, print_result
from volley.reporting.working import working
from volley.run_arguments import add_run_dir
from volley_dashboard.trajectories import files
from volley_dashboard.trajectories.archived import ArchivedEpisodes
from volley_dashboard.trajectories.index import SORTS, Filters

_SHOWN = 20
_CUT = 32
_TOKENS = "tokens with prompt"
_HEAD = ("ticket.sample", "step", "environment", "task", "reward", "end", _TOKENS, "turns", "stale", "failed attempts")
_RIGHT = ("step", "reward", _TOKENS, "turns", "stale")


def add(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("--show", metavar="TICKET[.SAMPLE]", help="print these episodes in full, turn by turn")
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="write the episodes to FILE.jsonl or FILE.parquet (needs pyarrow)"
    )
    parser.add_argument("--tokens", action="store_true", help="with --export: also token ids, masks, log-probabilities")
    order = "order of the list, and with --export which episodes --limit keeps (default: step)"
    parser.add_argument("--sort", choices=sorted(SORTS), default="step", help=order)
    parser.add_argument("--descending", action="store_true", help="begin with the largest")
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help=f"most episodes (default: {_SHOWN}, with --export all; 0: all)",
    )
    add_filters(parser.add_argument_group("filters, which all have to hold"))


def add_filters(part: argparse._ArgumentGroup) -> None:
    """Add an option for each field of the filters."""
    for name, field in Filters.model_fields.items():
        option, kinds = f"--{name.replace('_', '-')}", get_args(field.annotation)
        if bool in kinds:
            part.add_argument(option, action=argparse.BooleanOptionalAction, help=field.description)
        else:
            metavar = "TEXT" if str in kinds else "X" if float in kinds else "N"
            part.add_argument(option, metavar=metavar, help=field.description)


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    given = {name: getattr(arguments, name) for name in Filters.model_fields}
    filters = Filters.of({name: value for name, value in given.items() if value is not None})
    if arguments.limit is not None and arguments.limit < 0:
        raise ConfigError(f"--limit {arguments.limit} is below 0", "give a number of episodes, or 0 for all")
    if arguments.tokens and arguments.export is None:
        raise ConfigError("--tokens goes with --export", "add --export FILE.jsonl, or use --show TICKET --json")
    if arguments.export is not None:
        files.check(arguments.export)
    archived = ArchivedEpisodes.open(arguments.run_dir)
    with working("indexing the archive") as tell:
        for remaining in archived.refresh():
            tell(f"{remaining} steps are left")
    try:
        if arguments.show is not None:
            return show(archived, arguments.show)
        rows = archived.rows(filters)
        rows.sort(key=lambda row: _key(row, arguments.sort), reverse=arguments.descending)
        if arguments.export is not None:
            return export(archived, rows[: arguments.limit or None], arguments.export, tokens=arguments.tokens)
        return listed(archived, rows, _SHOWN if arguments.limit is None else arguments.limit or len(rows))
    finally:
        for version, reason in archived.damaged.items():
            complain(f"left out: step {version}: {reason}")


def _key(row: Mapping[str, Any], column: str) -> tuple[Any, ...]:
    value = row[column]
    return (value is not None, value if value is not None else 0)


def listed(archived: ArchivedEpisodes, rows: Sequence[Mapping[str, Any]], limit: int) -> int:
    """Print the first `limit` rows. Returns the exit code."""
    shown = rows[:limit]
    result = {"run": archived.run, "total": len(rows), "rows": shown, "damaged": dict(archived.damaged)}
    print_result(result, lambda: _table(shown, len(rows)))
    return 0


def _table(rows: Sequence[Mapping[str, Any]], total: int) -> str:
    if not rows:
        return "no archived episode meets the filters" if not total else f"{total} episodes"
    cells = [_HEAD, *map(_cells, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_HEAD))]
    lines = [
        "  ".join(
            cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            for cell, width, name in zip(row, widths, _HEAD, strict=True)
        ).rstrip()
        for row in cells
    ]
    more = f"{len(rows)} of {total} episodes; --limit 0 lists all" if len(rows) < total else f"{total} episodes"
    return join_lines([*lines, f"{more}; --show {_cells(rows[0])[0]} prints one"])


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['ticket']}.{row['sample']}",
        f"{row['step']}{' undone' if row['undone'] else ''}",
        _cut(row["env"]),
        _cut(row["task"]),
        f"{row['reward']:.3f}",
        f"{row['end'] or row['status']}{', success' if row['success'] else ''}",
        *(str(row["tokens"]), str(row["turns"]), str(row["staleness"]), _cut(row["failures"])),
    )


def _cut(text: str) -> str:
    shown = visible(text)
    return shown if len(shown) <= _CUT else f"{shown[: _CUT - 1]}…"


def export(archived: ArchivedEpisodes, rows: Sequence[Mapping[str, Any]], path: Path, *, tokens: bool) -> int:
    """Write the episodes of the rows to a file, by step. Returns the exit code. Raises as `files.write`."""
    rows = sorted(rows, key=lambda row: (row["step"], row["version"], row["ticket"], row["sample"]))
    with working(f"writing {path}") as tell:

        def told() -> Iterator[dict[str, Any]]:
            for n, record in enumerate(archived.records(rows, tokens=tokens)):
                tell(f"{n} of {len(rows)} episodes")
                yield record

        n = files.write(path, told())
    print_result({"file": path, "episodes": n}, f"{path} holds {n} episodes")
    return 0


def show(archived: ArchivedEpisodes, named: str) -> int:
    """Print episodes in full. Returns the exit code. Raises ConfigError, NotFound."""
    ticket, dot, sample = named.partition(".")
    if not ticket.isdecimal() or (dot and not sample.isdecimal()):
        raise ConfigError(f"--show {named} names no episode", "give TICKET or TICKET.SAMPLE, as the list shows them")
    found = archived.ticket(int(ticket))
    if dot:
        found["trajectories"] = [one for one in found["trajectories"] if one["sample"] == int(sample)]
        if not found["trajectories"]:
            raise NotFound(f"ticket {ticket} has no sample {sample}", f"--show {ticket} prints all")
    print_result(found, lambda: "\n".join(_described(found)))
    return 0


def _described(group: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a group's episodes; each line of a text is one of its own."""
    for one in group["trajectories"]:
        title = f"ticket {group['ticket']}, sample {one['sample']}: {group['env']}, task {group['task']}"
        yield visible(f"{title}, step {group['step']}, weights {group['version']}")
        success = "success" if one["success"] else "no success"
        yield visible(f"reward {one['reward']:g}, {success}, {one['end'] or one['status']}{_more(one)}")
        for i, sequence in enumerate(one["sequences"]):
            if i:
                shared = f"{sequence['shared']} tokens with sequence {sequence['parent']}"
                yield f"── sequence {i}, which shares {shared if sequence['shared'] else 'no tokens with the others'}"
            yield from _turns(sequence)
        yield ""


def _more(one: Mapping[str, Any]) -> str:
    parts = [f"{name} {value:g}" for name in ("components", "faults", "failures") for name, value in one[name].items()]
    return f" ({', '.join(parts)})" if parts else ""


def _turns(sequence: Mapping[str, Any]) -> Iterator[str]:
    for start, end, role, reward in sequence["turns"]:
        sampled = [i for i in range(start, end) if sequence["mask"][i]]
        parts = [f"{end - start} tokens"]
        parts += [f"{sum(sequence['logprobs'][i] for i in sampled) / len(sampled):.3f} nats a token"] if sampled else []
        parts += [f"reward {reward:g}"] if reward else []
        yield visible(f"── {role}: {', '.join(parts)}")
        yield from (f"   {visible(line)}" for line in "".join(sequence["texts"][start:end]).split("\n"))
    if not sequence["turns"]:
        yield f"── {len(sequence['ids'])} tokens"
        yield from (f"   {visible(line)}" for line in "".join(sequence["texts"]).split("\n"))
