"""What a page must be for people who read it with a screen reader, a keyboard or weak eyes.

The checks that matter for this page, after the rules of the same names of axe-core, which no
maintained package of Python brings.
"""

from __future__ import annotations

from typing import Final

from tests.support.browser import Browser

CHECKS: Final = r"""
const seen = (node) => node.checkVisibility({ visibilityProperty: true });
const all = (selector) => [...document.querySelectorAll(selector)].filter(seen);
const told = (node) => node.outerHTML.slice(0, 120);
const found = [];
const fail = (rule, node, why = "") => found.push(`${rule}: ${told(node)} ${why}`);

const name = (node) => (node.getAttribute("aria-label")
  || (node.getAttribute("aria-labelledby") || "").split(" ").filter(Boolean)
    .map((id) => document.getElementById(id)?.textContent).join(" ")
  || [...(node.labels || [])].map((label) => label.textContent).join(" ")
  || (node.matches("button, a, summary, th, h1, h2, h3") ? node.textContent : "")).trim();
const controls = "button, a[href], input, select, textarea, summary, dialog";
for (const node of all(`${controls}, [role=slider], [role=region]`))
  if (!name(node)) fail("name", node);
for (const node of all("h1, h2, h3, th")) if (!node.textContent.trim()) fail("empty", node);

const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
for (const [at, id] of ids.entries()) if (ids.indexOf(id) !== at) found.push(`two have id ${id}`);
for (const node of document.querySelectorAll("[aria-labelledby]"))
  if (!document.getElementById(node.getAttribute("aria-labelledby"))) fail("aria-labelledby", node);

let level = 0;
for (const node of all("h1, h2, h3, h4")) {
  const own = Number(node.tagName[1]);
  if (own > level + 1) fail("heading order", node, `after h${level}`);
  level = own;
}
if (all("h1").length !== 1) found.push("not one h1");
if (all("main").length !== 1) found.push("not one main");
if (!document.documentElement.lang) found.push("no language");

for (const node of all("[role=slider]"))
  for (const wanted of ["aria-valuenow", "aria-valuetext"])
    if (!node.hasAttribute(wanted) || node.tabIndex < 0) fail("slider", node, wanted);
for (const node of all("th")) if (!node.scope) fail("scope of a head", node);
for (const node of all("ul > :not(li), ol > :not(li)")) fail("list", node);
for (const node of all("body *")) {
  const style = getComputedStyle(node);
  const scrolls = (way, over) => ["auto", "scroll"].includes(way) && over > 1;
  const wide = scrolls(style.overflowX, node.scrollWidth - node.clientWidth);
  const high = scrolls(style.overflowY, node.scrollHeight - node.clientHeight);
  const own = node.matches("dialog, textarea, select");
  if ((wide || high) && node.tabIndex < 0 && !own) fail("scrolled by keyboard", node);
}

const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgba = (colour) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const luminance = (parts) => {
  const linear = (part) => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4;
  const [r, g, b] = parts.map((part) => linear(part / 255));
  return .2126 * r + .7152 * g + .0722 * b;
};
const behind = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const colour = rgba(getComputedStyle(at).backgroundColor);
    if (colour[3] === 255) return colour;
  }
  return [255, 255, 255, 255];
};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let count = 0;
while (texts.nextNode()) {
  const node = texts.currentNode.parentElement;
  const empty = !texts.currentNode.data.trim();
  if (empty || !seen(node) || node.closest("option, script, style")) continue;
  const both = [rgba(getComputedStyle(node).color), behind(node)].map(luminance);
  const ratio = (Math.max(...both) + .05) / (Math.min(...both) + .05);
  count++;
  if (ratio < 4.5) fail("contrast", node, ratio.toFixed(2));
}
if (!count) found.push("no text");
return [...new Set(found)];
"""


def barriers(browser: Browser) -> list[str]:
    """What stands in somebody's way on the page as it is now; each names its rule."""
    return [str(each) for each in browser.run(CHECKS)]
