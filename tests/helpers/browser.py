"""A real browser without a window, Debian's chromium, driven by selenium. It records what a page asks for."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no browser; Debian: apt-get install chromium chromium-driver"
)


@contextmanager
def browser(width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Chrome]:
    """A browser whose console and requests are logged."""
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=ChromeService(str(DRIVER)))
    try:
        driver.set_script_timeout(120)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
    finally:
        driver.quit()


def open_page(driver: Chrome, page: Path, until: str = "document.body.dataset.ready === 'all'") -> None:
    """Opens a file, and waits until its scripts are done."""
    driver.get(page.resolve().as_uri())
    wait(driver, until)


def wait(driver: Chrome, condition: str) -> None:
    """Waits until an expression of the page is true."""
    script = """
        const done = arguments[0];
        const holds = () => { try { return %s } catch { return false } };
        const look = () => (holds() ? done(true) : setTimeout(look, 5));
        look();
    """
    driver.execute_async_script(script % condition)


def texts_of(driver: Chrome, selector: str) -> list[str]:
    """The texts of the elements that a selector finds."""
    script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
    return [str(text) for text in driver.execute_script(script, selector)]


def console(driver: Chrome) -> list[str]:
    """What the page wrote to the console: errors, warnings, violations of its policy."""
    return [entry["message"] for entry in driver.get_log("browser")]


def requests(driver: Chrome) -> list[str]:
    """Everything that the browser has asked for since the last call, but for the page itself."""
    urls: list[str] = []
    for entry in driver.get_log("performance"):
        message: dict[str, Any] = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            urls.append(message["params"]["request"]["url"])
    return [url for url in urls if not url.startswith(("data:", "blob:")) and not url.endswith(".html")]
