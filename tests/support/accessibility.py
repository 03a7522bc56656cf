"""What stands in the way of people who read a page with a screen reader, a keyboard or weak eyes.

axe-core judges the page. Its script is the one that the wheel of axe-playwright-python brings
(``make`` installs it without playwright, which nothing here uses). A few checks are ours: what
axe-core leaves to the author of a page, and what this project wants of its own pages.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Final

from tests.support.browser import Browser
from tests.support.programs import skip

PACKAGE: Final = "axe_playwright_python"

JUDGED: Final = """
const done = arguments[arguments.length - 1];
const wanted = { rules: { 'target-size': { enabled: true } }, resultTypes: ['violations'] };
axe.run(document, wanted).then((judged) => {
  if (!judged.passes.length) done(['axe-core has found nothing to judge']);
  else done(judged.violations.flatMap((rule) => rule.nodes.map((node) =>
    `${rule.id}: ${node.target.join(' ')} ${node.html.slice(0, 120)} `
    + [...node.any, ...node.all, ...node.none].map((check) => check.message).join('; '))));
}, (error) => done([`axe-core failed: ${error}`]));
"""
"""All rules that axe-core has on by default, and the size of targets. Where it cannot determine the
background of a text, it says nothing."""

OURS: Final = r"""
const all = (selector) => [...document.querySelectorAll(selector)];
const found = [];
const fail = (rule, node) => found.push(`${rule}: ${node.outerHTML.slice(0, 120)}`);
const ids = all("[id]").map((node) => node.id);
for (const [at, id] of ids.entries()) if (ids.indexOf(id) !== at) found.push(`two have id ${id}`);
for (const node of all("[role=slider]:not([aria-valuetext])")) fail("slider", node);
for (const node of all("[role=region]:not([aria-label], [aria-labelledby])")) fail("name", node);
return found;
"""


@functools.cache
def axe_core() -> str:
    """The script. Skips without; fails then with ``CI=true``."""
    try:
        return (resources.files(PACKAGE) / "axe.min.js").read_text()
    except ModuleNotFoundError:
        skip("there is no axe-core: make builds an environment with it")


def barriers(browser: Browser) -> list[str]:
    """What stands in somebody's way on the page as it is now; each names its rule."""
    browser.run(axe_core())
    judged = browser.driver.execute_async_script(JUDGED)
    return [str(each) for each in [*judged, *browser.run(OURS)]]
