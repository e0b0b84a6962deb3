"""Run directories: what is written is read back, and no file can harm the reader."""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hookline as hl
from hookline import Finding, NotCaptured, Run, RunError
from hookline.training.run_files import STATISTICS, Row
from hookline.training.run_writing import BinCounts, RunWriter
from hookline.view.run_tables import RunTable

ROWS = [
    Row("h.0", "output", "Linear", (8, 4)),
    Row("h.0", "grad", "Linear"),
    Row("<h>/../1", "output", "ReLU"),
    Row("h.0.weight", "weight", "Linear", (4, 4)),
]
FINDING = Finding("dead units", "<h>/../1", 50, "3 of 4.", {"dead": 0.75, "worst": math.inf}, "x.")


def numbered_values(step, rows=4):
    return np.arange(rows * len(STATISTICS), dtype=np.float32).reshape(rows, -1) + 1000 * step


def write_run(folder, steps=(0, 50, 100), rows=ROWS):
    with RunWriter(folder, rows, model="Net", options={"every": 50}) as writer:
        for step in steps:
            writer.histograms(step, [(0, BinCounts(-1.0, 1.0, [step + 1, *[0] * 63]))])
            writer.values(step, numbered_values(step, len(rows)))
            writer.scalar(step, "loss", 1 / (step + 1))
        writer.finding(FINDING)


def test_what_is_written_is_read_back(tmp_path):
    write_run(tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert run.rows() == ROWS
    assert run.places() == ["h.0", "<h>/../1", "h.0.weight"]
    assert run.places("grad") == ["h.0"]
    assert run.steps().tolist() == [0, 50, 100]
    for number, row in enumerate(ROWS):
        for column, name in enumerate(STATISTICS):
            steps, found = run.series(row.place, row.kind, name)
            assert steps.tolist() == [0, 50, 100]
            assert found.tolist() == [numbered_values(s)[number, column] for s in (0, 50, 100)]
    places, steps, matrix = run.matrix("output", "absmax")
    assert places == ["h.0", "<h>/../1"]
    assert matrix.tolist() == [[numbered_values(s)[row, 2] for s in (0, 50, 100)] for row in (0, 2)]
    assert [b.step for b in run.histograms("h.0")] == [0, 50, 100]
    low, high, counts, step = run.histogram("h.0", "output", step=99)
    assert (low, high, step, counts[0], counts.sum()) == (-1.0, 1.0, 50, 51, 51)
    assert run.histogram("h.0", "output").step == 100
    assert run.histogram("h.0", "grad") is None
    assert run.histogram("h.0", "output", step=-1) is None
    steps, losses = run.scalars("loss")
    assert losses.tolist() == [1, 1 / 51, 1 / 101]
    assert run.findings() == [FINDING]
    assert run.head.options == {"every": 50}
    assert run.head.model == "Net"


def test_the_files_are_what_the_format_says(tmp_path):
    write_run(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    endings = ["findings.jsonl", "histograms", "json", "scalars.jsonl", "values"]
    assert names == [f"00000.{ending}" for ending in endings]
    head = json.loads((tmp_path / "00000.json").read_text())
    assert head["format"] == "hookline-run"
    assert head["version"] == 1
    raw = (tmp_path / "00000.values").read_bytes()
    size = 16 + 4 * 4 * len(head["statistics"])
    assert len(raw) == 3 * size
    step, time = struct.unpack_from("<qd", raw, size)
    assert step == 50
    assert time > head["started"] - 1
    assert struct.unpack_from("<f", raw, size + 16)[0] == 50_000
    raw = (tmp_path / "00000.histograms").read_bytes()
    assert struct.unpack_from("<qii2f64I", raw, 280)[:6] == (50, 0, 0, -1.0, 1.0, 51)
    line = json.loads((tmp_path / "00000.scalars.jsonl").read_text().splitlines()[1])
    assert line | {"time": 0} == {"step": 50, "time": 0, "name": "loss", "value": 1 / 51}


def test_nothing_measured_is_nan_in_a_matrix_and_left_out_of_a_series(tmp_path):
    with RunWriter(tmp_path, ROWS[:2]) as writer:
        writer.values(0, [[1.0] * 10, [math.nan] * 10])
        writer.values(1, [[math.nan] * 10, [2.0] * 10])
    run = Run(tmp_path)
    assert run.series("h.0", "output", "mean")[0].tolist() == [0]
    _, steps, matrix = run.matrix("grad", "mean")
    assert steps.tolist() == [0, 1]
    assert np.isnan(matrix[0, 0])
    assert matrix[0, 1] == 2


def test_a_later_start_counts_from_its_first_step_on(tmp_path):
    write_run(tmp_path, (0, 50, 100, 150, 200))
    old = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with RunWriter(tmp_path, [ROWS[0], Row("new", "output")]) as writer:
        for step in (100, 140):
            writer.values(step, -numbered_values(step, 2))
            writer.histograms(step, [(0, BinCounts(0, 1, [7, *[0] * 63]))])
        writer.scalar(60, "loss", 9.0)
    assert all(path.read_bytes() == content for path, content in old.items())
    run = Run(tmp_path)
    assert run.segments == [0, 1]
    assert run.steps().tolist() == [0, 50, 100, 140]
    _, found = run.series("h.0", "output", "mean")
    assert found.tolist() == [0, 50_000, -100_000, -140_000]
    assert run.series("h.0", "grad", "mean")[0].tolist() == [0, 50]
    assert run.series("new", "output", "mean")[0].tolist() == [100, 140]
    assert run.places() == ["h.0", "new", "<h>/../1", "h.0.weight"]
    assert run.scalars("loss")[0].tolist() == [0, 50, 60]
    assert [b.step for b in run.histograms("h.0")] == [0, 50, 100, 140]
    assert run.histogram("h.0").counts[0] == 7


def test_findings_at_steps_that_a_later_start_has_measured_anew_are_left_out(tmp_path):
    with RunWriter(tmp_path, ROWS) as writer:
        for step in (0, 50, 100):
            writer.values(step, numbered_values(step))
            writer.finding(replace(FINDING, step=step))
    run = Run(tmp_path)
    assert [finding.step for finding in run.findings()] == [0, 50, 100]
    with RunWriter(tmp_path, ROWS) as writer:  # gone on with, from a checkpoint, and well
        run.refresh()
        assert [finding.step for finding in run.findings()] == [0, 50, 100]
        writer.values(50, numbered_values(50))
        run.refresh()
        assert [finding.step for finding in run.findings()] == [0]


def test_a_step_that_is_written_twice_counts_as_it_was_last(tmp_path):
    with RunWriter(tmp_path, ROWS[:1]) as writer:
        writer.values(5, [[1.0] * 10])
        writer.values(5, [[2.0] * 10])
    run = Run(tmp_path)
    assert run.steps().tolist() == [5]
    assert run.series("h.0", "output", "mean")[1].tolist() == [2.0]


def test_a_reader_follows_a_writer(tmp_path):
    writer = RunWriter(tmp_path, ROWS)
    run = Run(tmp_path)
    assert run.steps().tolist() == []
    assert not run.refresh()
    assert "no steps" in repr(run)
    writer.values(0, numbered_values(0))
    assert run.refresh()
    assert not run.refresh()
    assert run.steps().tolist() == [0]
    writer.scalar(3, "loss", math.nan)
    writer.finding(FINDING)
    writer.histograms(0, [(1, BinCounts(0, 1, [1] * 64))])
    assert run.refresh()
    assert math.isnan(run.scalars("loss")[1][0])
    assert run.findings() == [FINDING]
    assert run.histogram("h.0", "grad").counts.sum() == 64
    writer.shapes([None, (2, 3), None, None])
    writer.values(1, numbered_values(1))
    run.refresh()
    assert [row.shape for row in run.rows()] == [(8, 4), (2, 3), None, (4, 4)]
    writer.close()
    with RunWriter(tmp_path, ROWS) as other:
        other.values(2, numbered_values(2))
    assert run.refresh()
    assert run.steps().tolist() == [0, 1, 2]


def test_a_reader_follows_a_run_that_was_deleted_and_begun_anew(tmp_path):
    folder = tmp_path / "run"
    write_run(folder, (0, 50, 100))
    write_run(folder, (150, 200))
    run = Run(folder)
    table = RunTable(run, 60)
    shutil.rmtree(folder)
    assert not run.refresh()
    assert run.steps().tolist() == [0, 50, 100, 150, 200]  # what was read of it
    with RunWriter(folder, ROWS) as writer:
        writer.values(7, -numbered_values(7))
        writer.scalar(7, "loss", 3.0)
        assert run.refresh()
        assert run.segments == [0]
        assert run.steps().tolist() == [7]
        assert run.series("h.0", "output", "std")[1].tolist() == [-7001]
        assert run.scalars("loss")[0].tolist() == [7]
        table.refresh()
        assert table.steps.tolist() == [7]
        writer.values(8, -numbered_values(8))
        assert run.refresh()
        assert not run.refresh()
        assert run.steps().tolist() == [7, 8]


@pytest.mark.parametrize("ending", ["values", "histograms", "scalars.jsonl", "findings.jsonl"])
def test_a_torn_tail_is_not_read_and_is_read_when_it_is_whole(tmp_path, ending):
    write_run(tmp_path)
    path = tmp_path / f"00000.{ending}"
    content = path.read_bytes()

    def seen(run):
        return (
            run.steps().tolist(), len(run.histograms("h.0")), len(run.scalars("loss")[0]),
            len(run.findings()),
        )  # fmt: skip

    full = seen(Run(tmp_path))
    path.write_bytes(content[:-1])
    torn = Run(tmp_path)
    less = seen(torn)
    assert sum(a != b for a, b in zip(full, less, strict=True)) == 1
    with path.open("ab") as file:
        file.write(content[-1:])
    assert torn.refresh()
    assert seen(torn) == full


@pytest.mark.parametrize("cut", range(1, 10))
def test_a_run_that_is_cut_anywhere_is_readable(tmp_path, cut):
    write_run(tmp_path)
    for path in tmp_path.iterdir():
        if path.suffix != ".json":
            content = path.read_bytes()
            path.write_bytes(content[: len(content) * cut // 10])
    run = Run(tmp_path)
    repr(run)
    run.matrix("output", "std")
    run.histograms("h.0")


def test_records_of_zeros_are_not_steps(tmp_path):
    write_run(tmp_path)
    for ending, size in (("values", 16 + 4 * 4 * 10), ("histograms", 280)):
        with (tmp_path / f"00000.{ending}").open("ab") as file:
            file.write(bytes(size))
    run = Run(tmp_path)
    assert run.steps().tolist() == [0, 50, 100]
    assert run.series("h.0", "output", "mean")[1].tolist() == [0, 50_000, 100_000]
    assert len(run.histograms("h.0")) == 3


HEAD = {
    "format": "hookline-run", "version": 1, "started": 1.0, "model": "Net", "options": {},
    "statistics": ["mean"], "bins": 4,
    "rows": [{"place": "fc", "kind": "output", "type": "Linear", "shape": [1]}],
}  # fmt: skip
ROW = HEAD["rows"][0]


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"}, {"version": 2}, {"version": None}, {"rows": 5}, {"rows": [5]},
        {"rows": [ROW, ROW]}, {"rows": [ROW | {"place": 1}]}, {"rows": [ROW | {"shape": [-1]}]},
        {"rows": [ROW | {"shape": [1.5]}]}, {"rows": [{}]}, {"bins": 0}, {"bins": 10**9},
        {"bins": True}, {"statistics": ["mean", "mean"]}, {"statistics": [1]}, {"options": []},
        {"started": "now"}, {"model": None}, {"rows": [ROW | {"shape": "12"}]},
    ],
)  # fmt: skip
def test_a_head_that_is_not_sound_is_refused(tmp_path, change):
    (tmp_path / "00000.json").write_text(json.dumps(HEAD))
    Run(tmp_path)
    (tmp_path / "00000.json").write_text(json.dumps(HEAD | change))
    with pytest.raises(RunError, match="A run was to be read"):
        Run(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"null", b'{"format": 1e999}']
)
def test_a_head_that_is_something_else_is_refused(tmp_path, content):
    (tmp_path / "00000.json").write_bytes(content)
    with pytest.raises(RunError, match="A run was to be read"):
        Run(tmp_path)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="no such directory"):
        Run(tmp_path / "none")
    with pytest.raises(RunError, match="no head of a segment"):
        Run(tmp_path)
    (tmp_path / "store.json").write_text("{}")
    with pytest.raises(RunError, match="no head of a segment"):
        Run(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        b"{]", b"5", b'{"step": 1}', b'{"step": "1", "name": "x", "value": 1}',
        b'{"step": 1, "name": "x", "value": "one"}', b'{"step": 1, "name": 2, "value": 1}',
        b'{"step": 99999999999999999999, "name": "x", "value": 1}', b"[" * 100_000,
        b'{"step": 1, "name": "x", "value": 1' + b"0" * 400 + b"}", b"x" * (3 << 20),
    ],
)  # fmt: skip
def test_a_line_that_is_no_scalar_is_refused(tmp_path, line):
    write_run(tmp_path)
    with (tmp_path / "00000.scalars.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(RunError, match="scalars"):
        Run(tmp_path)


def test_a_line_that_is_no_finding_is_refused(tmp_path):
    write_run(tmp_path)
    good = FINDING.to_dict()
    bad = [
        {"kind": 1}, {"step": 1.5}, {"evidence": []}, {"severity": "fatal"}, {"message": None},
        {"evidence": {"a": "x"}},
    ]  # fmt: skip
    for change in bad:
        (tmp_path / "00000.findings.jsonl").write_text(json.dumps(good | change) + "\n")
        with pytest.raises(RunError, match="no finding"):
            Run(tmp_path)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    write_run(tmp_path)
    for ending in ("values", "scalars.jsonl"):
        path = tmp_path / f"00000.{ending}"
        path.unlink()
        os.mkfifo(path)
    assert Run(tmp_path).steps().tolist() == []
    os.mkfifo(tmp_path / "00001.json")
    with pytest.raises(RunError):
        Run(tmp_path)


def test_a_large_hole_is_read_in_little_memory(tmp_path):
    (tmp_path / "00000.json").write_text(json.dumps(HEAD | {"bins": 1 << 16}))
    with (tmp_path / "00000.histograms").open("wb") as file:
        file.truncate(512 << 20)
    program = (
        "import resource, sys; from hookline import Run\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"Run({str(tmp_path)!r}).histograms('fc')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    root = Path(hl.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root
    )
    assert int(done.stdout) < 64 << 10  # KiB


def test_a_head_that_changes_while_it_is_read_is_refused(tmp_path):
    writer = RunWriter(tmp_path, ROWS)
    run = Run(tmp_path)
    head = HEAD | {"started": run.head.started}  # else it would be that of another start
    (tmp_path / "00000.json").write_text(json.dumps(head))
    writer.values(0, numbered_values(0))
    with pytest.raises(RunError, match="changed"):
        run.refresh()
    writer.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_bytes_break_the_reader(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    for path in folder.iterdir():
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, 9999))  # the times in the files have varying lengths
            content[at * len(content) // 10_000] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
    try:
        run = Run(folder)
        repr(run)
        for row in run.rows():
            run.series(row.place, row.kind, run.head.statistics[0])
            run.histograms(row.place, row.kind)
    except (RunError, NotCaptured):
        pass


def test_asking_for_what_is_not_there_says_what_is(tmp_path):
    write_run(tmp_path)
    run = Run(tmp_path)
    with pytest.raises(NotCaptured, match=r"'h\.1' of kind 'output'.*'h\.0'"):
        run.series("h.1")
    with pytest.raises(NotCaptured, match=r"kind 'gradient'.*'grad'"):
        run.matrix("gradient")
    with pytest.raises(NotCaptured, match=r"statistic 'median'.*'mean'"):
        run.matrix("output", "median")
    with pytest.raises(NotCaptured, match=r"scalar 'accuracy'.*'loss'"):
        run.scalars("accuracy")
    with pytest.raises(NotCaptured, match=r"'h\.1'"):
        run.histogram("h.1")


def test_a_kind_and_a_statistic_in_each_others_place_are_told(tmp_path):
    write_run(tmp_path)
    run = Run(tmp_path)
    with pytest.raises(NotCaptured, match=r"Say kind='grad', statistic='mean': it is a statistic"):
        run.series("h.0", "mean", "grad")
    with pytest.raises(NotCaptured, match=r"The kind 'mean'.*Say statistic='mean'"):
        run.series("h.0", "mean")
    with pytest.raises(NotCaptured, match=r"The statistic 'grad'.*Say kind='grad': it is a kind"):
        run.matrix("output", "grad")


def test_the_table_shows_the_last_step_and_escapes_names(tmp_path):
    write_run(tmp_path)
    run = Run(tmp_path)
    text = repr(run)
    title = "Run of Net: 3 steps from 0 to 100, 3 places, loss, 1 finding"
    assert text.splitlines()[0] == title
    assert text.splitlines()[2].split()[:5] == ["h.0", "output", "Linear", "(8,", "4)"]
    assert "&lt;h&gt;/../1" in run._repr_html_()
    assert "<h>" not in run._repr_html_()


def test_writers_at_once_have_segments_of_their_own(tmp_path):
    writers = [RunWriter(tmp_path, ROWS) for _ in range(4)]
    assert [writer.number for writer in writers] == [0, 1, 2, 3]
    for writer in writers:
        writer.close()
    (tmp_path / "00004.values").touch()  # of one that died before its head was there
    with RunWriter(tmp_path, ROWS) as writer:
        assert writer.number == 5
    assert Run(tmp_path).segments == [0, 1, 2, 3, 5]


def test_a_full_disk_leaves_whole_records(tmp_path, monkeypatch):
    real, left = os.write, [3]

    def scarce(number, content):
        left[0] -= 1
        if left[0] > 0:
            return real(number, content)
        if left[0] == 0:
            return real(number, content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    with RunWriter(tmp_path, ROWS) as writer:
        monkeypatch.setattr("hookline.training.run_writing.os.write", scarce)
        writer.values(0, numbered_values(0))
        writer.values(1, numbered_values(1))
        with pytest.raises(RunError, match="No space"):
            writer.values(2, numbered_values(2))
        monkeypatch.undo()
        writer.values(3, numbered_values(3))
    run = Run(tmp_path)
    assert run.steps().tolist() == [0, 1, 3]
    assert run.series("h.0", "output", "mean")[1].tolist() == [0, 1000, 3000]


def test_a_write_that_was_cut_short_goes_on(tmp_path, monkeypatch):
    real = os.write
    with RunWriter(tmp_path, ROWS) as writer:
        monkeypatch.setattr("hookline.training.run_writing.os.write", lambda n, c: real(n, c[:100]))
        writer.values(0, numbered_values(0))
        writer.values(1, numbered_values(1))
        monkeypatch.undo()
    assert Run(tmp_path).series("h.0", "grad", "ratio")[1].tolist() == [18, 1018]


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="was to be written"):
        RunWriter(tmp_path / "file", ROWS)


def test_a_file_that_cannot_be_made_later_is_told(tmp_path):
    with RunWriter(tmp_path / "run", ROWS) as writer:
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(RunError, match="was to be written"):
            writer.scalar(0, "loss", 1.0)


def test_a_closed_writer_says_so(tmp_path):
    writer = RunWriter(tmp_path, ROWS)
    writer.close()
    writer.close()
    with pytest.raises(RunError, match="closed"):
        writer.scalar(0, "loss", 1.0)


def test_a_killed_writer_loses_nothing_that_was_written(tmp_path):
    program = (
        "import os, sys; from hookline.training.run_writing import RunWriter; "
        "from hookline.training.run_files import Row\n"
        f"writer = RunWriter({str(tmp_path)!r}, [Row('fc', 'output')])\n"
        "for step in range(100):\n"
        "    writer.values(step, [[step] * 10]); writer.scalar(step, 'loss', 1)\n"
        "os.kill(os.getpid(), 9)"
    )
    root = Path(hl.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root)
    assert done.returncode == -9
    run = Run(tmp_path)
    assert run.steps().tolist() == list(range(100))
    assert len(run.scalars("loss")[0]) == 100


def test_a_finding_survives_json_and_reads_as_a_sentence():
    text = json.dumps(FINDING.to_dict(), allow_nan=False)
    assert Finding.from_dict(json.loads(text)) == FINDING
    assert str(FINDING) == "step 50: dead units at '<h>/../1': 3 of 4. x."
    assert hash(FINDING) == hash(Finding.from_dict(json.loads(text)))
