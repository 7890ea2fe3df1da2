"""Execute a notebook in this environment's kernel; see scripts/notebook."""

import argparse
import datetime
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbclient
import nbformat

CHECK = re.compile(r"^check: .*$", re.MULTILINE)


def code_cells(notebook: nbformat.NotebookNode) -> Iterator[nbformat.NotebookNode]:
    return (cell for cell in notebook.cells if cell.cell_type == "code")


def fingerprint(notebook: nbformat.NotebookNode) -> str:
    """Of what the outputs come from."""
    text = "\0".join(cell.source for cell in code_cells(notebook))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = (output for cell in code_cells(notebook) for output in cell.outputs)
    return "".join(output.get("text", "") for output in outputs)


def stale(kept: nbformat.NotebookNode, run: nbformat.NotebookNode) -> list[str]:
    """What the kept outputs say that the run does not."""
    found = []
    if kept.metadata.get("outputs_of") != fingerprint(kept):
        found.append("the outputs are of other cells: scripts/notebook --write")
    before, now = (CHECK.findall(printed(notebook)) for notebook in (kept, run))
    found += [f"kept and not seen: {line}" for line in before if line not in now]
    found += [f"seen and not kept: {line}" for line in now if line not in before]
    return found


def local(notebook: nbformat.NotebookNode, folders: list[str]) -> list[str]:
    """Names of this machine's folders in the outputs."""
    text = nbformat.writes(nbformat.v4.new_notebook(cells=list(code_cells(notebook))))
    return [f"an output names {folder}" for folder in folders if folder in text]


def seconds(cell: nbformat.NotebookNode) -> float:
    """How long its execution took."""
    at = [
        datetime.datetime.fromisoformat(cell.metadata.execution[f"iopub.{name}"])
        for name in ("execute_input", "status.idle")
    ]
    return (at[1] - at[0]).total_seconds()


def clear_of_the_run(notebook: nbformat.NotebookNode) -> None:
    """Times of execution, which would differ each time, and what is said on stderr."""
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)
        cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--write", action="store_true", help="keep the outputs")
    args = parser.parse_args()
    kept = nbformat.read(args.notebook, as_version=4)
    run = nbformat.from_dict(kept)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        # No kernel that is installed for the user: this interpreter's own.
        client = nbclient.NotebookClient(run, timeout=600, kernel_name="python3", coalesce_streams=True, resources={"metadata": {"path": folder}})  # fmt: skip
        try:
            client.execute()
        except nbclient.exceptions.CellExecutionError as error:
            print(error, file=sys.stderr)
            return 1
        taken = ", ".join(f"{seconds(cell):.0f}" for cell in code_cells(run))
        clear_of_the_run(run)
        problems = local(run, [folder, str(Path.home()) + "/", str(Path.cwd()), sys.prefix])
    print(f"{args.notebook}: executed in {time.perf_counter() - began:.0f} s (by cell: {taken})")
    print(*CHECK.findall(printed(run)), sep="\n")
    if args.write:
        run.metadata["outputs_of"] = fingerprint(run)
        nbformat.validate(run)
        nbformat.write(run, args.notebook)
    else:
        problems += stale(kept, run)
    print(*problems, sep="\n", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    raise SystemExit(main())
