"""A headless Chromium for tests of the dashboard, and what it complains of."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Final

from tests.support.programs import need_program, skip

PHONE: Final = (375, 812)
TABLET: Final = (768, 1024)
DESK: Final = (1280, 900)


class Browser:
    """One page. ``requests`` and ``complaints`` collect from the start."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, port: int, view: str = "overview", *, size: tuple[int, int] = DESK) -> None:
        self.resize(size)
        self.driver.get(f"http://127.0.0.1:{port}/#{view}")

    def resize(self, size: tuple[int, int]) -> None:
        """Width and height of the window, in pixels."""
        width, height = size
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE},
        )

    def theme(self, name: str) -> None:
        """light or dark, as the system of the user has it."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def view(self, name: str) -> None:
        self.run(f"location.hash = '{name}'")

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """What a user reads there; empty: it is hidden, or not there."""
        script = (
            "const found = document.querySelector(arguments[0]);"
            "return found?.checkVisibility() ? found.innerText : ''"
        )
        return str(self.run(script, selector))

    def texts(self, selector: str) -> list[str]:
        """The text of each, whether it can be seen or not."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return [str(each) for each in self.run(script, selector)]

    def complaints(self) -> list[str]:
        """Errors, refused content and whatever else the console says, since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last call."""
        entries = [
            json.loads(each["message"])["message"] for each in self.driver.get_log("performance")
        ]
        return [
            entry["params"]["request"]["url"]
            for entry in entries
            if entry["method"] == "Network.requestWillBeSent"
        ]


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """Skips without Chromium; fails then with ``CI=true``."""
    chromium = need_program("chromium", "chromium")
    chromedriver = need_program("chromedriver", "chromium-driver")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        skip("there is no selenium: pip install '.[test,dev]'")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",  # which needs a right that root in a container has not
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-proxy-server",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
