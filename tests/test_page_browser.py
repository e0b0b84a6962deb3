"""The page in a real browser: from a file with the network off, and live."""

import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from models import HOSTILE_NAMES, hostile_model
from torch import nn

import hookline as hl
from hookline.training.findings import Finding
from hookline.training.run_files import STATISTICS, Row
from hookline.training.run_writing import BinCounts, RunWriter
from hookline.view.server import serve

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def tab(browser):
    """A tab that cannot reach any network, and fails the test if the page logs an error."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    context.set_default_timeout(20_000)
    page = context.new_page()
    troubles = []
    page.on("console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else 0)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("dialog", lambda dialog: (troubles.append("a dialog opened"), dialog.dismiss()))
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.asked, page.troubles = asked, troubles
    yield page
    context.close()
    assert not troubles


def visit(tab, path, part=""):
    tab.context.set_offline(True)
    tab.goto(Path(path).as_uri() + part)
    tab.wait_for_selector("html[data-ready]")


def await_link(tab, link):
    # Not wait_for_function: from its second look on, the page's security policy refuses it.
    playwright.expect(tab).to_have_url(re.compile(re.escape(link) + "$"))


def await_chosen(tab, link, name):
    await_link(tab, link)
    playwright.expect(tab.locator(".tree [aria-selected='true'] .name")).to_have_text(name)


def names_in_tree(tab):
    return tab.locator(".tree .row .name").all_inner_texts()


def painted(tab, selector):
    """Whether a canvas has more than one colour, once it is drawn."""
    script = """node => { const c = node.getContext('2d');
      const d = new Uint32Array(c.getImageData(0, 0, node.width, node.height).data.buffer);
      return new Set(d).size; }"""
    tab.locator(selector).first.scroll_into_view_if_needed()
    for _ in range(50):
        tab.wait_for_timeout(100)
        if tab.locator(selector).first.evaluate(script) > 2:
            return True
    return False


class ConvBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        self.spare = nn.Linear(2, 2)

    def forward(self, x):
        return self.act(self.conv(x))


@pytest.fixture(scope="module")
def record_page(tmp_path_factory):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(1, 4, 3))
    model.add_module("blocks", nn.Sequential(ConvBlock(), ConvBlock()))
    model.add_module("flat", nn.Flatten())
    model.add_module("fc", nn.Linear(144, 10))
    where = ["stem", "blocks.**", "fc", "fc:input", "blocks.*.conv:grad_output", "fc.weight"]
    with hl.capture(model, *where, detach=True) as record:
        for _ in range(3):
            model(torch.randn(6, 1, 8, 8)).square().mean().backward()
    return hl.report(record, tmp_path_factory.mktemp("page") / "record.html", title="Small net")


def test_the_page_opens_from_a_disk_and_asks_for_nothing(tab, record_page):
    visit(tab, record_page)
    assert tab.title() == "Small net · hookline"
    assert [url.partition(":")[0] for url in tab.asked] == ["file"]
    assert tab.locator(".facts dd").first.inner_text() == "1,798"
    assert names_in_tree(tab)[:4] == ["model", "stem", "blocks", "0"]
    assert painted(tab, "canvas[aria-label^='Standard deviation']")
    assert painted(tab, ".tile canvas")


def test_a_report_that_the_live_view_serves_is_drawn_and_can_ask_nobody(tab, record_page):
    with serve(record_page.parent) as server:
        address = f"{server.address}report?source={record_page.name}"
        tab.goto(address)
        tab.wait_for_selector("html[data-ready]")
        assert names_in_tree(tab)[:4] == ["model", "stem", "blocks", "0"]
        assert painted(tab, "canvas[aria-label^='Standard deviation']")
        assert painted(tab, ".tile canvas")
        assert tab.asked == [address]
        fetching = "address => fetch(address).then(() => 'answered', () => 'refused')"
        for path in ("api/sources", "report?source=record.html"):
            assert tab.evaluate(fetching, server.address + path) == "refused"
        assert "connect-src 'none'" in tab.troubles[0]
        tab.troubles.clear()  # each is told several times


def test_a_module_is_chosen_by_a_click_and_shows_value_and_gradient(tab, record_page):
    visit(tab, record_page)
    tab.locator(".row .name").get_by_text("conv", exact=True).first.click()
    tab.wait_for_selector(".card .statistics")
    assert tab.url.endswith("#place=blocks.0.conv")
    assert tab.locator("h1").inner_text() == "conv"
    assert tab.locator(".card .role").all_inner_texts() == ["value", "gradient"]
    assert tab.locator(".card .shape").all_inner_texts() == ["6 × 4 × 6 × 6"] * 2
    assert painted(tab, "canvas[aria-label^='Feature maps of blocks.0.conv,']")
    assert painted(tab, "canvas[aria-label^='Histogram of blocks.0.conv:grad_output']")
    tab.locator(".crumbs a", has_text="blocks").click()
    playwright.expect(tab.locator("h1")).to_have_text("blocks")
    assert "#place=blocks" in tab.url
    tab.go_back()
    playwright.expect(tab.locator("h1")).to_have_text("conv")


def test_the_slider_goes_through_the_calls(tab, record_page):
    visit(tab, record_page, "#place=stem")
    mean = tab.locator(".statistics dd").first
    tab.wait_for_selector(".statistics")
    before = mean.inner_text()
    slider = tab.get_by_role("slider", name="call")
    slider.focus()
    tab.keyboard.press("ArrowRight")
    playwright.expect(mean).not_to_have_text(before)
    assert "call=1" in tab.url
    assert tab.locator(".slider output").inner_text() == "call 1"
    tab.reload()
    tab.wait_for_selector(".statistics")
    assert tab.locator(".slider output").inner_text() == "call 1"


def test_a_link_leads_to_a_port_of_a_module(tab, record_page):
    visit(tab, record_page, "#place=fc%3Ainput")
    tab.wait_for_selector(".card[data-group=input] .statistics")
    assert tab.locator("h1").inner_text() == "fc"
    assert tab.locator(".card code").all_inner_texts() == ["fc:input", "fc.weight"]
    tab.goto(Path(record_page).as_uri() + "#place=nothing.here")
    tab.wait_for_selector("text=There is no place nothing.here on this page.")


def test_the_search_and_the_filters_narrow_the_tree(tab, record_page):
    visit(tab, record_page)
    names = tab.locator(".tree .row .name")
    tab.keyboard.press("/")
    tab.keyboard.type("relu 1")
    playwright.expect(names).to_have_text(["model", "blocks", "1", "act"])
    playwright.expect(tab.locator(".counter")).to_have_text("1 match")
    tab.keyboard.press("Enter")
    await_link(tab, "#place=blocks.1.act")
    tab.keyboard.press("Escape")
    playwright.expect(names.nth(6)).to_be_visible()
    tab.get_by_role("button", name="Never called").click()
    playwright.expect(names).to_have_text(["model", "blocks", "0", "spare", "1", "spare"])
    tab.get_by_role("button", name="All", exact=True).click()
    tab.get_by_label("Type of module").select_option("Flatten")
    playwright.expect(names).to_have_text(["model", "flat"])


def test_keys_that_come_faster_than_the_page_follows_each_take_a_step(tab, record_page):
    visit(tab, record_page)
    tab.evaluate(
        """() => { for (const key of "jj")
            document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })) }"""
    )
    await_chosen(tab, "#place=stem", "stem")


def test_everything_can_be_reached_with_the_keyboard(tab, record_page):
    visit(tab, record_page)
    tab.keyboard.press("j")
    await_chosen(tab, "#place=", "model")
    tab.keyboard.press("j")
    await_chosen(tab, "#place=stem", "stem")
    tab.keyboard.press("k")
    await_chosen(tab, "#place=", "model")
    tab.locator(".tree").focus()
    tab.keyboard.press("End")
    tab.keyboard.press("Enter")
    await_chosen(tab, "#place=fc", "fc")
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowLeft")
    playwright.expect(tab.locator(".tree .row .name")).to_have_text(["model"])
    tab.keyboard.press("ArrowRight")
    playwright.expect(tab.locator(".tree .row .name").nth(4)).to_be_visible()
    active = tab.locator(".tree").get_attribute("aria-activedescendant")
    assert tab.locator(f"#{active}").get_attribute("aria-expanded") == "true"
    tab.keyboard.press("?")
    playwright.expect(tab.get_by_role("dialog")).to_be_visible()
    tab.keyboard.press("Escape")
    tab.keyboard.press("Escape")
    tab.wait_for_selector(".facts")


def test_a_path_can_be_copied(tab, record_page):
    visit(tab, record_page, "#place=blocks.1.conv")
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.get_by_role("button", name="Copy path").click()
    tab.wait_for_selector(".copy.done")
    assert tab.evaluate("navigator.clipboard.readText()") == "blocks.1.conv"


def test_light_and_dark_follow_the_system_and_the_switch(tab, record_page):
    colour = "getComputedStyle(document.body).backgroundColor"
    tab.emulate_media(color_scheme="dark")
    visit(tab, record_page)
    dark = tab.evaluate(colour)
    tab.emulate_media(color_scheme="light")
    light = tab.evaluate(colour)
    assert dark != light
    tab.get_by_role("button", name="Dark colours").click()
    assert tab.evaluate(colour) == dark
    tab.keyboard.press("t")
    assert tab.evaluate(colour) == light


def test_a_narrow_screen_has_no_sideways_scrolling_and_a_drawer_for_the_tree(tab, record_page):
    tab.set_viewport_size({"width": 390, "height": 844})
    visit(tab, record_page, "#place=blocks.0.conv")
    tab.wait_for_selector(".statistics")
    wide = (
        "document.querySelector('main').scrollWidth <= document.querySelector('main').clientWidth"
    )
    assert tab.evaluate(wide)
    assert not tab.locator(".tree").is_visible()
    tab.get_by_role("button", name="Modules").click()
    tab.locator(".row", has_text="stem").click()
    await_link(tab, "#place=stem")
    playwright.expect(tab.locator(".tree")).to_be_hidden()


def test_on_paper_there_is_only_the_content_and_it_is_light(tab, record_page):
    tab.emulate_media(color_scheme="dark")
    visit(tab, record_page)
    chart = tab.locator("canvas[aria-label^='Standard deviation']")
    dark = chart.evaluate("node => node.toDataURL()")
    tab.emulate_media(media="print")
    assert tab.evaluate("getComputedStyle(document.querySelector('.tile')).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    tab.wait_for_function(  # it is drawn again when the page hears of the paper
        "([label, dark]) => document.querySelector(label).toDataURL() !== dark",
        arg=["canvas[aria-label^='Standard deviation']", dark],
    )
    assert not tab.locator(".sidebar").is_visible()
    assert tab.locator(".facts").is_visible()
    assert tab.evaluate("getComputedStyle(document.querySelector('main')).overflow") == "visible"


def test_what_was_not_scrolled_to_is_on_paper_too(tab, record_page):
    tab.set_viewport_size({"width": 900, "height": 260})
    visit(tab, record_page, "#place=fc")
    tab.wait_for_selector(".card .statistics")
    tab.pdf()
    drawn = """nodes => nodes.map(node =>
      node.getContext('2d').getImageData(0, 0, node.width, node.height).data.some(x => x))"""
    assert set(tab.locator(".card canvas").evaluate_all(drawn)) == {True}


def test_long_maps_are_neither_hairs_nor_towers(tab, tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 8, 1), nn.Conv1d(3, 4, 15))
    value = torch.randn(2, 1, 1, 300)
    heights = []
    for name, turned in (("wide", value), ("tall", value.mT)):
        with hl.capture(model, "0") as record:
            model[0](turned)
        visit(tab, hl.report(record, tmp_path / f"{name}.html"), "#place=0")
        heights.append(tab.locator(".picture canvas").bounding_box()["height"])
    visit(tab, hl.report(model, tmp_path / "model.html"), "#place=1")
    heights.append(tab.locator(".picture canvas").first.bounding_box()["height"])
    assert all(60 < height < 400 for height in heights), heights


def test_names_can_be_seen_and_do_not_turn_the_writing_around(tab, tmp_path):
    model = nn.Sequential()
    model.add_module("ab\u202ecd", nn.Linear(2, 2))
    model.add_module(" ", nn.Linear(2, 2))
    visit(tab, hl.report(model, tmp_path / "names.html", batch=torch.randn(3, 2)))
    assert names_in_tree(tab) == ["model", "ab\\u202ecd", "' '"]
    assert "\u202e" not in tab.locator("body").inner_text()
    assert "' '" in tab.locator(".tile .path").all_inner_texts()
    tab.locator(".row").nth(1).click()
    tab.wait_for_selector(".card .statistics")
    assert tab.locator("h1").inner_text() == "ab\\u202ecd"


def test_a_picture_without_a_finite_number_has_no_scale(tab, tmp_path):
    with hl.capture(model := nn.Identity(), "") as record:
        model(torch.full((3, 4), torch.nan))
    visit(tab, hl.report(record, tmp_path / "nan.html"), "#place=")
    playwright.expect(tab.locator(".pictured .note")).to_have_text("Nothing in it is finite.")
    assert tab.locator(".legend").count() == 0


def captured_twice(value):
    with hl.capture(model := nn.Sequential(nn.Identity(), nn.Identity()), "*") as record:
        model(value)
    return record


def test_a_vector_is_drawn_around_what_is_not_finite(tab, tmp_path):
    value = torch.tensor([1.0, 2.0, torch.inf, -1.0, torch.nan])
    visit(tab, hl.report(captured_twice(value), tmp_path / "vector.html"), "#place=0")
    playwright.expect(tab.locator(".pictured .key")).to_have_text("not finite")
    chart = tab.locator(".picture canvas")
    pixels = """node => [node.width, node.height,
      ...node.getContext('2d').getImageData(0, 0, node.width, node.height).data]"""
    wide, high, *found = chart.evaluate(pixels)
    there = np.array(found).reshape(high, wide, 4)[:, :, 3] > 0
    filled = [there[:, round((n + 0.5) / 5 * wide)].sum() for n in range(5)]
    assert filled == pytest.approx([high / 3, 2 * high / 3, high, high / 3, high], abs=8)


def test_large_numbers_that_are_neighbours_have_an_axis(tab, tmp_path):
    value = torch.tensor([1e16, 1e16 + 2, 1e16], dtype=torch.float64)
    visit(tab, hl.report(captured_twice(value), tmp_path / "large.html"), "#place=0")
    assert painted(tab, ".card canvas[aria-label^='Histogram']")


def test_a_picture_tells_the_numbers_that_are_there(tab, tmp_path):
    value = torch.tensor([[15496, 28001, 2049, 50256]])
    visit(tab, hl.report(captured_twice(value), tmp_path / "ids.html"), "#place=0")
    box = tab.locator(".picture canvas").bounding_box()
    told = []
    for n in range(4):
        tab.mouse.move(box["x"] + 36 * n + 18, box["y"] + 8)
        told.append(tab.locator(".tip .first").inner_text())
    assert told == ["15,496", "28,001", "2,049", "50,256"]


def test_a_layer_without_spread_is_seen_along_the_layers(tab, tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Identity() for _ in range(5))

        def forward(self, x):
            for layer, size in zip(self.layers, (1, 100, 0, 1, 1), strict=True):
                layer(x * size)

    with hl.capture(model := Net(), "layers.*") as record:
        model(torch.randn(4, 4))
    visit(tab, hl.report(record, tmp_path / "flat.html"))
    chart = tab.locator("canvas[aria-label^='Standard deviation']")
    column = """node => { const c = node.getContext('2d'), left = node.width - 60;
      const at = Math.round(52 + left * 0.5);
      const d = c.getImageData(at - 4, node.height - 18, 9, 18).data;
      return [...d].filter((_, n) => n % 4 === 3).filter(x => x > 200).length; }"""
    assert chart.evaluate(column) > 15, "more than the line of the axis"


def test_hostile_names_are_text_and_nothing_else(tab, tmp_path):
    path = hl.report(hostile_model(), tmp_path / "page.html", batch=torch.randn(3, 2))
    visit(tab, path)
    assert set(names_in_tree(tab)) >= set(HOSTILE_NAMES)
    for name in HOSTILE_NAMES:
        tab.locator(".row .name").get_by_text(name, exact=True).click()
        playwright.expect(tab.locator("h1")).to_have_text(name, use_inner_text=False)
        tab.wait_for_selector(".card .statistics")
        assert tab.locator("main .empty").count() == 0
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert tab.locator("img, iframe").count() == 0
    assert tab.evaluate("({}).polluted") is None


@pytest.fixture(scope="module")
def large_page(tmp_path_factory):
    model = nn.Sequential(*(nn.Sequential(*(nn.ReLU() for _ in range(9))) for _ in range(110)))
    with hl.capture(model, "**") as record:
        model(torch.randn(2, 8))
    return hl.report(record, tmp_path_factory.mktemp("large") / "page.html", model=model)


def test_a_thousand_modules_are_a_few_rows_at_a_time(tab, large_page):
    visit(tab, large_page)
    assert tab.locator(".counter").inner_text() == "1,101 modules"
    tab.keyboard.press("/")
    tab.keyboard.type("relu")
    playwright.expect(tab.locator(".counter")).to_have_text("990 matches")
    assert tab.locator(".row").count() < 60
    tab.locator(".tree").evaluate("node => node.scrollTop = node.scrollHeight")
    tab.wait_for_selector(".row[title='109.8']")
    assert tab.locator(".row").count() < 60
    assert tab.locator(".tile").count() == 60
    tab.get_by_role("button", name=re.compile("Show 300 more")).click()
    playwright.expect(tab.locator(".tile")).to_have_count(360)


ROWS = [Row(f"h.{n}", kind, "Block", (2, 3)) for n in range(5) for kind in ("output", "grad")]


def write_steps(writer, steps):
    for step in steps:
        values = np.random.default_rng(step).random((len(ROWS), len(STATISTICS)), np.float32)
        writer.histograms(step, [(0, BinCounts(-1.0, 1.0, np.arange(64)))])
        writer.values(step, values)
        writer.scalar(step, "loss", 1.0 / (1 + step))


def test_a_run_shows_findings_curves_and_a_map_that_leads_to_places(tab, tmp_path):
    with RunWriter(tmp_path / "run", ROWS, model="Net") as writer:
        write_steps(writer, range(20))
        writer.finding(Finding("dead units", "h.3", 7, "All 5 are.", {}, "Try less.", "error"))
    visit(tab, hl.report(tmp_path / "run", tmp_path / "run.html"))
    tab.wait_for_selector(".curve canvas")
    assert "0.05 at step 19" in tab.locator(".readout").first.inner_text()
    heat = "canvas[aria-label^='std of 5 places']"
    tab.wait_for_selector(heat)
    assert painted(tab, heat)
    tab.locator(heat).focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowLeft", "Enter"):
        tab.keyboard.press(key)
    await_link(tab, "#place=h.2&step=18")
    tab.go_back()
    tab.get_by_label("Statistic").select_option("mean")
    tab.wait_for_selector("canvas[aria-label^='mean of 5 places']")
    tab.get_by_role("button", name="gradients").click()
    tab.locator(".findings a").click()
    await_link(tab, "#place=h.3&step=7")
    tab.goto(tab.url.partition("#")[0] + "#place=h.0")
    tab.wait_for_selector(".distribution canvas")
    assert tab.locator(".card .role").all_inner_texts() == ["value", "gradient"]


def test_the_steps_of_a_map_stand_under_their_columns(tab, tmp_path):
    tab.add_init_script("""const write = CanvasRenderingContext2D.prototype.fillText;
      window.written = [];
      CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        const said = this.canvas.getAttribute("aria-label") || "";
        if (said.startsWith("std of 5 places") && this.textBaseline === "top")
          window.written.push([Number(text), x, this.textAlign]);
        return write.call(this, text, x, y);
      };""")
    with RunWriter(tmp_path / "run", ROWS, model="Net") as writer:
        write_steps(writer, range(12))
    visit(tab, hl.report(tmp_path / "run", tmp_path / "run.html"))
    assert painted(tab, "canvas[aria-label^='std of 5 places']")
    steps, at, align = zip(*tab.evaluate("window.written"), strict=True)
    assert steps[0] == 0
    assert len(set(steps)) > 3
    assert set(align) == {"center"}
    assert len(set(np.diff(sorted(set(steps))))) == 1, "evenly spaced"
    wide = (max(at) - min(at)) / max(steps)  # of a column
    assert np.allclose(at, min(at) + wide * np.array(steps), atol=1)


def test_a_layer_that_never_ran_is_hatched_and_said_to_be_not_measured(tab, tmp_path):
    values = np.ones((3, len(STATISTICS)))
    values[1:] = np.nan  # the first ran, the second had nothing finite, the third never ran
    values[1, STATISTICS.index("nonfinite")] = 1
    with RunWriter(tmp_path / "run", [Row(name, "output") for name in "abc"]) as writer:
        for step in range(4):
            writer.values(step, values)
    visit(tab, hl.report(tmp_path / "run", tmp_path / "run.html"))
    assert tab.locator(".map .key span").all_inner_texts() == ["not measured", "not finite"]
    chart = tab.locator(".map canvas").first
    chart.scroll_into_view_if_needed()
    box, told = chart.bounding_box(), []
    for row in range(3):
        tab.mouse.move(box["x"] + box["width"] - 5, box["y"] + 22 * row + 10)
        told.append(tab.locator(".tip").inner_text().splitlines())
    assert told == [
        ["a", "step 3", "std 1"],
        ["b", "step 3", "std not finite"],
        ["c", "step 3", "std not measured"],
    ]
    column = "node => [...node.getContext('2d').getImageData(node.width - 9, 0, 1, 66).data]"
    pixels = np.array(chart.evaluate(column)).reshape(66, 4)
    assert (pixels[24:42] == (214, 40, 110, 255)).all()
    assert (pixels[46:64, 3] == 0).any()  # the page itself, between lines


def test_the_numbers_of_a_place_are_those_of_one_step_and_it_is_named(tab, tmp_path):
    with RunWriter(tmp_path / "run", [Row(name, "output") for name in "ab"]) as writer:
        for step in range(4):
            values = np.full((2, len(STATISTICS)), step + 0.5)
            if step > 1:  # of the first nothing is finite any more, the second did not run
                values[:] = np.nan
                values[0, STATISTICS.index("nonfinite")] = 1
            writer.values(step, values)
    visit(tab, hl.report(tmp_path / "run", tmp_path / "run.html"), "#place=a")
    tab.wait_for_selector(".statistics")
    cells = ".statistics div:has(dt:text-is('{}')) dd"
    told = [tab.locator(cells.format(name)).inner_text() for name in ("mean", "zeros", "nonfinite")]
    assert told == ["–", "–", "100 %"]
    assert tab.locator(".note").last.inner_text() == "The numbers are those of step 3."
    visit(tab, tmp_path / "run.html", "#place=b")
    tab.wait_for_selector("h1:text-is('b')")
    assert tab.locator(cells.format("mean")).inner_text() == "1.5"
    assert tab.locator(".note").last.inner_text() == "The numbers are those of step 1."


def test_above_a_curve_it_is_said_why_there_is_no_number(tab, tmp_path):
    with RunWriter(tmp_path / "run", [Row(name, "output") for name in "ab"]) as writer:
        for step in range(3):
            values = np.full((2, len(STATISTICS)), 0.5)
            if step == 2:
                values[:] = np.nan
                values[0, STATISTICS.index("nonfinite")] = 1
            writer.values(step, values)
            writer.scalar(step, "loss", np.nan if step == 2 else 1.0)
    hl.report(tmp_path / "run", tmp_path / "run.html")
    for place, said in (
        ("", "not finite"),
        ("#place=a", "not finite"),
        ("#place=b", "not measured"),
    ):
        visit(tab, tmp_path / "run.html", place)
        playwright.expect(tab.locator(".readout").first).to_have_text(f"{said} at step 2")


def test_a_curve_is_parted_where_numbers_are_not_finite(tab, tmp_path):
    with RunWriter(tmp_path / "run", [Row(name, "output") for name in "ab"]) as writer:
        for step in range(9):
            values = np.full((2, len(STATISTICS)), 0.5)
            if 2 < step < 6:  # the first is not finite, the second does not run
                values[:] = np.nan
                values[0, STATISTICS.index("nonfinite")] = 1
            writer.values(step, values)
            writer.scalar(step, "loss", np.inf if 2 < step < 6 else 0.5)
    hl.report(tmp_path / "run", tmp_path / "run.html")
    middle = """node => { const c = node.getContext('2d'), at = 58 + (node.width - 68) / 2 - 4;
      const d = c.getImageData(at, 0, 8, node.height).data, found = [0, 0];
      const near = (n, rgb) => rgb.every((x, k) => Math.abs(d[n + k] - x) < 40) && d[n + 3] > 150;
      for (let n = 0; n < d.length; n += 4)
        [[11, 122, 117], [214, 40, 110]].forEach((rgb, k) => (found[k] += near(n, rgb)));
      return found.map(Boolean); }"""
    for place, seen in (
        ("", [False, True]),
        ("#place=a", [False, True]),
        ("#place=b", [True, False]),
    ):
        visit(tab, tmp_path / "run.html", place)
        tab.wait_for_selector(".curve canvas")
        tab.wait_for_timeout(100)
        assert tab.locator(".curve canvas").first.evaluate(middle) == seen, place


@pytest.mark.parametrize(
    ("low", "high"), [(-0.003494, 0.002536), (-1.234e-12, 9.87e-12), (1000.25, 1000.5), (-8e9, 8e9)]
)
def test_numbers_beside_pictures_are_not_cut_off(low, high, tab, tmp_path):
    with RunWriter(tmp_path / "run", ROWS, model="Net") as writer:
        for step in range(20):
            writer.histograms(step, [(0, BinCounts(low, high, np.arange(64)))])
            writer.values(step, np.full((len(ROWS), len(STATISTICS)), low, np.float32))
    tab.add_init_script("""
        window.cut = [];
        const proto = CanvasRenderingContext2D.prototype, fillText = proto.fillText;
        proto.fillText = function (text, x, y, ...rest) {
            const { a, e } = this.getTransform(), wide = a * this.measureText(text).width;
            const part = { right: 1, end: 1, center: 0.5 }[this.textAlign] ?? 0;
            const left = a * x + e - part * wide;
            if (left < -1 || left + wide > this.canvas.width + 1) window.cut.push(text);
            return fillText.call(this, text, x, y, ...rest);
        };
    """)
    path = hl.report(tmp_path / "run", tmp_path / "run.html")
    for part in ("", f"#place={ROWS[0].place}"):
        visit(tab, path, part)
        tab.wait_for_selector("main canvas")
        tab.wait_for_timeout(300)
        assert tab.evaluate("window.cut") == []


def test_what_is_noticed_late_in_a_long_live_run_is_shown(tab, tmp_path):
    with RunWriter(tmp_path / "run", ROWS, model="Net") as writer:
        write_steps(writer, [0])
        for step in range(230):
            writer.finding(Finding("spike", "h.1", step, "It jumped.", {}))
        with serve(tmp_path) as server:
            tab.goto(server.address)
            count = tab.locator(".section-head .aside").first
            playwright.expect(count).to_have_text("200 of 230 findings")
            tab.wait_for_selector(".status.up")
            writer.finding(Finding("NaN", "h.2", 230, "It is none.", {}, severity="error"))
            write_steps(writer, [230])
            playwright.expect(count).to_have_text("200 of 231 findings")
            playwright.expect(tab.locator(".findings strong").first).to_have_text("NaN")
            tab.goto("about:blank")


def test_the_axes_of_a_curve_tell_close_numbers_apart_and_have_whole_steps(tab, tmp_path):
    with RunWriter(tmp_path / "run", ROWS, model="Net") as writer:
        for step in range(4):
            writer.scalar(step, "loss", 0.58213 + step * 1e-6)
    tab.add_init_script("""
      const write = CanvasRenderingContext2D.prototype.fillText;
      window.written = [];
      CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
        if (this.canvas.closest(".curve")) window.written.push(text);
        return write.call(this, text, ...rest);
      };""")
    visit(tab, hl.report(tmp_path / "run", tmp_path / "run.html"))
    tab.wait_for_selector(".curve canvas")
    tab.wait_for_timeout(100)
    written = tab.evaluate("window.written")
    assert written[:4] == ["0", "1", "2", "3"]
    values = [text for text in written if text.startswith("0.58")]
    assert len(values) > 2
    assert len({*values}) == len(values)


def test_a_live_run_updates_itself_and_survives_a_restart(tab, tmp_path):
    (tmp_path / "second").mkdir()
    with serve(tmp_path, poll=0.05) as server:
        tab.goto(server.address)
        tab.wait_for_selector("text=This page waits for one")
        with RunWriter(tmp_path / "first", ROWS, model="Net") as writer:
            write_steps(writer, range(3))
            tab.wait_for_selector("html[data-ready]")
            tab.wait_for_selector(".status.up")
            latest = tab.locator(".facts dd").first
            write_steps(writer, [10])
            playwright.expect(latest).to_have_text("10")
            playwright.expect(tab.locator(".readout").first).to_contain_text("at step 10")
            writer.finding(Finding("spike", "h.1", 10, "It jumped.", {}))
            playwright.expect(tab.locator(".findings a")).to_have_text("h.1")
        with RunWriter(tmp_path / "first", ROWS, model="Net") as writer:  # training goes on
            write_steps(writer, [11, 12])
            playwright.expect(latest).to_have_text("12")
            playwright.expect(tab.locator(".facts")).to_contain_text("starts")
            tab.locator(".row", has_text="0").click()
            tab.wait_for_selector(".card .readout")
            chosen = tab.locator(".distribution output").first
            playwright.expect(chosen).to_have_text("step 12")
            tab.get_by_label("step", exact=True).first.focus()
            tab.keyboard.press("Home")
            playwright.expect(chosen).to_have_text("step 0")
            write_steps(writer, [20])
            playwright.expect(tab.locator(".card .readout").first).to_contain_text("at step 20")
            playwright.expect(chosen).to_have_text("step 0")  # it stays where it was put
        with RunWriter(tmp_path / "second", ROWS, model="Other") as writer:
            write_steps(writer, [0])
        with RunWriter(tmp_path / "first", ROWS, model="Net") as writer:
            write_steps(writer, [21])
            tab.get_by_label("What is shown").select_option("second")
            playwright.expect(tab.locator(".top .name")).to_have_text("Other")
        tab.goto("about:blank")


def test_a_folder_that_cannot_be_read_says_why_and_leaves_the_others_within_reach(tab, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "store.json").write_text("{")
    with RunWriter(tmp_path / "b", ROWS, model="Net") as writer:
        write_steps(writer, [0])
    trouble, name = tab.locator("main .trouble"), tab.locator(".top .name")
    chooser = tab.get_by_label("What is shown")
    with serve(tmp_path) as server:
        tab.goto(server.address)
        playwright.expect(trouble).to_contain_text("It holds no sound JSON")
        playwright.expect(name).to_have_text("a")
        chooser.select_option("b")
        playwright.expect(name).to_have_text("Net")
        playwright.expect(trouble).to_have_count(0)
        chooser.select_option("a")
        playwright.expect(trouble).to_have_count(1)
        shutil.rmtree(tmp_path / "a")
        with hl.Store.create(tmp_path / "a") as writer:
            writer.append({"fc": torch.ones(3, 2)})
        playwright.expect(tab.locator(".row .name").last).to_have_text("fc")  # without a reload
        playwright.expect(trouble).to_have_count(0)
        tab.goto("about:blank")
    assert all("409" in text or "404" in text for text in tab.troubles)
    tab.troubles.clear()  # the browser itself logs what was refused


def test_a_live_store_is_browsed_sample_by_sample(tab, tmp_path):
    with hl.Store.create(tmp_path / "acts") as writer:
        values = torch.arange(4000.0).reshape(1000, 4)
        writer.append({"fc": values}, ids=[f"doc {n}" for n in range(1000)])
    with serve(tmp_path) as server:
        tab.goto(server.address + "#place=fc")
        tab.wait_for_selector(".statistics")
        assert tab.locator(".counter").inner_text() == "1 place"
        tab.get_by_role("slider", name="sample").fill("777")
        playwright.expect(tab.locator(".slider output")).to_have_text("sample 777 · doc 777")
        playwright.expect(tab.locator(".statistics dd").first).to_have_text("3,110")
        tab.goto("about:blank")
    time.sleep(0.05)  # the stream's thread sees that the tab is gone
