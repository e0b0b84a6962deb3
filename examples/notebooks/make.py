"""Make the notebooks from the examples: their text, their code, and cells with pictures.

    python examples/notebooks/make.py [NUMBER …]

It runs them with nbclient, which `pip install nbclient ipykernel` brings.
"""

import ast
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
TITLES = {
    "01_capture": "Capture: values and gradients",
    "07_activation_patching": "Activation patching",
    "09_logit_lens": "The logit lens",
    "10_head_ablation": "Ablating heads",
    "12_top_samples": "Top samples",
    "13_grad_cam": "Grad-CAM",
    "16_watching_training": "Watching a training",
}


def cells(name):
    """The cells of a notebook, as pairs of a kind and a text, without outputs."""
    source = (FOLDER.parent / f"{name}.py").read_text()
    words = ast.get_docstring(ast.parse(source))
    code = source.split('"""', 2)[2].strip()
    if "tiny_language_model" in code or "digit_reader" in code:  # they lie in the folder above
        code = f'import sys\n\nsys.path.insert(0, "..")\n{code}'
    found = [("markdown", f"# {TITLES[name]}\n\n{words}\n\nThis is `examples/{name}.py`.")]
    for part in re.split(r"\n\n+(?=# )", code):  # a comment at the margin begins a cell
        lines = part.split("\n")
        said = [line[2:] for line in lines if line.startswith("# ")]
        if lines[0].startswith("# "):
            found.append(("markdown", " ".join(said)))
            lines = lines[len(said) :]
        found.append(("code", "\n".join(lines).strip()))
    return found + pictures(name)


def pictures(name):
    """What pictures.md adds to an example."""
    section = (FOLDER / "pictures.md").read_text().split(f"## {name}\n")[1].split("\n## ")[0]
    texts = section.strip().removesuffix("```").split("```")
    kinds = ("code" if text.startswith("python\n") else "markdown" for text in texts)
    return [(k, t.removeprefix("python\n").strip()) for k, t in zip(kinds, texts, strict=True)]


def notebook(name):
    """A notebook in version 4.5 of the format."""
    made = []
    for number, (kind, text) in enumerate(cells(name)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        cell["source"] = text
        made.append(cell | ({"outputs": [], "execution_count": None} if kind == "code" else {}))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def run(name):
    """Run a notebook, and write it with what it showed."""
    import nbformat
    from nbclient import NotebookClient

    made = nbformat.from_dict(notebook(name))
    NotebookClient(made, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for cell in made.cells:
        cell.metadata.clear()  # the times of the run
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    path = FOLDER / f"{name}.ipynb"
    nbformat.write(made, path)
    print(f"{path.name}: {path.stat().st_size // 1000} KB")


if __name__ == "__main__":
    wanted = sys.argv[1:] or [""]
    for name in TITLES:
        if name.startswith(tuple(wanted)):
            run(name)
