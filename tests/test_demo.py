"""The demonstration runs, and its account is the one that it promises."""

import logging
import re
import sys

import pytest
import torch

import hookline as hl
from hookline import demo


@pytest.fixture(autouse=True)
def as_before():
    before, level = torch.get_num_threads(), logging.getLogger("hookline").level
    yield
    torch.set_num_threads(before)
    logging.getLogger("hookline").setLevel(level)


def test_the_demo_finds_what_is_wrong_mends_it_and_puts_everything_back(capsys, tmp_path):
    page = demo.main(tmp_path)
    printed = capsys.readouterr().out
    wrong, right = re.findall(r"test accuracy ([\d.]+)%", printed)
    assert float(wrong) < 20 < 90 < float(right)
    assert "! dead units at relu2" in printed
    assert "0 findings" in printed
    assert "'conv2/conv2d'" in printed
    assert "no hook is left: True" in printed
    assert printed.rstrip().endswith(str(page))
    assert "\x1b" not in printed  # no colours where there is no terminal
    assert len(printed.splitlines()) < 50
    run = hl.Run.open(tmp_path / "run")
    assert {finding.kind for finding in run.findings()} >= {"dead units"}
    assert len(hl.Store.open(tmp_path / "activations")) == 1350


def test_the_digits_are_the_same_at_each_drawing_and_every_digit_is_tested():
    known, unseen = demo.draw_digits()
    again, _ = demo.draw_digits()
    assert torch.equal(known.images, again.images)
    assert torch.equal(known.labels, again.labels)
    assert known.images.shape == (1350, 1, 8, 8)
    assert 0 == known.images.min() < known.images.max() <= 1
    assert set(unseen.labels.tolist()) == set(range(10))


def test_the_account_is_told_to_nobody_where_stdout_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    demo.say("Nobody reads this.", "title")
