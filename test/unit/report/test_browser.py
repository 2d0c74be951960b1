"""A report in a browser: nothing goes wrong, the search jumps, a click shows an operator, keys zoom the timeline."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from markup_names import FUNCTION, MODEL, NASTY

import unity_ir as ui

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1200",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: the extra report-test")
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        pytest.skip("chromium and chromedriver are not installed: Debian's chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("report") / "report.html"
    sizes = {"batch": 4, "layers": 6, "hidden": 16, "heads": 2, "vocabulary": 32, "sequence": 8}
    plan = ui.plan("gpt2", **sizes, machine="dgx-h100:2x2", degrees="tp=2,dp=2", optimizer="adam")
    plan.report(path, against=plan)
    browser.get(path.as_uri())
    return browser


def wait_until(holds: Callable[[], Any], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def press(page: Any, *keys: str) -> None:
    page.switch_to.active_element.send_keys(*keys)


def span(page: Any) -> float:
    given = page.find_element("id", "timeline-picture").get_property("dataset")
    return float(given["to"]) - float(given["from"])


def test_it_is_drawn_at_once_and_without_an_error(page: Any):
    assert page.execute_script("return Number(document.documentElement.dataset.drawn)") < 2000
    drawn = """
      const canvas = document.getElementById(arguments[0]);
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      return new Set(new Uint32Array(data.buffer)).size;"""
    for picture in ("graph-picture", "timeline-picture"):
        assert page.execute_script(drawn, picture) > 10
    assert page.find_element("id", "name").text == "@gpt2"
    assert len(page.find_elements("css selector", "#links tbody tr")) == 2
    assert page.find_element("id", "difference-section").is_displayed()
    assert not page.find_element("id", "alternatives-section").is_displayed()


def test_the_search_jumps_to_a_weight_in_a_folded_layer(page: Any):
    before = page.find_element("id", "graph-picture").get_property("dataset")["left"]
    press(page, "/")
    assert page.switch_to.active_element.get_attribute("id") == "search"
    press(page, "h.4.mlp.c_fc.weight")
    found = page.find_elements("css selector", "#found [role=option]")
    assert [each.text.split()[0] for each in found] == ["h.4.mlp.c_fc.weight"]
    press(page, "\ue007")
    assert page.find_element("css selector", "#details h3").text == "weight h.4.mlp.c_fc.weight"
    assert page.switch_to.active_element.get_attribute("id") == "graph-picture"
    wait_until(lambda: page.find_element("id", "graph-picture").get_property("dataset")["left"] != before)
    assert "Layout per mesh axis" in page.find_element("id", "details").text


def test_a_click_shows_what_is_in_the_middle(page: Any):
    """The chosen weight is in the middle: a click a little below it is on the operator that reads it."""
    actions = pytest.importorskip("selenium.webdriver").ActionChains(page)
    canvas = page.find_element("id", "graph-picture")
    actions.move_to_element_with_offset(canvas, 0, 30).click().perform()
    assert page.find_element("css selector", "#details h3").text.startswith("matmul")
    details = page.find_element("id", "details").text
    assert "forward" in details
    assert "h.4.mlp.c_fc.weight" in details, "what it reads can be jumped to"
    press(page, "\ue00c")
    assert "slowest" in page.find_element("id", "details").text


def test_keys_zoom_and_move_the_timeline(page: Any):
    canvas = page.find_element("id", "timeline-picture")
    page.execute_script("arguments[0].focus()", canvas)
    whole = span(page)
    press(page, "\ue013", "\ue013")
    wait_until(lambda: span(page) == pytest.approx(whole / 2.25))
    begin = float(canvas.get_property("dataset")["from"])
    press(page, "\ue014")
    wait_until(lambda: float(canvas.get_property("dataset")["from"]) > begin)
    press(page, "n", "n")
    assert " from " in (first := page.find_element("id", "task").text)
    press(page, "l")
    assert page.find_element("id", "task").text not in ("", first)
    press(page, "\ue011")
    wait_until(lambda: span(page) == pytest.approx(whole))


def test_all_is_reached_by_tab(page: Any):
    page.execute_script("""
      document.querySelector(".skip").focus();
      window.reached = [];
      document.addEventListener("focusin", (event) => window.reached.push(event.target.id));""")
    press(page, "\ue004" * 30)
    wanted = ["search", "graph-picture", "details", "timeline-picture"]
    # An element may have the focus twice in a row, as the window may.
    reached = dict.fromkeys(page.execute_script("return window.reached"))
    assert [i for i in reached if i in wanted] == wanted


def test_a_name_with_markup_is_shown_and_does_nothing(page: Any, tmp_path: Path):
    ui.plan(MODEL, machine="2gpu", search="data-parallel").report(tmp_path / "nasty.html")
    page.get((tmp_path / "nasty.html").as_uri())
    assert page.title.startswith(f"@{FUNCTION} on 2gpu")
    press(page, "/")
    press(page, "</script ", "\ue007")
    shown = page.find_element("css selector", "#details h3").text
    assert shown == "weight " + NASTY
    assert not page.find_elements("css selector", "#details b")


def test_no_page_had_an_error(page: Any):
    assert [each for each in page.get_log("browser") if each["level"] in ("SEVERE", "WARNING")] == []
