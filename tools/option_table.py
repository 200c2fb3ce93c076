"""Writes the table of options in docs/python.md from the one in `shmllm.config.engine`.

python tools/option_table.py            rewrites the table
python tools/option_table.py --check    exits with 1 if it is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from shmllm.config.engine import OPTIONS
from shmllm.config.options import Option

PAGE = Path(__file__).resolve().parents[1] / "docs" / "python.md"
HEADER = "| option of `LLM` | default | meaning |\n|---|---|---|\n"


def row(option: Option) -> str:
    """One row of the table, in Markdown."""
    default = option.default_text or f"`{option.default!r}`".replace("'", '"')
    return f"| `{option.name}` | {default} | {option.help} |\n"


def updated(text: str) -> str:
    """The page with a new table."""
    before, header, rest = text.partition(HEADER)
    if not header:
        raise SystemExit(f"{PAGE.name} has no table that begins with:\n{HEADER}")
    lines = rest.splitlines(keepends=True)
    after = next(i for i, line in enumerate(lines) if not line.startswith("|"))
    table = "".join(row(each) for each in OPTIONS if each.in_llm)
    return before + header + table + "".join(lines[after:])


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    new = updated(text)
    if "--check" in sys.argv[1:]:
        if new != text:
            print(
                "docs/python.md is out of date: run python tools/option_table.py", file=sys.stderr
            )
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
