"""What docs/from-mooncake.md says of keys is what the code does."""

from __future__ import annotations

import re
from typing import Final

import pytest
from markdown_it import MarkdownIt

from kvstore.config import ProxyConfig
from kvstore.connectors.common import mooncake_config
from kvstore.connectors.vllm.config import OF_VLLM, RENAMED
from tests.support.processes import ROOT

PAGE: Final = ROOT / "docs/from-mooncake.md"
FIRST_PROMPTS: Final = ["docs/engines/index.md", "docs/vllm.md", "docs/from-mooncake.md"]
"""The pages with a prompt that shows a hit."""
CPU_BLOCK_TOKENS: Final = 128
"""Of vLLM's cache on a CPU, unless it is told otherwise."""

Rows = list[list[str]]


def tables() -> list[Rows]:
    """The cells of each table, without its head."""
    found: list[Rows] = []
    is_body = False
    for token in MarkdownIt("commonmark").enable("table").parse(PAGE.read_text()):
        if token.type == "tbody_open":
            found.append([])
            is_body = True
        elif token.type == "tbody_close":
            is_body = False
        elif is_body and token.type == "tr_open":
            found[-1].append([])
        elif is_body and token.type == "inline":
            found[-1][-1].append(token.content)
    return found


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def table_of(name: str) -> dict[str, str]:
    """By name in the first column: the last cell of its row, in the table that has ``name``."""
    rows = next(each for each in tables() if any(name in names(row[0]) for row in each))
    return {found: row[-1] for row in rows for found in names(row[0])}


def ignored_in(told: dict[str, str]) -> set[str]:
    return {name for name, cell in told.items() if cell.startswith("ignored")}


def test_the_keys_of_mooncake_json() -> None:
    told = table_of("master_server_address")
    assert set(told) == {*mooncake_config.MEANT, *mooncake_config.IGNORED}
    assert ignored_in(told) == mooncake_config.IGNORED


def test_the_options_of_vllms_own_connectors() -> None:
    told = table_of("num_workers")
    assert set(told) == {*OF_VLLM, *RENAMED}
    assert ignored_in(told) == OF_VLLM


def test_what_vllm_itself_refuses() -> None:
    from vllm.config import kv_transfer

    told = table_of("kv_rank")
    for name, cell in told.items():
        is_refused = "vLLM 0.32" in cell
        given = {"kv_role": "kv_both", "kv_connector": "KVStoreConnector"}
        if is_refused:
            with pytest.raises((TypeError, ValueError), match=name):
                kv_transfer.KVTransferConfig(**given, **{name: 1})
        else:
            assert name in kv_transfer.KVTransferConfig.__dataclass_fields__


@pytest.mark.parametrize("name", FIRST_PROMPTS)
def test_the_prompt_is_long_enough(name: str) -> None:
    text = (ROOT / name).read_text()
    (last,) = re.findall(r"\$\(seq -s ' ' 1 (\d+)\)", text)
    assert int(last) >= ProxyConfig().prefill_threshold + CPU_BLOCK_TOKENS
    assert str(CPU_BLOCK_TOKENS) in text


def test_the_page_says_which_prompts_the_proxy_takes_to_a_prefiller() -> None:
    assert str(ProxyConfig().prefill_threshold) in PAGE.read_text()
