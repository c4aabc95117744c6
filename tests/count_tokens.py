"""Count the code tokens of each top folder, and fail above the budget: python -m tests.count_tokens [files]

A token is one of Python's `tokenize`; comments, docstrings, line ends and indentation do not count. With `files`, each
file is a line, the largest first. The budget may only fall, or rise with the reason in the commit.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

BUDGET = {("cotrain", "inference"): 329_100, ("tests",): 497_200}
IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count(text: str) -> int:
    """Return the number of code tokens of a module."""
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in IGNORED and token.start not in docstrings for token in tokens)


def main() -> int:
    """Print the counts of the tracked files; return 1 above the budget."""
    names = subprocess.run(["git", "ls-files", "-z", "*.py"], capture_output=True, text=True, check=True).stdout
    files = {name: count(Path(name).read_text("utf-8")) for name in names.split("\0") if Path(name).is_file()}
    if "files" in sys.argv[1:]:
        print("\n".join(f"{tokens:7,} {name}" for name, tokens in sorted(files.items(), key=lambda pair: -pair[1])))
    folders: Counter[str] = Counter()
    for name, tokens in files.items():
        folders[name.split("/")[0]] += tokens
    status = 0
    for parts, most in BUDGET.items():
        tokens = sum(folders[part] for part in parts)
        number = sum(name.split("/")[0] in parts for name in files)
        print(f"{' + '.join(parts)}: {tokens:,} code tokens in {number} files, at most {most:,}")
        status |= tokens > most
    return status


if __name__ == "__main__":
    sys.exit(main())
