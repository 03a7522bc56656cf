"""The colours of the dashboard: every text can be read on every background, in both themes."""

from __future__ import annotations

import re
from importlib import resources
from typing import Final

import pytest

TEXTS: Final = ("text", "quiet", "blue", "orange", "green", "red")
BACKGROUNDS: Final = ("back", "card", "bad", "warning", "note")
RATIO_MIN: Final = 4.5
"""Of WCAG 2.2, level AA."""


def themes() -> dict[str, dict[str, str]]:
    """The colours by name, of the light and the dark theme."""
    style = (resources.files("kvstore.web.dashboard") / "page/page.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    return {
        theme: dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})", block))
        for theme, block in zip(("light", "dark"), blocks, strict=True)
    }


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_ratio_is_that_of_the_standard() -> None:
    assert contrast("#000", "#fff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_can_be_read_on_every_background(theme: str) -> None:
    colours = themes()[theme]
    poor = {
        (text, back): round(contrast(colours[text], colours[back]), 2)
        for text in TEXTS
        for back in BACKGROUNDS
        if contrast(colours[text], colours[back]) < RATIO_MIN
    }
    assert poor == {}
