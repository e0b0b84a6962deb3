"""The demonstration runs, and its account is the one that it promises."""

import sys

import pytest
import torch

from hookline import demo


@pytest.fixture(autouse=True)
def _threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_demo_reads_digits_and_puts_everything_back(capsys):
    demo.main()
    account = capsys.readouterr().out
    assert "PlaceNotFound: " in account
    assert "DIFFERENT" not in account
    assert account.count("bit for bit      the same\n") == 2
    assert account.rstrip().endswith("hooks left on the model   0")
    assert max(map(len, account.splitlines())) <= 88


def test_the_demo_is_repeatable(capsys):
    demo.main()
    first = capsys.readouterr().out
    demo.main()
    assert capsys.readouterr().out == first


def test_without_scikit_learn_the_demo_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match=r"not installed here\. Install it with: pip install"):
        demo.load_digits()
