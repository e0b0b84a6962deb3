"""What notebooks show: tables that fold, pictures whose pixels are the numbers."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from models import SelfAttention
from torch import nn

import hookline as hl
from hookline.training.findings import Findings
from hookline.view.thumbnails import bars, extent, thumbnail

NAMES = [
    "<img src=x onerror=alert(1)>",
    "\"quoted\" & 'single'",
    "x" * 5000,
    "层_名",
    "</style></details><script>alert(2)</script>",
]


class Page(HTMLParser):
    """Reads HTML: every tag that opens must close; what stands in cells is kept."""

    VOID = ("img", "br", "meta")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.rows, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def pixels(text):
    """The pictures in HTML, as height × width × RGBA."""
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    return [imread(io.BytesIO(base64.b64decode(data))) for data in found]


def captured(values, **options):
    model = nn.Identity()
    with hl.capture(model, "", **options) as record:
        for value in values:
            model(value)
    return record


# -- pictures -------------------------------------------------------------------------------------


def brightness(picture):
    return picture[..., :3] @ np.array([0.299, 0.587, 0.114])


def test_a_picture_of_a_matrix_has_a_pixel_for_each_number():
    value = torch.arange(12.0).reshape(3, 4)
    (picture,) = pixels(thumbnail(value))
    assert picture.shape == (3, 4, 4)
    light = brightness(picture).flatten()
    assert (np.diff(light) > 0).all()  # from dark to bright
    assert (picture[..., 3] == 1).all()


def test_values_of_both_signs_are_blue_and_red_around_a_neutral_middle():
    (picture,) = pixels(thumbnail(torch.tensor([[-2.0, 0.0, 1.0, 2.0]])))
    red, blue = picture[0, :, 0], picture[0, :, 2]
    assert blue[0] > red[0] + 0.3
    assert abs(red[1] - blue[1]) < 0.1
    assert red[2] > blue[2] + 0.1
    assert red[3] > blue[3] + 0.3
    (uneven,) = pixels(thumbnail(torch.tensor([[-1.0, 0.0, 4.0]])))
    assert abs(uneven[0, 1, 0] - uneven[0, 1, 2]) < 0.1  # zero is in the middle all the same
    assert uneven[0, 0, 2] > uneven[0, 0, 0]


def test_nan_and_infinities_have_colours_of_their_own():
    (picture,) = pixels(thumbnail(torch.tensor([[0.0, 1.0, torch.nan, torch.inf, -torch.inf]])))
    colours = (picture[0, 2:, :3] * 255).round().astype(int).tolist()
    assert colours == [[153, 153, 153], [230, 0, 126], [0, 213, 255]]
    assert "1 NaN, 2 Inf" in thumbnail(torch.tensor([0.0, torch.nan, torch.inf, torch.inf]))


def test_of_images_the_first_middle_and_last_channel_of_the_first_sample_are_drawn():
    value = torch.zeros(2, 5, 4, 4)
    value[0, 0], value[0, 2], value[0, 4] = 1.0, 2.0, 3.0
    (picture,) = pixels(thumbnail(value))
    assert picture.shape == (4, 14, 4)
    light = brightness(picture)[0]
    assert light[0] < light[5] < light[10]
    assert (picture[:, [4, 9], 3] == 0).all()  # the gaps are clear


@pytest.mark.parametrize(
    "shape",
    [(1,), (0,), (7,), (1000,), (1, 1), (500, 700), (2, 3, 4), (2, 1, 50, 60), (1, 2, 3, 4, 5)],
)
def test_pictures_are_small_whatever_the_shape(shape):
    text = thumbnail(torch.rand(shape))
    if torch.Size(shape).numel() < 2:
        assert not text
        return
    (picture,) = pixels(text)
    assert picture.shape[0] <= 24
    assert picture.shape[1] <= 72
    assert len(text) < 4000


def test_large_tensors_are_picked_from_evenly():
    value = torch.arange(500.0)[:, None].expand(500, 3)
    (picture,) = pixels(thumbnail(value))
    light = brightness(picture)[:, 0]
    assert light[0] == light.min()
    assert light[-1] == light.max()
    assert (np.diff(light) >= 0).all()


def test_a_constant_has_one_colour():
    (picture,) = pixels(thumbnail(torch.full((4, 4), 3.0)))
    assert len(np.unique(picture.reshape(-1, 4), axis=0)) == 1


def test_bars_are_as_high_as_the_counts():
    (picture,) = pixels(bars(torch.tensor([0, 6, 12, 24])))
    assert picture[..., 3].sum(0).tolist() == [0, 6, 12, 24]
    assert not bars(torch.zeros(4))
    assert not bars(torch.zeros(0))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor([1.0, 2.0]).to(torch.bfloat16), "1 … 2"),
        (torch.tensor([3, 3]), "3"),
        (torch.tensor([True, False]), "0 … 1"),
        (torch.tensor([torch.nan]), "nothing finite, 1 NaN"),
        (torch.tensor([3 + 4j]), "5"),
        (torch.zeros(0), ""),
        (torch.zeros(2, device="meta"), ""),
        (torch.zeros(1000, 1000), "≈ 0"),
    ],
)
def test_the_extent_of_a_tensor_is_said(value, words):
    assert extent(value) == words


# -- records --------------------------------------------------------------------------------------


def test_a_record_shows_extents_and_pictures_beside_its_table():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    x = torch.randn(5, 3)
    with hl.capture(model, "*", detach=True) as record:
        model(x)
    text = record._repr_html_()
    page = Page(text)
    assert page.rows[0] == ["place", "calls", "shape", "dtype", "", "values", ""]
    low, high = record["0"].min().item(), record["0"].max().item()
    assert page.rows[1][:4] == ["0", "1", "(5, 4)", "float32"]
    assert page.rows[1][5] == f"{low:.3g} … {high:.3g}"
    assert [picture.shape[:2] for picture in pixels(text)] == [(5, 4), (5, 4)]
    assert "details" in page.tags
    assert "summary" in page.tags


def test_parts_of_nested_values_have_their_own_pictures():
    lstm = nn.LSTM(3, 2)
    with hl.capture(lstm, "", detach=True) as record:
        lstm(torch.randn(5, 4, 3))
    page = Page(record._repr_html_())
    assert [row[0] for row in page.rows[1:]] == ["[0]", "[1][0]", "[1][1]"]
    assert len(pixels(record._repr_html_())) == 3


def test_what_cannot_be_read_has_no_picture_and_the_others_have():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    with hl.capture(model, "*") as record:
        model(torch.randn(4, 3))
    text = record._repr_html_()
    assert [row[5] == "" for row in Page(text).rows[1:]] == [True, False, False]
    assert len(pixels(text)) == 2


def test_a_large_record_is_bounded_and_folds():
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(1000)])
    with hl.capture(model, "*", detach=True) as record:
        model(torch.randn(64, 64))
    text = record._repr_html_()
    assert len(text) < 150_000
    assert "Record of 1000 places" in text
    assert "40 more" in text
    assert "and 940 more" in text
    page = Page(text)
    assert page.tags.count("details") == 2
    assert page.tags.count("img") == 40
    assert len(page.rows) == 60 + 2  # and the heads of both tables


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.quint8),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.ones(2, 2, dtype=torch.complex64).conj(),
        lambda: torch.ones(2, 2).to(torch.float8_e4m3fn),
        lambda: torch.ones(()),
        lambda: torch.ones(0, 3),
        lambda: torch.ones(2, 0, 3, 3),
        lambda: torch.full((2, 2), torch.nan),
        lambda: nn.Parameter(torch.ones(2, 2)),
        lambda: {"a": None, "b": [1, "x"]},
    ],
)
def test_a_repr_never_raises(make):
    Page(captured([make()])._repr_html_())
    Page(captured([make()], detach=True)._repr_html_())


def test_a_repr_survives_a_picture_that_fails(monkeypatch):
    def broken(*_):
        raise RuntimeError("no picture")

    record = captured([torch.ones(2, 2)])
    for name in ("thumbnail", "leaves"):
        monkeypatch.setattr(f"hookline.view.notebook.{name}", broken)
        page = Page(record._repr_html_())
        assert "img" not in page.tags
        assert page.rows[1][:3] == ["''", "1", "(2, 2)"]
        monkeypatch.undo()


# -- names, themes --------------------------------------------------------------------------------


def hostile():
    model = nn.ModuleDict({name: nn.Identity() for name in NAMES})
    model.forward = lambda x: [child(x) for child in model.values()]
    return model


class Sum(nn.Module):
    def forward(self, values):
        return sum(values)


def hostile_objects():
    """Every object that has a representation, with hostile names in it."""
    model, x = hostile(), torch.randn(3, 4)
    with hl.capture(model, "*") as record:
        model(x)
    places = hl.select(model, "*")
    found = hl.measure(model, "*", statistics=[hl.Mean()], data=[x])
    recipe = hl.Recipe([(place, hl.add(torch.rand(4))) for place in places])
    finding = hl.Finding(NAMES[0], NAMES[4], 3, NAMES[4], {}, NAMES[1], "error")
    whole = nn.Sequential(model, Sum())
    summary, comparison = hl.summarize(whole, x), hl.compare(whole, whole, x)
    sweep = hl.sweep(whole, x, -x, "0.*", torch.sum)
    findings = Findings([finding] * 3)
    return [record, places, found, recipe, finding, findings, summary, comparison, sweep]


@pytest.mark.parametrize("number", range(9))
def test_names_are_escaped_and_no_script_runs(number):
    subject = hostile_objects()[number]
    text = subject._repr_html_()
    page = Page(text)
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert {value[:5] for name, value in page.attributes if name == "src"} <= {"data:"}
    assert text.count("</style>") == 1
    assert "http" not in text
    assert len(text) < 60_000
    style = text[: text.index("</style>")]
    assert not re.search(r"[{;\s]color:", style)  # text has the colour of the page


def test_names_can_be_seen_and_do_not_turn_the_writing_around():
    model = nn.Sequential()
    model.add_module("ab\u202ecd", nn.Identity())
    model.add_module(" ", nn.Identity())
    page = Page(hl.select(model, "*")._repr_html_())
    assert [row[0] for row in page.rows[1:]] == ["ab\\u202ecd", "' '"]


def test_a_summary_folds_and_its_notes_stand_below():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)], nn.Sequential(nn.Fold(2, 1)))
    model[30].append(nn.ModuleList(nn.ReLU() for _ in range(40)))
    summary = hl.summarize(model)
    page = Page(summary._repr_html_())
    assert page.tags.count("details") == 2
    assert page.rows[0] == ["place", "type", "parameters", "bytes"]
    assert len(page.rows) == 1 + 34 + 1  # with the head of what is folded away
    text = summary._repr_html_()
    assert "<summary>14 more</summary>" in text
    assert text.index("40 deeper modules") > text.rindex("</details>")


def test_a_store_a_recipe_and_measurements_have_pictures(tmp_path):
    rows = torch.rand(30, 20)
    with hl.Store.create(tmp_path / "acts") as writer:
        writer.append({"h.0": rows, "h.1": [torch.rand(n % 4 + 1, 5) for n in range(30)]})
    store = hl.Store.open(tmp_path / "acts")
    assert [p.shape[:2] for p in pixels(store._repr_html_())] == [(24, 20), (24, 5)]
    assert Page(store._repr_html_()).rows[1][-2] == f"{rows.min():.3g} … {rows.max():.3g}"
    recipe = hl.Recipe([("a", hl.scale(2.0)), ("b", hl.scale(2.0) | hl.add(torch.rand(3, 3)))])
    assert [p.shape[:2] for p in pixels(recipe._repr_html_())] == [(3, 3)]
    assert hl.Recipe()._repr_html_() == "Recipe of 0 edits"
    statistics = [hl.Mean(), hl.Histogram(dim=None, bins=4, range=(0, 1))]
    found = hl.measure(nn.Identity(), "", statistics=statistics, data=[torch.full((2, 3), 0.9)])
    (picture,) = pixels(found._repr_html_())
    assert picture[..., 3].sum(0).tolist() == [0, 0, 0, 24]
    only = hl.measure(nn.Identity(), "", statistics=[hl.Mean()], data=[torch.rand(2, 3)])
    assert len(pixels(only._repr_html_())) == 1


def test_attention_patterns_have_pictures_of_their_heads():
    model = nn.Sequential(SelfAttention())
    with hl.attention(model) as patterns:
        model(torch.randn(2, 2, 6, 4))
    (picture,) = pixels(patterns._repr_html_())
    assert picture.shape[:2] == (6, 13)
    dark = brightness(picture)[0, 1]
    assert np.allclose(brightness(picture)[0, 2:6], dark)  # the future is hidden


def test_places_are_a_list_and_show_what_they_are_of():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    places = hl.select(model, "*", "0.weight")
    assert places == ["0", "0.weight", "1"]
    assert isinstance(places, list)
    assert repr(places) == "['0', '0.weight', '1']"
    rows = Page(places._repr_html_()).rows
    assert rows[1:] == [["0", "Linear"], ["0.weight", "(3, 2) float32"], ["1", "ReLU"]]
    places.append(hl.Place("other"))
    assert Page(places._repr_html_()).rows[-1] == ["other", ""]


def test_findings_show_what_to_try():
    findings = Findings(
        [
            hl.Finding(
                "dead units", "2", 1500, "31 of 64 gave zeros.", {}, "Lower the rate.", "error"
            )
        ]
    )
    page = Page(findings._repr_html_())
    assert page.rows[1] == [
        "2",
        "1,500",
        "error: dead units",
        "31 of 64 gave zeros.",
        "Lower the rate.",
    ]
    assert findings[0]._repr_html_() == findings._repr_html_()
    assert "1 finding, 1 of them error" in findings._repr_html_()
    Page(Findings()._repr_html_())


def test_a_record_shows_the_first_call_that_has_the_part():
    class Varied(nn.Module):
        def forward(self, x, whole):
            return x if whole else (x,)

    model = Varied()
    with hl.capture(model, "[0]") as record:
        model(torch.zeros(2), whole=True)
        model(torch.tensor([1.0, 3.0]), whole=False)
    assert "1 … 3" in record._repr_html_()
