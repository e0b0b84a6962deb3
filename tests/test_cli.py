"""The command line, through its real process where that is the point, else through click."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hookline as hl
from hookline import torch_private
from hookline.cli.commands import hookline
from hookline.torch_probes import GROUPS, PROBES

os.environ.setdefault("HF_HUB_OFFLINE", "1")

NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.drop = nn.Dropout()
        self.fc = nn.Linear(4 * 16, 3)
        self.unused = nn.ReLU()

    def forward(self, x, scale=None):
        y = torch.relu(self.conv(x)).flatten(1)
        y = self.fc(self.drop(y))
        return y if scale is None else y * scale


def make():
    torch.manual_seed(0)
    return Net()


def other():
    model = make()
    with torch.no_grad():
        model.fc.weight[0] += 0.5
    return model


def tokens():
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))


def batches():
    return torch.arange(640.0).reshape(40, 1, 4, 4).split(16)


def named():
    names = [f"s{n}" for n in range(40)]
    return [{"x": x, "name": names[16 * n : 16 * n + 16]} for n, x in enumerate(batches())]


def broken():
    raise ValueError("no weights here")


number = 3
"""


@pytest.fixture(autouse=True)
def program_folder(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("nets", None)


def invoke(*args):
    """A command in this process: exit code, stdout, stderr."""
    result = CliRunner().invoke(hookline, [str(arg) for arg in args], prog_name="hookline")
    return result.exit_code, result.stdout, result.stderr


def process(*args, **environment):
    """A command in a process of its own: exit code, stdout, stderr."""
    root = str(Path(hl.__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "-m", "hookline", *map(str, args)],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": root, **environment},
    )  # fmt: skip
    return result.returncode, result.stdout, result.stderr


def json_of(*args):
    code, out, err = invoke(*args, "--format", "json")
    assert code == 0, err
    return json.loads(out)


# -- the real process -----------------------------------------------------------------------------


def test_a_process_lists_places_on_stdout_and_nothing_on_stderr():
    code, out, err = process("places", "nets.py:make")
    assert (code, err) == (0, "")
    assert out == (
        "Net: 4 places\n"
        "  place   type     value\n"
        "  conv    Conv2d   40 parameters\n"
        "  drop    Dropout\n"
        "  fc      Linear   195 parameters\n"
        "  unused  ReLU\n"
    )


@pytest.mark.parametrize("command", ["places", "summary"])
def test_a_process_whose_stdout_is_closed_does_its_work_all_the_same(command, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after `hookline … >&-`
    code = hookline.main([command, "nets.py:make"], prog_name="hookline", standalone_mode=False)
    assert not code


def test_a_harvest_whose_stderr_is_closed_tells_nothing_and_is_done(program_folder, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    batches = [torch.ones(2, 3)]
    assert len(hl.harvest(nn.Sequential(nn.ReLU()), batches, "0", to=program_folder / "acts")) == 2


def test_an_error_has_three_parts_on_stderr_and_no_traceback():
    code, out, err = process("places", "nets.py:make", "cnv")
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == "Error: Nothing matches 'cnv'."
    assert "Closest: 'conv'" in err
    assert len(err.splitlines()) == 3
    assert "Traceback" not in err


def test_debug_shows_the_traceback():
    code, _, err = process("--debug", "places", "nets.py:broken")
    assert code == 2
    assert "Traceback" in err
    assert "no weights here" in err


def test_what_is_captured_can_be_read_in_another_program(program_folder):
    code, out, err = process("capture", "nets.py:make", "-i", "2x1x4x4", "--to", "values")
    assert code == 0, err
    record = hl.load_record("values")
    assert "saved in values" in err
    assert "unused: its module was not called" in err
    sys.path.insert(0, str(program_folder))
    import nets

    model = nets.make().eval()
    x = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.conv(x)
    torch.testing.assert_close(record["conv"], expected)
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["conv", "drop", "fc", "unused"]


def test_what_a_model_prints_does_not_stand_in_the_answer(program_folder):
    (program_folder / "loud.py").write_text(
        "print('imported')\n" + NETS.replace("y = torch.relu", "print('run'); y = torch.relu")
    )
    model, x = "loud.py:make", ("-i", "2x1x4x4")
    json_of("harvest", "--model", model, "--data", "loud.py:batches", "-w", "fc", "--to", "a", "-q")
    for args in (
        ("places", model, "conv", "/*", *x),
        ("capture", model, *x),
        ("summary", model, *x),
        ("compare", model, model, *x),
    ):
        assert json_of(*args)
        assert {"imported", "run"} <= set(invoke(*args)[2].splitlines())
    assert invoke("report", model, *x)[1] == "report.html\n"


@pytest.mark.parametrize("end", ["sys.exit()", "sys.exit(0)", "sys.exit('bye')"])
def test_a_file_that_ends_the_program_is_told_of(program_folder, end):
    (program_folder / "ends.py").write_text(f"import sys\n{NETS}\n{end}\n")
    code, out, err = invoke("places", "ends.py:make")
    assert (code, out) == (2, "")
    assert "It raised SystemExit" in err
    assert "__main__" in err


def test_a_model_that_ends_the_program_in_its_run_is_an_error(program_folder):
    exiting = NETS.replace("y = torch.relu", "raise SystemExit(0); y = torch.relu")
    (program_folder / "ends.py").write_text(exiting)
    for command in ("capture", "summary", "places"):
        code, out, err = invoke(command, "ends.py:make", "-i", "2x1x4x4")
        assert (code, out, err) == (2, "", "Error: SystemExit was raised: 0.\n")


def test_the_command_line_without_click_says_what_to_install(program_folder):
    (program_folder / "click.py").write_text(
        "raise ModuleNotFoundError('no click', name='click')\n"
    )
    root = str(Path(hl.__file__).parent.parent)
    code, _, err = process("places", "x:y", PYTHONPATH=f"{program_folder}{os.pathsep}{root}")
    assert code == 2
    assert "pip install 'hookline[cli]'" in err


def on_a_terminal(*words, columns=80):
    """What a command shows on a terminal of so many columns."""
    leader, follower = pty.openpty()
    root = str(Path(hl.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "TERM": "xterm-256color"}
    environment |= {"COLUMNS": str(columns)}
    environment.pop("NO_COLOR", None)
    program = [sys.executable, "-m", "hookline", *words]
    subprocess.run(program, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown = os.read(leader, 100_000).decode()
    os.close(leader)
    return shown


def test_on_a_terminal_the_table_is_drawn_and_names_are_no_markup(program_folder):
    (program_folder / "odd.py").write_text(
        "from torch import nn\nnet = nn.ModuleDict({'[red]x[/red]': nn.ReLU()})\n"
    )
    shown = on_a_terminal("places", "odd.py:net")
    assert "\x1b[" in shown  # colours
    assert r"\[red\]x\[\/red\]" in shown  # the place, in its own spelling
    assert "ReLU" in shown


def test_a_place_in_an_error_can_be_pasted_into_the_shell(program_folder):
    (program_folder / "odd.py").write_text(
        "from torch import nn\nnet = nn.Sequential()\n"
        "net.add_module('*', nn.ReLU())\nnet.add_module('b', nn.ReLU())\n"
    )
    code, _, err = invoke("places", "odd.py:net", "*")
    assert code == 2
    written = re.search(r"Write ('.*?') for the first", err)[1]
    code, out, _ = invoke("places", "odd.py:net", *shlex.split(written))
    assert code == 0
    assert out.splitlines()[2].split()[0] == r"\*"


def test_a_name_cannot_break_a_line_or_steer_the_terminal(program_folder):
    (program_folder / "odd.py").write_text(
        "from torch import nn\n"
        "net = nn.Sequential()\n"
        "net.add_module('new\\nline', nn.ReLU())\n"
        "net.add_module('\\x1b[31mred', nn.ReLU())\n"
    )
    code, out, _ = process("places", "odd.py:net")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:]] == [r"new\nline", r"\x1b\[31mred"]
    drawn = on_a_terminal("places", "odd.py:net")
    assert r"new\nline" in drawn
    assert "\x1b[31m" not in drawn


def test_in_a_narrow_terminal_names_and_numbers_stay_whole(program_folder):
    shown = on_a_terminal("capture", "nets.py:make", "-i", "2x1x4x4", "-w", "conv", columns=30)
    shown = re.sub(r"\x1b\[[\d;]*m", "", shown)
    (row,) = [line for line in shown.splitlines() if line.startswith("conv")]
    _, out, _ = invoke("capture", "nets.py:make", "-i", "2x1x4x4", "-w", "conv")
    numbers = out.splitlines()[-1].split()[-4:]
    assert row.split()[-4:] == numbers


def test_negative_numbers_stand_right_in_their_column(program_folder):
    shown = on_a_terminal("capture", "nets.py:make", "-i", "2x1x4x4", "-w", "*", columns=90)
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()
    rows = [line for line in lines if line.startswith(("conv", "fc"))]
    assert " -" in rows[0]
    assert len(rows) == 2
    assert len({len(row.rsplit(maxsplit=1)[0]) for row in rows}) == 1  # where the least one ends


def test_a_comparison_is_as_wide_as_the_terminal(program_folder):
    words = ("compare", "nets.py:make", "nets.py:other", "-i", "2x1x4x4")
    shown = re.sub(r"\x1b\[[\d;]*m", "", on_a_terminal(*words, columns=60))
    assert "diverges" in shown
    assert max(map(len, shown.splitlines())) <= 60


def test_ctrl_c_ends_with_130(program_folder):
    (program_folder / "slow.py").write_text(
        "import os, signal, time\ndef make():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(9)\n"
    )
    code, out, err = process("places", "slow.py:make")
    assert code == 130
    assert "Traceback" not in err
    assert out == ""


CONSOLE = re.compile(
    r"^```console\n\$ hookline (?P<command>.*)\n(?P<output>(?:.*\n)*?)^```$", re.MULTILINE
)


def test_the_commands_of_the_page_print_what_it_says(program_folder):
    page = (Path(__file__).parents[1] / "docs" / "command-line.md").read_text()
    (program_folder / "nets.py").write_text(re.search(r'SOURCE = """(.*?)"""', page, re.S)[1])
    blocks = list(CONSOLE.finditer(page))
    assert len(blocks) == page.count("```console") == page.count("$ hookline ")
    for block in blocks:
        result = CliRunner().invoke(hookline, shlex.split(block["command"]), prog_name="hookline")
        sys.modules.pop("nets", None)
        printed = [line.rstrip() for line in result.output.splitlines()]
        assert printed == block["output"].splitlines(), block["command"]


# -- models ---------------------------------------------------------------------------------------


def test_a_model_is_a_file_a_package_a_class_or_an_instance(program_folder):
    for spec in ("nets.py:make", "nets:make", "nets.py:Net", program_folder / "nets.py:Net"):
        assert [row["place"] for row in json_of("places", spec)] == ["conv", "drop", "fc", "unused"]
    (program_folder / "one.py").write_text(
        "from torch import nn\nclass box:\n    net = nn.Linear(2, 3)\n"
    )
    assert json_of("places", "one.py:box.net", "**:value")[0]["value"] == "(3, 2) float32"


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("nets.py", "no name after a colon"),
        ("nets.py:", "no name after a colon"),
        ("none.py:make", "no such file"),
        ("none.at.all:make", "no such module"),
        ("nets.py:nothing", "has no 'nothing'"),
        ("nets.py:number", "It is of type int"),
        ("nets.py:batches", "It is of type tuple"),
        ("nets.py:broken", "ValueError: no weights here"),
        ("hf:gpt2", "an architecture"),
        ("hf:gpt22", "no architecture (closest: gpt2,"),
    ],
)
def test_a_model_that_is_none_is_an_error_in_three_parts(spec, found):
    code, out, err = invoke("places", spec)
    assert (code, out) == (2, "")
    assert found in err
    assert len(err.splitlines()) == 3


def test_a_model_without_children_has_its_own_place():
    assert [row["place"] for row in json_of("places", "torch.nn:ReLU")] == [""]
    assert [row["place"] for row in json_of("places", "torch.nn:ReLU", "-i", "2x3")] == [""]
    assert json_of("capture", "torch.nn:ReLU", "-i", "2x3")[0]["shape"] == [2, 3]
    assert json_of("summary", "torch.nn:ReLU", "-i", "2x3")["totals"]["modules"] == 1


def test_data_that_is_not_there_is_told_how_data_is_named(program_folder):
    options = ("--model", "nets.py:make", "-w", "conv", "--to", "acts")
    for spec in ("96x1x8x8", "none.py:batches", "none.at.all:batches"):
        code, _, err = invoke("harvest", *options, "--data", spec)
        assert code == 2
        assert "file.py:name, of batches" in err


def test_the_traceback_can_be_asked_for_at_the_end_of_the_command(program_folder):
    for args in (("--debug", "places", "nets.py:broken"), ("places", "nets.py:broken", "--debug")):
        code, _, err = invoke(*args)
        assert code == 2
        assert "Traceback" in err
    assert "No such option" not in invoke("places", "nets.py:make", "--", "--debug")[2]


def test_remedies_name_commands(program_folder):
    _, _, err = invoke("places", "nets.py:make", "nothing_here")
    assert "with hookline places MODEL '**' '**:value'." in err
    _, _, err = invoke("capture", "nets.py:make", "-i", "2x1x4x4", "-w", "conv/*")
    assert "with hookline places MODEL PLACE -i SPEC, and" in err
    _, _, err = invoke("capture", "nets.py:make", "-i", "2x1x4x4", "-w", "conv/softmax")
    assert "with hookline places MODEL 'conv/*' -i SPEC." in err


def test_an_import_error_inside_a_model_s_own_file_is_not_hidden(program_folder):
    (program_folder / "needs.py").write_text("import surely_not_there\n")
    code, _, err = invoke("places", "needs:make")
    assert code == 2
    assert "surely_not_there" in err


def test_models_run_in_eval_mode_unless_told(program_folder):
    still = [json_of("capture", "nets.py:make", "-i", "2x1x4x4", "-w", "drop")[0] for _ in range(2)]
    assert still[0] == still[1]
    torch.manual_seed(0)
    moving = json_of("capture", "nets.py:make", "-i", "2x1x4x4", "-w", "drop", "--train")[0]
    assert moving["mean"] != still[0]["mean"]


def tiny_bert():
    from transformers import BertConfig

    return BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=20, max_position_embeddings=16,
    )  # fmt: skip


def test_transformers_models_are_built_from_a_configuration_folder(program_folder):
    config = tiny_bert()
    config.save_pretrained(program_folder / "bert")
    found = json_of("places", f"hf:{program_folder / 'bert'}", "encoder.layer.*")
    assert [row["type"] for row in found] == ["BertLayer"]
    again = [json_of("capture", "hf:bert", "-i", "tokens:1x4", "-w", "pooler")[0] for _ in range(2)]
    assert again[0] == again[1]
    assert again[0]["shape"] == [1, 8]


def test_transformers_models_with_weights_are_loaded(program_folder):
    from transformers import BertModel

    config = tiny_bert()
    model = BertModel(config).eval()
    with torch.no_grad():
        model.pooler.dense.bias.fill_(7)
    model.save_pretrained(program_folder / "bert")
    found = json_of("capture", "hf:bert", "-i", "tokens:1x4", "-w", "pooler.dense.bias")
    assert found[0]["mean"] == 7
    found = json_of("capture", "hf:bert", "--random-weights", "-i", "tokens:1x4", "-w", "**.bias")
    assert all(row["mean"] != 7 for row in found if "why" not in row)


def test_transformers_weights_that_cannot_be_read_are_not_replaced_by_random_ones(program_folder):
    from transformers import BertModel

    config = tiny_bert()
    config.save_pretrained(program_folder / "bert")
    torch.save(BertModel(config).state_dict(), program_folder / "bert" / "pytorch_model.bin")
    code, _, error = invoke("places", "hf:bert")
    assert code == 2
    assert "not in safetensors: 'pytorch_model.bin'" in error
    assert json_of("places", "hf:bert", "pooler", "--random-weights")[0]["type"] == "BertPooler"


def test_transformers_models_with_a_head_keep_it(program_folder):
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    config = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=20, max_position_embeddings=16,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    model.save_pretrained(program_folder / "one")
    with torch.no_grad():
        model.classifier.weight.mul_(-5)
    model.save_pretrained(program_folder / "other")
    places = [json_of("places", "hf:one", "**", *more) for more in ([], ["--random-weights"])]
    assert places[0] == places[1]
    assert "classifier" in [row["place"] for row in places[0]]
    assert invoke("compare", "hf:one", "hf:other", "-i", "tokens:1x4")[0] == 1
    BertForMaskedLM(config).save_pretrained(program_folder / "masked")
    assert invoke("compare", "hf:masked", "hf:masked", "-i", "tokens:1x4")[0] == 0


# -- inputs ---------------------------------------------------------------------------------------


def test_inputs_are_shapes_files_and_objects(program_folder):
    array = np.arange(32.0, dtype=np.float32).reshape(2, 1, 4, 4)
    np.save("x.npy", array)
    np.savez("x.npz", x=array)
    Path("x.json").write_text(json.dumps({"x": array.tolist()}))
    from safetensors.torch import save_file

    save_file({"x": torch.from_numpy(array)}, "x.safetensors")
    Path("x.py").write_text(
        "import numpy, torch\ndef x(): return torch.from_numpy(numpy.load('x.npy'))\n"
    )
    specs = ["x.npy", "x.npz", "x.json", "x.safetensors", "x.py:x", "x=x.npy"]
    found = [json_of("capture", "nets.py:make", "-i", spec, "-w", "fc") for spec in specs]
    assert all(one == found[0] for one in found)
    made = json_of("capture", "nets.py:make", "-i", "2x1x4x4", "-i", "scale=zeros:1", "-w", "")
    assert made[0]["max"] == 0
    seeds = [
        json_of("capture", "nets.py:make", "-i", "2x1x4x4", "--seed", seed, "-w", "conv")[0]["mean"]
        for seed in (0, 0, 1)
    ]
    assert seeds[0] == seeds[1] != seeds[2]
    assert (
        json_of("places", "nets.py:tokens", "-i", "tokens:2x5")[1]["value"] == "(2, 5, 2) float32"
    )


def test_a_file_of_arguments_by_name_stands_beside_other_inputs():
    np.savez("two.npz", x=np.ones((2, 1, 4, 4), np.float32), scale=np.ones(1, np.float32))
    zeros = ["-i", "scale=zeros:1"]
    made = json_of("capture", "nets.py:make", "-i", "two.npz", *zeros, "-w", "")
    assert made[0]["max"] == 0


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (["-i", "none.npy"], "no such file"),
        (["-i", "bad.npy"], "cannot be read"),
        (["-i", "pickled.npy"], "cannot be read"),
        (["-i", "bad.safetensors"], "cannot be read"),
        (["-i", "bad.json"], "cannot be read"),
        (["-i", "2xyz"], "no shape"),
        (["-i", "x"], "no shape"),
        (["-i", ""], "no shape"),
        (["-i", "scale="], "no shape"),
        (["-i", "tokens:2x2"], "vocabulary's size is not known"),
        (["-i", "tokens:2x2:many"], "'many' is no size of a vocabulary"),
        (["-i", "tokens:2x2:0"], "'0' is no size of a vocabulary"),
        (["-i", "zeros:2x2:5"], "no vocabulary"),
        (["-i", "²x3"], "no shape"),
        ([], "No --input"),
    ],
)
def test_an_input_that_is_none_is_an_error(spec, found):
    for name in ("bad.npy", "bad.safetensors", "bad.json"):
        Path(name).write_bytes(b"\x93not a file")
    np.save("pickled.npy", np.array([print], dtype=object), allow_pickle=True)
    code, out, err = invoke("capture", "nets.py:make", *spec)
    assert (code, out) == (2, "")
    assert found in err


# -- commands -------------------------------------------------------------------------------------


def test_places_of_a_run_show_values_and_operations():
    rows = json_of("places", "nets.py:make", "conv", "/*", "fc:grad_output", "-i", "2x1x4x4")
    found = {row["place"]: row["value"] for row in rows}
    assert found["conv"] == "(2, 4, 4, 4) float32"
    assert found["fc:grad_output"] == "(2, 3) float32"
    assert found["/relu"] == "(2, 4, 4, 4) float32"
    sources = {row["place"]: row["source"] for row in rows}
    assert sources["/relu"].startswith("nets.py:15")
    assert sources["conv"] == ""


def test_operations_are_listed_of_a_run_with_all_its_inputs():
    args = ["places", "nets.py:make", "/*", "-i", "2x1x4x4"]
    assert [row["place"] for row in json_of(*args)] == ["/relu", "/flatten"]
    found = [row["place"] for row in json_of(*args, "-i", "scale=ones:1")]
    assert found == ["/relu", "/flatten", "/mul"]


@pytest.mark.parametrize("where", ["/relu", "/nowhere", "/*"])
def test_operations_are_listed_of_a_run_only(where):
    code, out, err = invoke("places", "nets.py:make", "conv", where)
    assert (code, out) == (2, "")
    assert f"operation {where!r}" in err
    assert "--input" in err


def test_one_is_told_in_the_singular():
    hl.Recipe([("fc", hl.zero())]).save("one")
    for args, found in [
        (["places", "nets.py:make", "fc"], "1 place\n"),
        (["places", "nets.py:make", "/relu", "-i", "2x1x4x4"], "1 place\n"),
        (["capture", "nets.py:make", "-w", "fc", "-i", "2x1x4x4"], "1 place, "),
        (["recipes", "check", "one", "nets.py:make"], "1 edit."),
    ]:
        assert found in invoke(*args)[1]


def test_gradients_are_captured_from_a_backward(program_folder):
    rows = json_of(
        "capture", "nets.py:make", "-i", "2x1x4x4", "-w", "fc:grad_output", "--backward", "mean"
    )
    assert rows[0]["mean"] == pytest.approx(1 / 6)
    code, _, err = invoke("capture", "nets.py:tokens", "-i", "tokens:1x2", "-w", "0:grad_output")
    assert code == 2
    assert "--backward sum" in err


def test_a_value_that_is_not_finite_is_shown_as_such():
    Path("x.json").write_text(json.dumps([[[[1.0, float("inf"), 2.0, float("-inf")]] * 4]] * 2))
    args = ["capture", "nets.py:make", "-i", "x.json", "-w", "conv:input"]
    assert invoke(*args)[1].splitlines()[-1].split()[-4:] == ["nan", "nan", "-inf", "inf"]
    assert json_of(*args)[0]["max"] is None  # JSON has no infinity


@pytest.mark.filterwarnings("ignore")  # torch's, of what it will take away
def test_capture_tells_of_sparse_nested_and_quantised_values(program_folder):
    (program_folder / "kinds.py").write_text("""
import torch
from torch import nn

class Kinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.sparse, self.nested, self.quantised = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x):
        self.sparse(x.to_sparse())
        self.nested(torch.nested.nested_tensor([x[0], x[1, :2]]))
        self.quantised(torch.quantize_per_tensor(torch.ones(2, 2), 0.5, 0, torch.quint8))
        return x
""")
    rows = json_of("capture", "kinds.py:Kinds", "-i", "3x4", "-w", "*")
    assert [row["place"] for row in rows] == ["sparse", "nested", "quantised"]
    assert [row["shape"] for row in rows] == [[3, 4], None, [2, 2]]
    assert [row["mean"] for row in rows] == [None, None, 1.0]


def test_capture_ends_early_where_asked():
    rows = json_of("capture", "nets.py:make", "-i", "2x1x4x4", "-w", "conv", "--stop")
    assert [row["place"] for row in rows] == ["conv"]


def test_a_summary_is_that_of_summarize(program_folder):
    sys.path.insert(0, str(program_folder))
    import nets

    found = json_of("summary", "nets.py:make", "-i", "2x1x4x4")
    expected = hl.summarize(nets.make().eval(), (2, 1, 4, 4)).to_dict()
    assert found == json.loads(json.dumps(expected))
    code, out, _ = invoke("summary", "nets.py:make")
    assert code == 0
    assert "conv" in out.split()


@pytest.mark.parametrize("option", ["--time", "--backward"])
def test_a_run_is_not_weighed_without_an_input(option):
    code, out, err = invoke("summary", "nets.py:make", option)
    assert (code, out) == (2, "")
    assert f"{option} was asked for" in err
    assert "--input" in err


def test_a_long_summary_names_the_option_that_shows_more(program_folder):
    (program_folder / "deep.py").write_text(
        "from torch import nn\nnet = nn.Sequential(*[nn.ReLU() for _ in range(70)])\n"
    )
    assert "70 deeper modules: --depth" in invoke("summary", "deep.py:net")[1]


def test_a_summary_for_programs_has_the_modules_that_the_table_has():
    def places(*args):
        return [row["place"] for row in json_of("summary", "nets.py:make", *args)["modules"]]

    assert places("-w", "conv") == places("-w", "conv", "-i", "2x1x4x4") == ["conv"]
    assert places("--depth", "0") == [""]
    assert places() == ["", "conv", "drop", "fc", "unused"]


def test_a_harvest_by_plan_and_by_options_gives_the_same_store(program_folder):
    Path("plan.toml").write_text(
        'model = "nets.py:make"\ndata = "nets.py:batches"\nwhere = ["conv", "fc"]\nto = "one"\n'
    )
    assert json_of("harvest", "plan.toml", "-q")["samples"] == 40
    assert (
        json_of("harvest", "plan.toml", "-q", "--to", "two", "--dtype", "float16")["samples"] == 40
    )
    one, two = hl.Store.open("one"), hl.Store.open("two")
    assert torch.equal(one["fc"][:].half(), two["fc"][:])
    sys.path.insert(0, str(program_folder))
    import nets

    with torch.no_grad():
        expected = nets.make().eval()(torch.cat(nets.batches()))
    torch.testing.assert_close(one["fc"][:], expected)
    assert json_of("harvest", "plan.toml", "-q")["samples"] == 40  # again: complete already


@pytest.mark.filterwarnings("ignore:The model is in training mode")
def test_a_plan_s_flags_mean_what_they_say(program_folder):
    plan = 'model = "nets.py:make"\ndata = "nets.py:batches"\nwhere = "drop"\nto = "{0}"\n{1}\n'
    for name, flags in (("still", "train = false\nstop = false"), ("moving", "train = true")):
        Path("plan.toml").write_text(plan.format(name, flags))
        assert json_of("harvest", "plan.toml", "-q")["samples"] == 40
    still, moving = (hl.Store.open(name)["drop"][:] for name in ("still", "moving"))
    assert (moving == 0).sum() > (still == 0).sum()


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        ("model = ", "no TOML"),
        ('modell = "x"', "modell"),
        ('model = "nets.py:make"', "lacks data, where, to"),
        (None, "cannot be"),
        ('train = "no"', "train is the str 'no'"),
        ("random_weights = 1", "random_weights is the int 1"),
        ("to = 3", "to is the int 3"),
        ("dtype = 16", "dtype is the int 16"),
        ('stop = "never"', "stop is the str 'never'"),
        ('where = ["fc", 3]', "where is the list ['fc', 3]"),
    ],
)
def test_a_bad_plan_is_an_error(plan, found):
    if plan is not None:
        Path("plan.toml").write_text(plan)
    code, _, err = invoke("harvest", "plan.toml")
    assert code == 2
    assert found in err
    assert len(err.splitlines()) == 3


def test_a_file_is_no_folder_for_a_store():
    args = ["--model", "nets.py:make", "--data", "nets.py:batches", "-w", "fc", "--to", "nets.py"]
    code, _, err = invoke("harvest", *args)
    assert code == 2
    assert "It is a file." in err
    assert Path("nets.py").read_text() == NETS


def test_a_dtype_that_is_none_is_an_error():
    args = ["--model", "nets.py:make", "--data", "nets.py:batches", "-w", "fc", "--to", "x"]
    code, _, err = invoke("harvest", *args, "--dtype", "float17")
    assert code == 2
    assert "float17" in err
    Path("plan.toml").write_text("dtype = 16")
    code, _, err = invoke("harvest", "plan.toml", *args)
    assert code == 2
    assert "16" in err


def test_the_ids_of_a_harvest_are_a_part_of_the_batch():
    args = ["--model", "nets.py:make", "-w", "fc", "--to", "x", "-q"]
    assert json_of("harvest", *args, "--data", "nets.py:named", "--ids", "name")["samples"] == 40
    assert hl.Store.open("x").ids[-1] == "s39"


def test_recipes_are_shown_checked_and_joined(program_folder):
    hl.Recipe([("fc", hl.scale(2.0))]).save("one")
    hl.Recipe([("cov", hl.zero())]).save("two")
    code, out, _ = invoke("recipes", "show", "one")
    assert code == 0
    assert "scale(factor=2.0)" in out
    hl.Recipe([("conv", hl.add(torch.ones(4), dim=1))]).save("along")
    assert "add(values=(4,) float32, dim=1)" in invoke("recipes", "show", "along")[1]
    hl.Recipe([(re.compile("f."), hl.zero())]).save("searching")
    code, _, err = invoke("recipes", "show", "searching")
    assert code == 2
    assert "regular expression 'f.'" in err
    other = hl.Recipe([(re.compile("f."), hl.zero())], calls=[1])
    (hl.Recipe([("fc", torch.relu)], at=slice(0, 2)) + other).save("more")
    assert json_of("recipes", "show", "more", "--allow-functions") == [
        {"where": "fc", "change": "relu", "at": "0:2", "calls": None},
        {"where": "re.compile('f.')", "change": "zero()", "at": None, "calls": "[1]"},
    ]
    assert json_of("recipes", "check", "one", "nets.py:make") == {"fits": True, "edits": 1}
    code, _, err = invoke("recipes", "check", "two", "nets.py:make")
    assert code == 2
    assert "'cov'" in err
    assert "Closest: 'conv'" in err
    hl.Recipe([("/relu", hl.zero()), ("fc/relu", hl.zero())]).save("inside")
    assert json_of("recipes", "check", "inside", "nets.py:make") == {"fits": True, "edits": 2}
    assert invoke("recipes", "join", "one", "two", "--to", "both")[0] == 0
    assert len(hl.Recipe.load("both")) == 2


def test_the_doctor_tries_what_it_reports():
    rows = {row["what"]: row for row in json_of("doctor")}
    for name in ("capture", "gradients", "edits", *(f"torch: {group}" for group in GROUPS)):
        assert rows[name]["state"] in ("ok", "limited"), rows[name]
    assert rows["torch: core"]["state"] == "ok"
    count = sum(probe.group == "core" for probe in PROBES.values())
    assert rows["torch: core"]["note"] == f"{GROUPS['core']} ({count} checks)"
    installed = rows["torch"]["state"]
    assert installed == torch.__version__.partition("+")[0] or installed in torch.__version__


def test_the_doctor_s_exit_code_tells_of_a_problem(monkeypatch):
    from hookline.cli import doctor

    def fails():
        raise RuntimeError("torn")

    monkeypatch.setattr(doctor, "_try_edit", fails)
    code, out, _ = invoke("doctor")
    assert code == 1
    assert out.startswith("1 problem found\n")
    assert "values cannot be edited (RuntimeError: torn)" in out


def test_the_doctor_names_what_differs_in_torch_and_what_needs_it(monkeypatch):
    monkeypatch.setattr(torch_private, "set_version", lambda tensor, number: None)
    monkeypatch.setattr(torch_private, "backward_id", lambda: -1)
    code, out, _ = invoke("doctor", "--format", "json")
    assert code == 1
    broken = {row["what"]: row["note"] for row in json.loads(out) if row["state"] == "broken"}
    assert set(broken) == {"torch: backward_id", "torch: set_version"}
    assert broken["torch: set_version"].startswith("edit and Recipe will not work: the number is")
    rows = {row["what"] for row in json.loads(out)}
    assert "torch: operations" in rows  # a group that has passed
    assert not {"torch: core", "torch: edits"} & rows


def test_the_doctor_says_what_is_done_without(monkeypatch):
    monkeypatch.setattr(torch_private, "without_dispatch_modes", None)
    (row,) = (
        row for row in json_of("doctor") if row["state"] == "limited" and "flops" in row["what"]
    )
    assert row["note"] == "FLOPs are counted operation by operation"


@pytest.mark.parametrize(
    ("version", "tested", "note"),
    [
        ("2.13.0+cpu", True, "tested (as are all from 2.8 to 2.15)"),
        ("2.99.0", False, "newer than 2.15, the newest tested version; the checks below tell"),
        ("3.0.1", False, "newer than 2.15, the newest tested version; the checks below tell"),
        ("2.15.0a0+git1234", False, "not a tested release; the checks below tell"),
    ],
)
def test_the_doctor_says_whether_this_torch_is_tested(monkeypatch, version, tested, note):
    from hookline.cli import doctor

    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(doctor, "is_tested_torch", lambda: tested)
    monkeypatch.setattr(doctor, "OLDEST_TORCH", (2, 8))
    monkeypatch.setattr(doctor, "NEWEST_TORCH", (2, 15))
    rows = {row["what"]: row["note"] for row in json_of("doctor")}
    assert rows["torch"].startswith(note)


def test_the_doctor_takes_no_folder_for_a_library(program_folder, monkeypatch):
    from hookline.cli import doctor

    (program_folder / "wandb_not_installed").mkdir()
    monkeypatch.syspath_prepend(program_folder)
    monkeypatch.setattr(doctor, "_EXTRAS", {"wandb": ("wandb_not_installed", "watch")})
    code, out, err = invoke("doctor")
    assert code == 0, err
    assert "absent" in out


def test_two_models_are_compared_with_an_exit_code_as_diff_has():
    code, out, _ = invoke("compare", "nets.py:make", "nets.py:make", "-i", "2x1x4x4")
    assert code == 0
    code, out, _ = invoke(
        "compare", "nets.py:make", "nets.py:other", "-i", "2x1x4x4", "--format", "json"
    )
    assert code == 1
    rows = {row["place"]: row["diverges"] for row in json.loads(out)["places"]}
    assert not rows["conv"]
    assert rows["fc"]
    code, _, err = invoke("compare", "nets.py:make", "nets.py:tokens", "-i", "2x1x4x4")
    assert code == 2
    assert "Error" in err


RENAMED = """

def plain():
    torch.manual_seed(0)
    return tokens()


def renamed():
    model = nn.Sequential()
    model.add_module("words", plain()[0])
    model.add_module("head", plain()[1])
    return model
"""


def test_places_of_other_names_are_mapped():
    Path("nets.py").write_text(NETS + RENAMED)
    models = ["nets.py:plain", "nets.py:renamed", "-i", "tokens:2x3"]
    code, out, _ = invoke("compare", *models, "--format", "json")
    assert [row["place"] for row in json.loads(out)["places"]] == [""]
    mapped = ["--map", "0", "words", "--map", "1", "head"]
    code, out, _ = invoke("compare", *models, *mapped, "--format", "json")
    assert code == 0
    pairs = {row["place"]: row["place_b"] for row in json.loads(out)["places"]}
    assert pairs == {"0": "words", "1": "head", "": ""}


SCALED = """

class Scaled(Net):
    def forward(self, x):
        return super().forward(x) * 100


def scaled():
    torch.manual_seed(0)
    return Scaled()


def layer():
    torch.manual_seed(0)
    return nn.Linear(4, 3)
"""


def test_the_output_of_the_whole_model_is_compared_too(program_folder):
    (program_folder / "nets.py").write_text(NETS + SCALED)
    code, out, _ = invoke("compare", "nets.py:make", "nets.py:scaled", "-i", "2x1x4x4")
    assert code == 1
    assert "they part at ''" in out
    code, out, _ = invoke("compare", "nets.py:layer", "nets.py:layer", "-i", "2x4")
    assert code == 0
    assert "at 1 place: equal" in out


@pytest.mark.parametrize("first", ["../old/model.py:net", "model:net"])
def test_each_of_two_models_imports_what_lies_beside_its_own_file(
    program_folder, first, monkeypatch
):
    source = "from torch import nn\nfrom parts.layers import Act\nnet = nn.Sequential(Act())\n"
    for name, kind in (("old", "ReLU"), ("new", "Tanh")):
        (program_folder / name / "parts").mkdir(parents=True)
        (program_folder / name / "model.py").write_text(source)
        (program_folder / name / "parts" / "layers.py").write_text(
            f"from torch.nn import {kind} as Act"
        )
    monkeypatch.chdir("old")
    known = set(sys.modules)
    code, out, err = invoke("compare", first, "../new/model.py:net", "-i", "3x4")
    for name in set(sys.modules) - known:
        del sys.modules[name]
    assert code == 1, out + err


@pytest.mark.parametrize("source", ["values", "acts", "run", "nets.py:make"])
def test_a_report_is_written_of_a_record_a_store_a_run_and_a_model(source):
    invoke("capture", "nets.py:make", "-i", "2x1x4x4", "--to", "values")
    args = ["--model", "nets.py:make", "--data", "nets.py:batches", "-w", "fc", "-q"]
    invoke("harvest", *args, "--to", "acts")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, every=1, to="run", optimizer=optimizer):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    code, out, err = invoke("report", source, "--to", "page.html", "-i", "2x1x4x4")
    assert (code, out) == (0, "page.html\n"), err
    assert Path("page.html").read_text().startswith("<!doctype html>")


def test_a_report_of_nothing_is_an_error(program_folder):
    (program_folder / "empty").mkdir()
    code, _, err = invoke("report", "empty")
    assert code == 2
    assert "no record, store or run" in err
    code, _, err = invoke("report", "nowhere")
    assert code == 2
    assert "no such folder" in err
    code, _, err = invoke("report", "nets.py")
    assert code == 2
    assert "no name after a colon" in err
    assert not Path("report.html").exists()


def test_a_report_of_a_folder_says_that_options_of_models_are_not_used():
    invoke("capture", "nets.py:make", "-i", "2x1x4x4", "--to", "values")
    assert "--train" not in invoke("report", "values")[2]
    for options in (["-i", "2x1x4x4"], ["--train"], ["--random-weights"]):
        code, _, err = invoke("report", "values", *options)
        assert code == 0
        assert options[0].replace("-i", "--input") in err
        assert invoke("report", "values", *options, "-q")[2] == ""


def test_a_port_that_no_machine_has_is_refused_with_the_range(program_folder):
    code, _, err = invoke("view", ".", "--port", "99999")
    assert code == 2
    assert "0<=x<=65535" in err


def test_a_dtype_that_torch_does_not_have_is_refused_with_some_that_it_has(program_folder):
    words = ("--model", "nets.py:make", "--data", "nets.py:batches", "-w", "fc", "--to", "acts")
    code, _, err = invoke("harvest", *words, "--dtype", "bf16")
    assert code == 2
    assert "bfloat16" in err


def test_a_live_view_is_served_until_ctrl_c(program_folder):
    invoke("capture", "nets.py:make", "-i", "2x1x4x4", "--to", "shown/values")
    root = str(Path(hl.__file__).parent.parent)
    program = [sys.executable, "-u", "-m", "hookline", "view", "shown"]
    view = subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    try:
        address = view.stdout.readline().strip()
        with urllib.request.urlopen(address + "api/sources", timeout=60) as answer:
            assert json.load(answer) == {"sources": [{"name": "values", "kind": "record"}]}
        view.send_signal(signal.SIGINT)
        _, err = view.communicate(timeout=60)
    finally:
        view.kill()
        view.wait()
    assert view.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_program(shell):
    code, out, _ = invoke("completion", shell)
    assert code == 0
    assert "_HOOKLINE_COMPLETE" in out


def test_every_command_explains_itself():
    code, out, _ = invoke("--help")
    assert code == 0
    assert "Exit codes: 0 done" in " ".join(out.split())
    for name, command in hookline.commands.items():
        assert name in out
        assert command.help, name
    assert "..." not in out.partition("Commands:")[2]  # no line is cut off


def test_a_class_that_needs_arguments_is_told_with_what_to_name_instead():
    code, _, err = invoke("summary", "torch.nn:Linear")
    assert code == 2
    assert "'in_features' and 'out_features'" in err
    assert "a function that needs no arguments" in err


def test_a_usage_error_is_2():
    assert invoke("places")[0] == 2
    assert invoke("nonsense")[0] == 2
    assert invoke("capture", "nets.py:make", "--format", "yaml")[0] == 2
    assert invoke("summary", "nets.py:make", "--depth", "-1")[0] == 2
    compared = ["compare", "nets.py:make", "nets.py:make", "-i", "2x1x4x4"]
    assert invoke(*compared, "--tolerance", "-1")[0] == 2
    assert invoke(*compared, "--tolerance", "0")[0] == 0


def test_a_user_s_model_that_raises_is_told_without_a_traceback():
    code, _, err = invoke("capture", "nets.py:make", "-i", "2x1x9x9")
    assert code == 2
    assert "RuntimeError" in err
    assert "Traceback" not in err
    assert "hookline" not in err.splitlines()[0]


def test_nothing_is_left_on_a_model_that_was_looked_at(program_folder):
    Path("kept.py").write_text("import nets\nnet = nets.make()\n")
    invoke("capture", "kept:net", "-i", "2x1x4x4")
    import kept

    assert not hl.attached(kept.net)
    assert not any(m._forward_hooks for m in kept.net.modules() if isinstance(m, nn.Module))
    sys.modules.pop("kept")
