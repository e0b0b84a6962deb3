"""hookline beside other libraries."""

from __future__ import annotations

from peers.page import number, plain, table

from measured.parts import Results, part

SHOWN = ("raw", "hookline", "nnsight", "pyvene", "captum", "torchlens", "tdhook",
         "transformer_lens")  # fmt: skip


def side_cell(results: Results, name: str, task: str) -> str:
    found = results["times"][name].get(task)
    if found is not None:
        return number(found["ratio"])
    told = results["verdicts"][name].get(task, {"verdict": "absent"})["verdict"]
    return "–" if told == "absent" else told


def memory_cell(results: Results, name: str, task: str) -> str:
    bare = results["memory"].get("raw", {}).get(task, {}).get("bare")
    found = results["memory"].get(name, {}).get(task)
    if not bare or found is None:
        return "–"
    return number(found["use"] / bare) if "use" in found else "error"


HEADS = {
    "blocks": "12 blocks", "all": "161 modules", "edit": "edit", "gradient": "gradient",
    "stop": "stop", "summary": "summary", "gpt2": "GPT-2", "generate": "generate",
    "disk": "to disk",
}  # fmt: skip


def side_table(results: Results, names: list[str], tasks: list[str]) -> list[str]:
    rows = []
    for name in names:
        cells = [side_cell(results, name, task) for task in tasks]
        cells += [memory_cell(results, name, task) for task in ("blocks", "all")]
        if set(cells) != {"–"}:
            rows.append([plain(results["peers"][name]["title"]), *cells])
    head = [HEADS[task] for task in tasks]
    return table(["", *head, "memory, 12 blocks", "memory, 161 modules"], rows)


@part("side_by_side table")
def side_by_side(results: Results) -> list[str]:
    return side_table(
        results, list(results["peers"]), [task for task in HEADS if task != "summary"]
    )


@part("side_by_side readme")
def side_by_side_readme(results: Results) -> list[str]:
    names = [name for name in SHOWN if name in results["peers"]]
    return side_table(results, names, [task for task in HEADS if task not in ("summary", "gpt2")])


PROBED = {
    "a value stays as it was when a later operation is in-place": "",
    "nested outputs (an LSTM's) are kept whole": "",
    "every call of a module that is called three times": "",
    "only the calls of one's own thread": "",
    "the gradient of a layer that an in-place ReLU follows": "",
    "a parameter is edited and put back, the same object and bits": "a parameter is edited and "
    "put back",
    "torch is as it was: no function is wrapped or replaced afterwards": "torch is as it was "
    "afterwards",
}


@part("side_by_side probes")
def side_by_side_probes(results: Results) -> list[str]:
    names = [name for name in SHOWN[:-1] if name in results["peers"]]
    words = {"absent": "–"}
    rows = []
    for title, short in PROBED.items():
        found = [results["features"][name][title]["verdict"] for name in names]
        rows.append([short or title, *(words.get(one, one) for one in found)])
    head = ["", *(plain(results["peers"][name]["title"]) for name in names)]
    lines = table(head, rows)
    return [lines[0], lines[1].replace("--:", "---"), *lines[2:]]


@part("side_by_side versions")
def side_by_side_versions(results: Results) -> str:
    found = [
        f"{plain(peer['title'])} {plain(peer['version'])}"
        for name, peer in results["peers"].items()
        if name not in ("raw", "raw_again", "hookline")
    ]
    return ", ".join(found)


@part("side_by_side count")
def side_by_side_count(results: Results) -> str:
    return str(len(results["features"]["hookline"]))
