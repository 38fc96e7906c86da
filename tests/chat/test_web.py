"""The web page: its HTML, and the page itself in a real browser at desktop and phone widths."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import httpx
import pytest

from eagle_mars.chat.client import Answer, Choice, ShownToken
from eagle_mars.chat.web_view import answer_html, error_html, statistics_html, text_html
from tests.chat.processes import Server, free_port

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

BEST = (Choice(" the", 12.5, -0.5), Choice(" a", 12.0, -1.0))


def shown(text: str, provenance: str) -> ShownToken:
    return ShownToken(text, provenance, BEST)


def test_only_relaxed_tokens_are_marked_with_both_candidates() -> None:
    html = answer_html(Answer([shown("See", "target"), shown(" a", "relaxed"), shown(" cat", "exact")]))
    assert html.count("<mark") == 1
    assert "See <mark" in html
    assert ">a</mark> cat" in html
    for part in (
        "&quot; the&quot;  z 12.50  p 0.61",
        "&quot; a&quot;  z 12.00  p 0.37  taken",
        "z2/z1 0.960",
        "0.50 nats",
    ):
        assert part in html


def test_whatever_the_model_writes_stays_text() -> None:
    evil = '<script>alert(1)</script>\n\n"</div><img src=x onerror=alert(1)>\r\r[x](javascript:alert(1))'
    for html in (answer_html(Answer([shown(evil, "relaxed")])), text_html(evil), error_html(evil)):
        assert "<script" not in html
        assert "<img" not in html
    lines = answer_html(Answer([shown(evil, "exact")])).splitlines()
    assert len(lines) == 1  # a blank line would end the HTML block, and Markdown would read the rest


def test_the_line_of_counts_lives_and_ends_with_the_guarantee() -> None:
    answer = Answer([shown(" x", kind) for kind in ("target", "exact", "relaxed", "target")], seconds=2.0)
    running = statistics_html(answer)
    assert 'data-state="running"' in running
    assert "<b>2.0</b> tokens/s" in running
    assert "τ <b>3.00</b>" in running
    answer.completion_tokens = 4
    answer.speculation = {"tau": 2.5, "exact_prefix_tokens": 2, "regret": 0.51, "guarantee": "Lossy: <some>."}
    done = statistics_html(answer)
    assert 'data-state="done"' in done
    for part in (
        "τ <b>2.50</b>",
        "<b>1</b> relaxed",
        "first <b>2</b> exact",
        "<b>0.51</b> nats",
        "Lossy: &lt;some&gt;.",
    ):
        assert part in done


@pytest.fixture(scope="module")
def page(tiny_pair, tmp_path_factory) -> Iterator[str]:
    pytest.importorskip("gradio", reason="gradio isn't installed: pip install 'eagle-mars[web]'")
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium and chromedriver aren't installed")
    port = str(free_port())
    pair = ("--model", tiny_pair[0], "--head", tiny_pair[1], "--total-token", "8", "--depth", "3", "--top-k", "4")
    server = Server(tmp_path_factory.mktemp("web") / "web.log", "web", "--port", port, *pair)
    url = f"http://127.0.0.1:{port}"
    server.wait_until(lambda: _answers(url))
    yield url
    server.stop()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).is_success
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield Browser(driver)
    driver.quit()


class Browser:
    """The few things that the tests do in a page."""

    def __init__(self, driver) -> None:
        self.driver = driver

    def open(self, url: str, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get(url)
        self.wait("#em-prompt textarea")

    def all(self, selector: str) -> list:
        return self.driver.find_elements("css selector", selector)

    def wait(self, selector: str) -> list:
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, 240).until(lambda _: self.all(selector))

    def type(self, selector: str, text: str) -> None:
        self.wait(selector)[0].send_keys(text)

    def click(self, element) -> None:
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'}); arguments[0].click()", element)

    def shorten_answers(self) -> None:
        """As a user would: the number beside the slider."""
        from selenium.webdriver.common.keys import Keys

        self.wait("#em-length input[type=number]")[0].send_keys(Keys.CONTROL, "a", Keys.NULL, "32", Keys.ENTER)

    def overflows(self) -> bool:
        return self.driver.execute_script("return document.documentElement.scrollWidth > window.innerWidth")


def choose_rule(browser: Browser, rule: str) -> None:
    browser.click(browser.wait(f"#em-rule input[value='{rule}']")[0])


def test_switching_the_rule_shows_relaxed_tokens(page: str, browser: Browser) -> None:
    browser.open(page, 1280, 860)
    browser.shorten_answers()
    choose_rule(browser, "exact")
    browser.type("#em-prompt textarea", "hello\n")
    exact = browser.wait("#em-chat-statistics [data-state=done]")[0].text
    assert exact.startswith("32 tokens")
    assert "0 relaxed" in exact
    assert "Lossless" in exact
    assert not browser.all("#em-chat mark")
    choose_rule(browser, "mars")
    browser.click(browser.all("#em-again")[0])
    mark = browser.wait("#em-chat mark.em-relaxed")[0]
    browser.wait("#em-chat-statistics [data-state=done]")
    mark = browser.wait("#em-chat mark.em-relaxed")[0]
    browser.click(mark)
    tip = browser.wait("#em-tip:not([hidden])")[0]
    assert "taken" in tip.text
    assert "margin" in tip.text
    box = tip.rect
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 1280
    assert not browser.overflows()


def test_side_by_side_on_a_phone(page: str, browser: Browser) -> None:
    browser.open(page, 390, 844)
    browser.shorten_answers()
    tab = next(button for button in browser.wait("button[role=tab]") if "Exact" in button.text)
    browser.click(tab)
    browser.type("#em-pair-prompt textarea", "hello\n")
    browser.wait("#em-relaxed-statistics [data-state=done]")
    assert browser.all("#em-relaxed mark.em-relaxed")
    assert not browser.all("#em-exact mark")
    left, right = (browser.all(f"#em-{name}")[0].rect for name in ("exact", "relaxed"))
    assert right["y"] > left["y"] + left["height"]  # one below the other
    browser.click(browser.all("#em-relaxed mark.em-relaxed")[-1])
    tip = browser.wait("#em-tip:not([hidden])")[0].rect
    assert 0 <= tip["x"] <= tip["x"] + tip["width"] <= 390
    assert not browser.overflows()
    errors = [entry for entry in browser.driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert not errors
