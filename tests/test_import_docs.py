"""The examples of docs/files.md: their commands run and print what stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs" / "files.md"
BLOCK = re.compile(r"(?:<!-- (file: (?P<file>\S+)|prints) -->\n)?```(?P<kind>\w*)\n(?P<body>.*?)```", re.DOTALL)


def test_examples_print_what_stands_there(tmp_path: Path) -> None:
    printed, compared = "", 0
    env = {**os.environ, "COLUMNS": "110", "TERM": "dumb", "NO_COLOR": "1"}
    for match in BLOCK.finditer(DOCS.read_text(encoding="utf-8")):
        if match["file"]:
            (tmp_path / match["file"]).write_text(match["body"])
        elif match["kind"] == "sh":
            words = shlex.split(match["body"])
            assert words[0] == "hoptrace"
            done = subprocess.run(
                [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, env=env
            )
            assert done.returncode == 0, done.stderr
            printed = done.stdout
        elif match[0].startswith("<!-- prints"):
            assert printed == match["body"], f"run it again and paste what it prints:\n{printed}"
            compared += 1
    assert compared == 3
