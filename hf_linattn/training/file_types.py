"""The files of text that are read: extension -> builder of `datasets`. It is light, for commands that read one."""

from __future__ import annotations

FILE_BUILDERS = {
    ".txt": "text",
    ".md": "text",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
