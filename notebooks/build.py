"""Build notebooks/*.ipynb from notebooks/src/*.py, or prove that they are current.

python notebooks/build.py          writes every chapter with its outputs
python notebooks/build.py --check  fails on a stale chapter, a wrong solution or a broken rule
"""

import ast
import contextlib
import hashlib
import os
import re
import sys
import time
from pathlib import Path
from unittest import mock

import jupytext
import nbformat
import tables
from nbclient import NotebookClient

HERE = Path(__file__).parent
MAX_CODE_LINES, MAX_SECONDS = 15, 20
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_IMPORT = re.compile(r"(import|from) |\s|\)|$")


def read_chapter(source, *, with_solutions):
    """Read a percent script as a notebook whose cell ids depend on position and text only."""
    notebook = jupytext.read(source)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": kernel, "language_info": {"name": "python"}}
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for position, cell in enumerate(notebook.cells):
        if not with_solutions and cell.cell_type == "code":
            cell.source = hide_solution(cell.source)
        digest = hashlib.sha256(f"{position}:{cell.source}".encode())
        cell.id = digest.hexdigest()[:12]
        # Only one wish of the source is kept: fold away the code behind a panel.
        folded = cell.metadata.get("jupyter", {}).get("source_hidden", False)
        cell.metadata = nbformat.from_dict({"jupyter": {"source_hidden": True}} if folded else {})
    return notebook


def hide_solution(code):
    """Replace what stands after `# solution` in a function by a stub."""
    return re.sub(r"^( +)# solution\n(?:\1.*\n?)+", r"\1...\n", code, flags=re.MULTILINE).rstrip(
        "\n"
    )


def execute(notebook, *, strict):
    """Run a chapter in its own folder and drop what a viewer without a kernel cannot use."""
    os.environ["KVLIB_STRICT"] = "1" if strict else "0"
    started = time.perf_counter()
    NotebookClient(
        notebook,
        timeout=120,
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(HERE)}},
    ).execute()
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = nbformat.from_dict({"name": "python"})
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(_WIDGET_VIEW, None)
    return time.perf_counter() - started


def run_here(stem):
    """Run a chapter's code in this process; return its names, and its panels in order."""
    from kvlib import panel

    names, panels, build = {}, [], panel.Panel.__init__

    def record(self, *arguments, **keywords):
        build(self, *arguments, **keywords)
        panels.append(self)

    with mock.patch.object(panel.Panel, "__init__", record), contextlib.chdir(HERE):
        for cell in jupytext.read(HERE / "src" / f"{stem}.py").cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, f"{stem}.py", "exec"), names)
    return names, panels


def assigned_names(code):
    """Return the names that a cell gives a value; those inside functions are not the chapter's."""
    own = (ast.FunctionDef, ast.ClassDef)
    inner = (*own, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    names, left = set(), list(ast.parse(code).body)
    while left:
        node = left.pop()
        if isinstance(node, own):
            names.add(node.name)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if not isinstance(node, inner):
            left += ast.iter_child_nodes(node)
    return names


def broken_rules(source):
    """List what the house rules forbid in a chapter's cells."""
    problems, assigned = [], {}
    for number, cell in enumerate(jupytext.read(source).cells):
        if cell.cell_type != "code":
            continue
        lines = [line for line in cell.source.splitlines() if line.strip()]
        is_imports = all(_IMPORT.match(line) for line in lines)
        if len(lines) > MAX_CODE_LINES and not is_imports:
            problems.append(f"cell {number} has {len(lines)} lines, the limit is {MAX_CODE_LINES}")
        for line in lines:
            if re.match(r"\s*([%!]|global |from .* import \*)|.*(sys\.path|filterwarnings)", line):
                problems.append(f"cell {number} has {line.strip()!r}; write plain Python")
        for name in sorted(assigned_names(cell.source)):
            # Else cells that run out of order would take each other's value and say nothing.
            if assigned.setdefault(name, number) != number:
                problems.append(f"cell {number} assigns {name!r}, which cell {assigned[name]} does")
    return problems


def differences(stored, fresh):
    """List where a stored chapter differs from its source, or was not executed cleanly."""
    was, now = (
        [(cell.cell_type, cell.source, cell.id, cell.metadata) for cell in notebook.cells]
        for notebook in (stored, fresh)
    )
    if was != now:
        return ["is older than its source; run: make notebooks"]
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    problems = [f"cell {c.id} was not executed" for c in code if c.execution_count is None]
    outputs = [output for cell in code for output in cell.outputs]
    if any(output.output_type == "error" for output in outputs):
        problems.append("stores an error")
    if not outputs:
        problems.append("stores no outputs")
    if any(_WIDGET_VIEW in output.get("data", {}) for output in outputs):
        problems.append("stores a widget that a viewer cannot show")
    return problems


def main(arguments):
    """Build or check every chapter; return the number of problems."""
    stale = tables.refresh(check="--check" in arguments)
    print(*(f"{name}: its tables are stale; run: make notebooks" for name in stale), sep="\n")
    problems, sources = len(stale), sorted((HERE / "src").glob("[0-9]*.py"))
    for source in [*sources[1:], sources[0]]:  # the start page shows the others' pictures
        target = HERE / f"{source.stem}.ipynb"
        found = broken_rules(source)
        seconds = execute(read_chapter(source, with_solutions=True), strict=True)
        fresh = read_chapter(source, with_solutions=False)
        if "--check" in arguments:
            stored = nbformat.read(target, as_version=4) if target.exists() else None
            found += differences(stored, fresh) if stored else ["does not exist"]
        else:
            seconds = execute(fresh, strict=False)
            target.write_text(nbformat.writes(fresh) + "\n", encoding="utf-8")
        if seconds > MAX_SECONDS:
            found.append(f"took {seconds:.0f} s, the limit is {MAX_SECONDS}")
        print(f"{target.name}: {seconds:.1f} s", *found, sep="\n  ", flush=True)
        problems += len(found)
    return problems


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
