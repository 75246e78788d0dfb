"""Print the rows of a table as JSON lines. It runs in an environment that has pyarrow, or `datasets` for a hub id.

    python table_reader.py file PATH
    python table_reader.py splits HUB_ID CONFIG
    python table_reader.py hub HUB_ID CONFIG SPLIT

It imports nothing of Volley and holds one batch of rows at a time. An error is one line of standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

_BATCH, _BUFFER = 256, 2**20


def batches(path: str) -> Iterator[list[dict[str, Any]]]:
    """Read a Parquet file, an Arrow file or an Arrow stream."""
    with open(path, "rb") as file:
        magic = file.read(6)
    if magic.startswith(b"PAR1"):
        from pyarrow import parquet

        with parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as table:
            for batch in table.iter_batches(batch_size=_BATCH):
                yield batch.to_pylist()
        return
    from pyarrow import ipc, memory_map

    with memory_map(path) as source:
        if magic == b"ARROW1":
            reader = ipc.open_file(source)
            found: Iterator[Any] = (reader.get_batch(n) for n in range(reader.num_record_batches))
        else:
            found = iter(ipc.open_stream(source))
        for batch in found:
            for start in range(0, batch.num_rows, _BATCH):
                yield batch.slice(start, _BATCH).to_pylist()


def of_hub(name: str, config: str, split: str) -> Iterator[list[dict[str, Any]]]:
    from datasets import load_dataset

    for row in load_dataset(name, config or None, split=split, streaming=True):
        yield [dict(row)]


def splits(name: str, config: str) -> None:
    from datasets import get_dataset_split_names

    sys.stdout.write(json.dumps(get_dataset_split_names(name, config or None)) + "\n")


def _plain(value: Any) -> Any:
    """Value as JSON has it. Raises TypeError."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        raise TypeError("it holds bytes, such as images; only text, numbers, lists and objects can be used")
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def main() -> None:
    how, *given = sys.argv[1:]
    try:
        if how == "splits":
            splits(*given)
            return
        for rows in batches(*given) if how == "file" else of_hub(*given):
            sys.stdout.write("".join(json.dumps(row, default=_plain) + "\n" for row in rows))
    except BrokenPipeError:
        sys.stderr.close()
    except Exception as error:  # noqa: BLE001 - one line for the caller
        sys.stderr.write(" ".join(f"{type(error).__name__}: {error}".split())[:500] + "\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
